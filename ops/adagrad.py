"""Adagrad under DeepSpeed's name."""

from __future__ import annotations

from ..engine.optim.deepspeed_names import DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
