"""States on storage: save, load, verify, convert, import and export. Names are looked up on first use."""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "CheckpointError": "..errors",
    "Parameter": ".source",
    "Source": ".source",
    "open_source": ".opener",
    "load_state_dict_from_checkpoint": ".state_dict",
    "convert_to_universal": ".universal",
    "export": ".exporting",
    "import_checkpoint": ".importing",
    "verify": ".verifying",
    "pin": ".retention",
    "unpin": ".retention",
    "get_fp32_state_dict_from_zero_checkpoint": "..utils.zero_to_fp32",
    "load_state_dict_from_zero_checkpoint": "..utils.zero_to_fp32",
    "convert_zero_checkpoint_to_fp32_state_dict": "..utils.zero_to_fp32",
}

__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
