"""What DeepSpeed scripts import to recognise and gather sharded parameters."""

from __future__ import annotations

from ...zero.access import GatheredParameters, register_external_parameter
from ...zero.init import Init
from ...zero.parameter import ZeroParamStatus

__all__ = ["GatheredParameters", "Init", "ZeroParamStatus", "register_external_parameter"]
