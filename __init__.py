"""Stateroom: a training engine for PyTorch, one DeepSpeed-style config away from an unmodified nn.Module.

Importing this package loads no tensor library and touches no device: every public name is looked up on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

from .version import __version__

# public name -> (module, attribute); attribute None means the module itself
_LAZY: dict[str, tuple[str, str | None]] = {
    "initialize": (".engine", "initialize"),
    "Engine": (".engine", "Engine"),
    "DeepSpeedEngine": (".engine", "Engine"),
    "add_config_arguments": (".engine", "add_config_arguments"),
    "init_distributed": (".parallel", "init_distributed"),
    "get_accelerator": (".parallel", "get_accelerator"),
    "comm": (".parallel.comm", None),
    "zero": (".zero", None),
    "OnDevice": (".zero", "OnDevice"),
    "utils": (".utils", None),
    "checkpointing": (".engine.checkpointing", None),
    "ops": (".ops", None),
    "ConfigError": (".errors", "ConfigError"),
    "DeepSpeedConfigError": (".errors", "ConfigError"),
    "CheckpointError": (".errors", "CheckpointError"),
    "LayoutError": (".errors", "LayoutError"),
    "RankError": (".errors", "RankError"),
    "EngineError": (".errors", "EngineError"),
    "StateroomError": (".errors", "StateroomError"),
}

__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    try:
        module_name, attribute = _LAZY[name]
    except KeyError:
        raise AttributeError(f"module 'stateroom' has no attribute {name!r}") from None
    module = importlib.import_module(module_name, __name__)
    value = module if attribute is None else getattr(module, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
