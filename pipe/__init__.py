"""A model as a list of layers, cut into stages that pass activations on. Names are looked up on first use."""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "LayerSpec": ".specs",
    "PipeDataParallelTopology": ".topology",
    "PipeModelDataParallelTopology": ".topology",
    "PipelineModule": ".module",
    "ProcessTopology": ".topology",
    "TiedLayerSpec": ".specs",
}

__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name], __name__), name)
    globals()[name] = value
    return value
