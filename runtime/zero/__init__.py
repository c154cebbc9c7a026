"""ZeRO's names where DeepSpeed scripts import them from."""

from __future__ import annotations

from . import offload_config, partition_parameters, stage3, stage_1_and_2
from .partition_parameters import GatheredParameters, Init, ZeroParamStatus, register_external_parameter

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "offload_config",
    "partition_parameters",
    "register_external_parameter",
    "stage3",
    "stage_1_and_2",
]
