"""Adam under DeepSpeed's names."""

from __future__ import annotations

from ..engine.optim.deepspeed_names import DeepSpeedCPUAdam, FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
