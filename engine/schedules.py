"""The learning-rate schedulers that DeepSpeed configs name, with the rates that DeepSpeed gives at every step."""

from __future__ import annotations

import logging
from typing import Any

from ..errors import ConfigError
from .optim.curves import CycleShape, cosine_ratio, linear_decay_fraction, range_test_factor, warmup_fraction
from .optim.names import check_keywords, keywords_of, suggestion
from .optim.scheduler import Scheduler, check_warmup, positive_int

logger = logging.getLogger(__name__)


class WarmupLR(Scheduler):
    """Warm up from `warmup_min_lr` to `warmup_max_lr` (default: the optimizer's rate) and stay there."""

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: float | list[float] = 0.0,
        warmup_max_lr: float | list[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        """Raise ConfigError for a value that makes no schedule."""
        super().__init__(optimizer, last_batch_iteration)
        self.warmup_type = warmup_type
        self.warmup_num_steps = check_warmup(warmup_type, warmup_num_steps)
        self.min_lrs = self.per_group("warmup_min_lr", warmup_min_lr)
        self.max_lrs = self.get_last_lr() if warmup_max_lr is None else self.per_group("warmup_max_lr", warmup_max_lr)
        self.start()

    def _gamma(self, step: int) -> float:
        return warmup_fraction(step, self.warmup_num_steps, self.warmup_type)

    def get_lr(self) -> list[float]:
        """Return the rate of each group at `last_batch_iteration`."""
        gamma = self._gamma(self.last_batch_iteration) if self.last_batch_iteration >= 0 else 0.0
        return [low + (high - low) * gamma for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]


class WarmupDecayLR(WarmupLR):
    """Warm up as WarmupLR does, then fall in a line to `warmup_min_lr` at `total_num_steps`."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: float | list[float] = 0.0,
        warmup_max_lr: float | list[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        """Raise ConfigError for a value that makes no schedule."""
        self.total_num_steps = total_num_steps
        check_warmup(warmup_type, warmup_num_steps, total_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _gamma(self, step: int) -> float:
        if step < self.warmup_num_steps:
            return super()._gamma(step)
        return linear_decay_fraction(step, self.warmup_num_steps, self.total_num_steps)


class WarmupCosineLR(Scheduler):
    """Warm up to the optimizer's own rate, then fall as a cosine to `cos_min_ratio` of it; the rate is 0 before the first step."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        """Raise ConfigError for a value that makes no schedule."""
        super().__init__(optimizer, last_batch_iteration)
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.warmup_num_steps = check_warmup(warmup_type, warmup_num_steps, total_num_steps)
        self.cos_min_ratio = cos_min_ratio
        self.warmup_type = warmup_type
        self.base_lrs = self.get_last_lr()
        self.start()

    def get_lr_ratio(self) -> float:
        """Return the factor on the optimizer's rate at `last_batch_iteration`."""
        step = self.last_batch_iteration
        if step < 0:
            return 0.0
        if step < self.warmup_num_steps:
            done = warmup_fraction(step, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * done
        return cosine_ratio(step, self.warmup_num_steps, self.total_num_steps, self.cos_min_ratio)

    def get_lr(self) -> list[float]:
        """Return the rate of each group at `last_batch_iteration`."""
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self.base_lrs]


class LRRangeTest(Scheduler):
    """Raise the rate without end, to see where training diverges (Smith, 2018, arXiv:1803.09820)."""

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: float | list[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        """Raise ConfigError for a value that makes no schedule."""
        super().__init__(optimizer, last_batch_iteration)
        self.min_lrs = self.per_group("lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = positive_int("lr_range_test_step_size", lr_range_test_step_size)
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        self.start()

    def get_lr(self) -> list[float]:
        """Return the rate of each group at `last_batch_iteration`."""
        factor = range_test_factor(self.last_batch_iteration, self.step_size, self.step_rate, self.staircase)
        return [lr * factor for lr in self.min_lrs]


class OneCycle(Scheduler):
    """One rise and fall of the rate, with momentum mirrored, then an optional decay (Smith, 2018, arXiv:1803.09820).

    Momentum is cycled where every group has `betas`: the first beta moves and the second is 0.99.
    """

    SECOND_BETA = 0.99

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: float | list[float],
        cycle_max_lr: float | list[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | list[float] = 0.8,
        cycle_max_mom: float | list[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        """Raise ConfigError for a value that makes no schedule."""
        super().__init__(optimizer, last_batch_iteration)
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        if cycle_first_step_size <= 0 or second < 0:
            lengths = f"{cycle_first_step_size} and {second}"
            raise ConfigError(f"scheduler.params: cycle_first_step_size must be positive and the second not negative, got {lengths}")
        second_stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.shape = CycleShape(float(cycle_first_step_size), float(second), cycle_first_stair_count, second_stairs)
        self.decay_step_size, self.decay_lr_rate, self.decay_mom_rate = decay_step_size, decay_lr_rate, decay_mom_rate
        self.min_lrs = self.per_group("cycle_min_lr", cycle_min_lr)
        self.max_lrs = self.per_group("cycle_max_lr", cycle_max_lr)
        self.min_moms = self.per_group("cycle_min_mom", cycle_min_mom)
        self.max_moms = self.per_group("cycle_max_mom", cycle_max_mom)
        self.cycle_momentum = cycle_momentum and all("betas" in group for group in optimizer.param_groups)
        if cycle_momentum and not self.cycle_momentum:
            logger.warning("OneCycle: %s has no betas, so cycle_momentum has no effect", type(optimizer).__name__)
        self.start()

    def start(self) -> None:
        """Write the low ends of rate and momentum, unless the scheduler is built in the middle of a run."""
        if self.last_batch_iteration == -1:
            super().apply()
            # DeepSpeed starts at the low end of momentum, though the cycle itself would start at the high one.
            self._write_momentum(self.min_moms)

    def _decay(self, rate: float) -> float:
        """The factor 1 + rate * (decay intervals since the cycle ended)."""
        past = self.last_batch_iteration - self.shape.total + 1
        return 1 + rate * past / self.decay_step_size if self.decay_step_size and rate else 1.0

    def get_lr(self) -> list[float]:
        """Return the rate of each group at `last_batch_iteration`."""
        if self.last_batch_iteration >= self.shape.total:
            return [low / self._decay(self.decay_lr_rate) for low in self.min_lrs]
        height = self.shape.height(self.last_batch_iteration)
        return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of each group at `last_batch_iteration`, or None when momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        return [(mom, self.SECOND_BETA) for mom in self._first_betas()]

    def _first_betas(self) -> list[float]:
        if self.last_batch_iteration >= self.shape.total:
            return [high * self._decay(self.decay_mom_rate) for high in self.max_moms]
        height = self.shape.height(self.last_batch_iteration)
        return [high - (high - low) * height for low, high in zip(self.min_moms, self.max_moms, strict=True)]

    def apply(self) -> None:
        """Write the rates, and the betas, of the current step into the groups."""
        super().apply()
        self._write_momentum(self._first_betas())

    def _write_momentum(self, first_betas: list[float]) -> None:
        if self.cycle_momentum:
            for group, first in zip(self.optimizer.param_groups, first_betas, strict=True):
                group["betas"] = (first, self.SECOND_BETA)


_OWN: tuple[type[Scheduler], ...] = (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
VALID_LR_SCHEDULES: list[str] = [cls.__name__ for cls in _OWN]


def _scheduler_class(name: str) -> type:
    """Return the class of a config's name: ours in any case, torch's in its own."""
    from torch.optim import lr_scheduler

    own = {cls.__name__.lower(): cls for cls in _OWN}
    if name.lower() in own:
        return own[name.lower()]
    classes = {n: c for n, c in vars(lr_scheduler).items() if isinstance(c, type) and issubclass(c, lr_scheduler.LRScheduler)}
    torch_classes = {n: c for n, c in classes.items() if n not in ("LRScheduler", "_LRScheduler")}
    if name == "ReduceLROnPlateau":
        raise ConfigError("scheduler.type: ReduceLROnPlateau needs a metric at each step; build it in your script and step it there")
    if name not in torch_classes:
        near = suggestion(name, [*VALID_LR_SCHEDULES, *torch_classes])
        known = f"{', '.join(VALID_LR_SCHEDULES)} or a class of torch.optim.lr_scheduler"
        raise ConfigError(f"scheduler.type: {name!r} is not one of {known}{near}")
    return torch_classes[name]


def build_scheduler(name: str, params: dict[str, Any] | None, optimizer: Any) -> Any:
    """Build the scheduler of a config's `scheduler.type` and `scheduler.params`.

    Returns one of the schedulers here, or an instance of the class of that name in `torch.optim.lr_scheduler`.
    Raises ConfigError for an unknown type or parameter, with the nearest known one, and for values the class refuses.
    """
    cls = _scheduler_class(name)
    given = dict(params or {})
    known, required = keywords_of(cls)
    check_keywords("scheduler.params", given, known, required)
    try:
        return cls(optimizer, **given)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"scheduler {name}: {error}") from error
