"""ZeRO's names where DeepSpeed scripts import them from."""

from __future__ import annotations

from ...zero.access import GatheredParameters, register_external_parameter
from ...zero.init import Init
from ...zero.parameter import ZeroParamStatus

__all__ = ["GatheredParameters", "Init", "ZeroParamStatus", "register_external_parameter"]
