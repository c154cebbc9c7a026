"""Helpers under DeepSpeed's names: whole states of single parameters, groups, logger."""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "..zero.access": (
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
    ),
    "..zero.leaf": (
        "get_z3_leaf_modules",
        "set_z3_leaf_module",
        "set_z3_leaf_modules",
        "set_z3_leaf_modules_by_name",
        "set_z3_leaf_modules_by_suffix",
        "unset_z3_leaf_modules",
        "z3_leaf_module",
    ),
    "..zero.device": ("OnDevice",),
    "..engine.data": ("RepeatingLoader",),
    "..engine.progress": ("get_logger",),
    ".logging": ("log_dist", "logger"),
}
_LAZY = {name: module for module, names in _NAMES.items() for name in names}
_MODULES = ("groups", "logging", "zero_to_fp32")

__all__ = sorted([*_LAZY, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name], __name__), name)
    globals()[name] = value
    return value
