"""Command-line arguments for learning-rate schedules, and the rate that a schedule's config names."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from .schedules import VALID_LR_SCHEDULES

# option -> (default, help); a default of False makes a switch. Names and defaults are DeepSpeed's.
_ARGUMENTS: dict[str, tuple[Any, str]] = {
    "lr_range_test_min_lr": (0.001, "rate at the start of the range test"),
    "lr_range_test_step_rate": (1.0, "growth of the rate in each interval"),
    "lr_range_test_step_size": (1000, "steps of an interval"),
    "lr_range_test_staircase": (False, "raise the rate in stairs"),
    "cycle_first_step_size": (1000, "steps in which the rate rises"),
    "cycle_first_stair_count": (-1, "stairs of the rise"),
    "cycle_second_step_size": (-1, "steps in which it falls; -1: as many as it rises"),
    "cycle_second_stair_count": (-1, "stairs of the fall"),
    "decay_step_size": (1000, "steps of a decay interval behind the cycle"),
    "cycle_min_lr": (0.01, "lowest rate of the cycle"),
    "cycle_max_lr": (0.1, "highest rate of the cycle"),
    "decay_lr_rate": (0.0, "decay of the rate in each interval"),
    "cycle_momentum": (False, "move momentum against the rate"),
    "cycle_min_mom": (0.8, "lowest momentum"),
    "cycle_max_mom": (0.9, "highest momentum"),
    "decay_mom_rate": (0.0, "decay of momentum in each interval"),
    "warmup_min_lr": (0.0, "rate at the start of the warmup"),
    "warmup_max_lr": (0.001, "rate at its end"),
    "warmup_num_steps": (1000, "steps of the warmup"),
    "warmup_type": ("log", "shape of the warmup: log or linear"),
    "warmup_min_ratio": (0.01, "WarmupCosineLR: share of the rate at the start"),
    "cos_min_ratio": (0.01, "WarmupCosineLR: share of the rate at the end"),
}

# scheduler -> the parameter that holds its highest (for the range test: first) rate
_RATE_OF = {
    "LRRangeTest": "lr_range_test_min_lr",
    "OneCycle": "cycle_max_lr",
    "WarmupLR": "warmup_max_lr",
    "WarmupDecayLR": "warmup_max_lr",
}


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --lr_schedule and the parameters of the five schedules to the parser and return it."""
    group = parser.add_argument_group("learning-rate schedule")
    group.add_argument("--lr_schedule", type=str, default=None, help=f"one of {', '.join(VALID_LR_SCHEDULES)}")
    for name, (default, text) in _ARGUMENTS.items():
        if default is False:
            group.add_argument(f"--{name}", action="store_true", default=False, help=text)
        else:
            group.add_argument(f"--{name}", type=type(default), default=default, help=text)
    return parser


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | None, str]:
    """Return (rate, "") that a config's `scheduler` section leads to, or (None, why it names none)."""
    for key in ("type", "params"):
        if key not in config:
            return None, f"the scheduler has no {key!r}"
    name, params = config["type"], config["params"]
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name!r} is not one of {', '.join(VALID_LR_SCHEDULES)}"
    if name not in _RATE_OF:
        return None, f"{name} is a share of the optimizer's own rate, so its params name none"
    key = _RATE_OF[name]
    return (params[key], "") if key in params else (None, f"{name} has no {key!r} in its params")
