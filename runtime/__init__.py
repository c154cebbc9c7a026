"""The import paths under which DeepSpeed scripts find schedules, pipelines, ZeRO names and helpers; nothing is implemented here."""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = ("lr_schedules", "pipe", "utils", "zero")

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
