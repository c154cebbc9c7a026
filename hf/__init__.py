"""Hugging Face's Trainer, accelerate and peft, unmodified, on Stateroom: they ask for `deepspeed`, and Stateroom answers."""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "AliasError": ".alias",
    "Loaded": ".loading",
    "disable": ".alias",
    "enable": ".alias",
    "load_safetensors": ".loading",
}

__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name], __name__), name)
    globals()[name] = value
    return value
