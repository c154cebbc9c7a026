"""What the learning-rate schedulers share: writing rates into parameter groups, state, and checks of their options."""

from __future__ import annotations

import logging
import math
from typing import Any

from ...errors import ConfigError

logger = logging.getLogger(__name__)


class Scheduler:
    """What the schedulers share: they write a rate into every group of `optimizer.param_groups`, at once and at each step.

    A run resumed with `load_state_dict` has the rate that the saved run had, whatever the optimizer holds.
    """

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        """Take any object with `param_groups`, a list of dicts; raise TypeError for others."""
        if not isinstance(getattr(optimizer, "param_groups", None), list):
            raise TypeError(f"{type(self).__name__} needs an optimizer with a list of param_groups, got {type(optimizer).__name__}")
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration

    def get_lr(self) -> list[float]:
        """Return the rate of each group at `last_batch_iteration`."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """Return the rates that the groups have now."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next step, or to the given one, and write its rates."""
        self.last_batch_iteration = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self.apply()

    def apply(self) -> None:
        """Write the rates of the current step into the groups."""
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if hasattr(group["lr"], "fill_"):  # a tensor: compiled or captured steps hold on to it
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def state_dict(self) -> dict[str, int]:
        """Return `{"last_batch_iteration": n}`."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go to the saved step and write its rates."""
        self.last_batch_iteration = int(state_dict["last_batch_iteration"])
        if self.last_batch_iteration == -1:
            self.start()
        else:
            self.apply()

    def per_group(self, name: str, value: Any) -> list[float]:
        """Return one value a group from one number or from a list with one a group; raise ConfigError for a wrong length."""
        num_groups = len(self.optimizer.param_groups)
        if not isinstance(value, list | tuple):
            return [value] * num_groups
        if len(value) != num_groups:
            raise ConfigError(f"scheduler.params.{name}: {len(value)} values for {num_groups} parameter groups")
        return list(value)

    def start(self) -> None:
        """Write the rates that hold before the first step; a scheduler built in the middle of a run leaves them alone."""
        if self.last_batch_iteration == -1:
            self.apply()


def positive_int(name: str, value: Any) -> int:
    """Return `value` as an int, or raise ConfigError; integral floats pass."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value <= 0:
        raise ConfigError(f"scheduler.params.{name}: must be a positive integer, got {value!r}")
    return int(value)


def check_warmup(warmup_type: str, warmup_num_steps: Any, total_num_steps: float = math.inf) -> int:
    """Return the length of the warm-up, which is 2 at least."""
    if warmup_type not in ("log", "linear"):
        raise ConfigError(f"scheduler.params.warmup_type: {warmup_type!r} is not 'log' or 'linear'")
    num_steps = max(2, positive_int("warmup_num_steps", warmup_num_steps))
    if total_num_steps < num_steps:
        logger.warning("scheduler: total_num_steps %s is less than warmup_num_steps %s", total_num_steps, num_steps)
    return num_steps
