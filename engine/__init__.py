"""One training step: initialize, Engine, precision, optimizers, schedules."""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "Engine": ".engine",
    "PipelineEngine": ".pipeline",
    "add_config_arguments": ".arguments",
    "initialize": ".initialize",
}

__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name], __name__), name)
    globals()[name] = value
    return value
