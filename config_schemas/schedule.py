"""The scheduler section: the five schedules of DeepSpeed, with typed parameters and their defaults, or any class of torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from .fields import HONOURED, Bool, Float, Int, Lower, OptionalFloats, Section, Str, key

WarmupType = Annotated[Literal["log", "linear"], Lower]


class Scheduler(Section):
    """Which learning-rate schedule is built when the script passes none."""

    type: Str | None = key(
        None, "LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR, or a class of torch.optim.lr_scheduler.", effect=HONOURED
    )
    params: dict[str, Any] = key({}, "Arguments of the schedule; for the five named ones the defaults are filled in.", effect=HONOURED)


class WarmupLR(Section):
    """Warm up, then keep the peak."""

    warmup_min_lr: OptionalFloats = key(0.0, "Learning rate at step 0.")
    warmup_max_lr: OptionalFloats = key(None, "Peak; absent means the optimizer's learning rate.")
    warmup_num_steps: Int = key(1000, "Steps of warm-up; 1 counts as 2.", gt=0)
    warmup_type: WarmupType = key("log", "Shape of the warm-up; note that log is the default.")


class WarmupDecayLR(WarmupLR):
    """Warm up, then fall linearly to zero at the last step."""

    total_num_steps: Int | None = key(None, "Steps of the whole run; required, and above 0 where there is an optimizer.", ge=0)
    warmup_max_lr: OptionalFloats = key(0.001, "Peak; null means the optimizer's learning rate.")


class WarmupCosineLR(Section):
    """Warm up, then fall along a cosine; all values are shares of the optimizer's learning rate."""

    total_num_steps: Int | None = key(None, "Steps of the whole run; required, and above 0 where there is an optimizer.", ge=0)
    warmup_min_ratio: Float = key(0.0, "Share of the learning rate at step 0.", ge=0)
    warmup_num_steps: Int = key(1000, "Steps of warm-up; 1 counts as 2.", gt=0)
    cos_min_ratio: Float = key(1e-4, "Share of the learning rate at the last step.", ge=0)
    warmup_type: WarmupType = key("log", "Shape of the warm-up; note that log is the default.")


class LRRangeTest(Section):
    """Raise the learning rate steadily to find the largest one that trains."""

    lr_range_test_min_lr: OptionalFloats = key(1e-3, "Learning rate at step 0.")
    lr_range_test_step_size: Int = key(2000, "Steps of one interval.", gt=0)
    lr_range_test_step_rate: Float = key(1.0, "Growth in an interval, as a share of the start.")
    lr_range_test_staircase: Bool = key(False, "Change only between intervals.")


class OneCycle(Section):
    """One cycle up and down, then decay; momentum runs against it."""

    cycle_min_lr: Float = key(..., "Lowest learning rate of the cycle.")
    cycle_max_lr: Float = key(..., "Highest learning rate of the cycle.")
    decay_lr_rate: Float = key(0.0, "Decay of the learning rate after the cycle.")
    cycle_first_step_size: Int = key(2000, "Steps up.", gt=0)
    cycle_second_step_size: Int | None = key(None, "Steps down; absent means as many as up.", gt=0)
    cycle_first_stair_count: Int = key(0, "Stairs on the way up; 0 means smooth.", ge=0)
    cycle_second_stair_count: Int | None = key(None, "Stairs on the way down; absent means as many as up.", ge=0)
    decay_step_size: Int = key(0, "Steps of one decay interval; 0 means no decay.", ge=0)
    cycle_momentum: Bool = key(True, "Cycle the momentum too.")
    cycle_min_mom: Float = key(0.8, "Lowest momentum.")
    cycle_max_mom: Float = key(0.9, "Highest momentum.")
    decay_mom_rate: Float = key(0.0, "Decay of the momentum after the cycle.")


KNOWN_SCHEDULES: dict[str, type[Section]] = {
    "WarmupLR": WarmupLR,
    "WarmupDecayLR": WarmupDecayLR,
    "WarmupCosineLR": WarmupCosineLR,
    "LRRangeTest": LRRangeTest,
    "OneCycle": OneCycle,
}
