"""Lion under DeepSpeed's names."""

from __future__ import annotations

from ..engine.optim.deepspeed_names import DeepSpeedCPULion, FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
