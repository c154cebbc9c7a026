"""Command-line arguments that DeepSpeed scripts expect, and finding the config among them."""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import ConfigError


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed, --deepspeed_config and --stateroom_config to the parser and return it."""
    group = parser.add_argument_group("Stateroom", "training engine")
    group.add_argument("--deepspeed", action="store_true", default=False, help="accepted; the engine is used whenever initialize is called")
    group.add_argument("--deepspeed_config", "--stateroom_config", default=None, type=str, help="path of the config (json or hjson)")
    group.add_argument("--deepscale", action="store_true", default=False, help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", default=None, type=str, help=argparse.SUPPRESS)
    return parser


def find_config(config: Any, config_params: Any, args: Any) -> Any:
    """Return the one config that the caller gave, as argument or in `args`.

    Raises:
        ConfigError: none was given, or two.
    """
    given = {
        "config": config,
        "config_params": config_params,
        "args.stateroom_config": getattr(args, "stateroom_config", None),
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
        "args.deepscale_config": getattr(args, "deepscale_config", None),
    }
    found = {name: value for name, value in given.items() if value is not None}
    if not found:
        raise ConfigError('no config: pass config="ds.json" (a path, dict or JSON string) to initialize, or --deepspeed_config')
    if len(found) > 1 and len({repr(value) for value in found.values()}) > 1:
        raise ConfigError(f"two configs were given: {' and '.join(found)}; pass one")
    return next(iter(found.values()))
