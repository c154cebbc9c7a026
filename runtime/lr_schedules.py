"""The learning-rate schedules where DeepSpeed scripts import them from."""

from __future__ import annotations

from ..engine.schedule_arguments import add_tuning_arguments, get_lr_from_config
from ..engine.schedules import VALID_LR_SCHEDULES, LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "VALID_LR_SCHEDULES",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "add_tuning_arguments",
    "get_lr_from_config",
]
