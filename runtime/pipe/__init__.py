"""The import paths under which DeepSpeed scripts find pipelines; nothing is implemented here."""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = ("engine", "module", "topology")

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
