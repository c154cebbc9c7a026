"""Stateroom: a training engine for PyTorch, one DeepSpeed-style config away from an unmodified nn.Module.

Importing this package loads no tensor library and touches no device: every public name is looked up on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

from .version import __version__

# public name -> (module, attribute); attribute None means the module itself
_LAZY: dict[str, tuple[str, str | None]] = {
    "initialize": (".engine.initialize", "initialize"),  # the module of this name may be imported before
    "Engine": (".engine", "Engine"),
    "DeepSpeedEngine": (".engine", "Engine"),
    "add_config_arguments": (".engine", "add_config_arguments"),
    "init_distributed": (".parallel", "init_distributed"),
    "get_accelerator": (".parallel", "get_accelerator"),
    "comm": (".parallel.comm", None),
    "zero": (".zero", None),
    "OnDevice": (".zero", "OnDevice"),
    "utils": (".utils", None),
    "log_dist": (".utils.logging", "log_dist"),
    "logger": (".utils.logging", "logger"),
    "checkpoint": (".checkpoint", None),
    "checkpointing": (".engine.checkpointing", None),
    "hf": (".hf", None),
    "pipe": (".pipe", None),
    "PipelineModule": (".pipe", "PipelineModule"),
    "PipelineEngine": (".engine", "PipelineEngine"),
    "ops": (".ops", None),
    "runtime": (".runtime", None),
    "ConfigError": (".errors", "ConfigError"),
    "DeepSpeedConfigError": (".errors", "ConfigError"),
    "CheckpointError": (".errors", "CheckpointError"),
    "LayoutError": (".errors", "LayoutError"),
    "RankError": (".errors", "RankError"),
    "EngineError": (".errors", "EngineError"),
    "StateroomError": (".errors", "StateroomError"),
}

_TRAINS = "this is a training engine: save the weights with engine.save_16bit_model() and serve them elsewhere"
# names of DeepSpeed's that scripts may ask for in vain -> why
_ABSENT = {
    "moe": "this version has no layer for experts; a model's own experts are trained like any module",
    "init_inference": _TRAINS,
    "tp_model_init": "this version does not cut matrices over ranks; ZeRO-3 shards them for training",
    "DeepSpeedConfig": "pass the file, dict or JSON string itself to initialize(); `stateroom config show` prints it resolved",
}

__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    try:
        module_name, attribute = _LAZY[name]
    except KeyError:
        reason = f": {_ABSENT[name]}" if name in _ABSENT else ""
        raise AttributeError(f"module 'stateroom' has no attribute {name!r}{reason}") from None
    module = importlib.import_module(module_name, __name__)
    value = module if attribute is None else getattr(module, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
