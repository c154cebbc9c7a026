"""What a config may say: loading from any source, one typed section per topic, "auto", batch sizes, verdicts, JSON Schema."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .auto import Facts
    from .batch import Batch, nearest_legal, solve_batch
    from .loading import load
    from .notes import Note, Verdict
    from .root import Config

# looked up on first use, so that `stateroom config --help` needs no validator
_LAZY = {
    "Batch": ".batch",
    "Config": ".root",
    "Facts": ".auto",
    "Note": ".notes",
    "Verdict": ".notes",
    "load": ".loading",
    "nearest_legal": ".batch",
    "solve_batch": ".batch",
}

__all__ = ["Batch", "Config", "Facts", "Note", "Verdict", "load", "nearest_legal", "solve_batch"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name], __name__), name)
