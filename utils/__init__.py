"""Helpers under DeepSpeed's names: whole states of single parameters, groups, logger."""

from __future__ import annotations

import importlib
from typing import Any

_ACCESS = "..zero.access"
_LAZY = {
    **{
        name: _ACCESS
        for name in (
            "safe_get_full_fp32_param",
            "safe_get_full_grad",
            "safe_get_full_optimizer_state",
            "safe_get_local_fp32_param",
            "safe_get_local_grad",
            "safe_get_local_optimizer_state",
            "safe_set_full_fp32_param",
            "safe_set_full_grad",
            "safe_set_full_optimizer_state",
            "safe_set_local_fp32_param",
            "safe_set_local_grad",
            "safe_set_local_optimizer_state",
        )
    },
    "RepeatingLoader": "..engine.data",
    "get_logger": "..engine.progress",
    "log_dist": ".logging",
    "logger": ".logging",
    "groups": ".groups",
    "set_z3_leaf_modules": ".leaf",
}

__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_LAZY[name], __name__)
    value = module if name == "groups" else getattr(module, name)
    globals()[name] = value
    return value
