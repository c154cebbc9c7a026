"""Where parameters, gradients and optimizer states live: layout, placement, units, their schedule, the sharded optimizer."""

from __future__ import annotations

import importlib
from typing import Any

# looked up on first use: layout and placement must not load torch
_LAZY = {
    "GatheredParameters": ".access",
    "Init": ".init",
    "Layout": ".layout",
    "OnDevice": ".device",
    "Placement": ".placement",
    "Precision": ".model",
    "STAGES": ".placement",
    "ShardedModel": ".model",
    "ShardedOptimizer": ".optimizer",
    "UnitOptions": ".model",
    "ZeroParamStatus": ".parameter",
    "estimate_zero2_model_states_mem_needs_all_cold": ".estimate",
    "estimate_zero2_model_states_mem_needs_all_live": ".estimate",
    "estimate_zero3_model_states_mem_needs_all_cold": ".estimate",
    "estimate_zero3_model_states_mem_needs_all_live": ".estimate",
    "register_external_parameter": ".access",
    "unregister_external_parameter": ".access",
    "unwrap_model_for_generation": ".access",
}

__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name], __name__), name)
    globals()[name] = value
    return value
