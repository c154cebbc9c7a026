"""LAMB under DeepSpeed's name."""

from __future__ import annotations

from ..engine.optim.deepspeed_names import FusedLamb

__all__ = ["FusedLamb"]
