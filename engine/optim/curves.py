"""Learning-rate curves as pure functions of the step, with the values that DeepSpeed's schedulers give.

`step` is `last_batch_iteration`: -1 before the first scheduler step, and the number of scheduler steps minus one after.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def warmup_fraction(step: int, num_steps: int, warmup_type: str) -> float:
    """Return how much of the warm-up is done at `step` of `num_steps`, from 0 to 1; `log` rises fast and then slowly."""
    if step >= num_steps:
        return 1.0
    return step / num_steps if warmup_type == "linear" else math.log(step + 1) / math.log(num_steps)


def linear_decay_fraction(step: int, num_steps: int, total_num_steps: int) -> float:
    """Return the factor that falls from 1 at the end of a warm-up of `num_steps` to 0 at `total_num_steps`."""
    return max(0.0, (total_num_steps - step) / max(1.0, total_num_steps - num_steps))


def cosine_ratio(step: int, num_steps: int, total_num_steps: int, floor: float) -> float:
    """Return the factor that falls as half a cosine from 1 after a warm-up of `num_steps` to `floor` at the end, and stays."""
    progress = min(1.0, (step - num_steps + 1) / max(1, total_num_steps - num_steps))
    return max(0.0, floor + (1.0 - floor) * (1.0 + math.cos(math.pi * progress)) / 2)


def range_test_factor(step: int, step_size: int, step_rate: float, staircase: bool) -> float:
    """Return the factor on the minimum rate in a range test (Smith, 2018, arXiv:1803.09820)."""
    interval = (step + 1) / step_size
    return 1 + step_rate * (math.floor(interval) if staircase else interval)


@dataclass(frozen=True)
class CycleShape:
    """The lengths, in steps, of the rising and falling half of one cycle, and the number of stairs in each (0: smooth)."""

    rise: float
    fall: float
    rise_stairs: int
    fall_stairs: int

    @property
    def total(self) -> float:
        """Length of the cycle in steps."""
        return self.rise + self.fall

    def height(self, step: int) -> float:
        """Return the height, 0 to 1, of the cycle at `step`."""
        position = step + 1
        turns = 1.0 + position / self.total
        x, peak = turns - math.floor(turns), self.rise / self.total
        rising = x <= peak
        stairs = self.rise_stairs if rising else self.fall_stairs
        if stairs <= 0:
            return x / peak if rising else (x - 1) / (peak - 1)
        # Counted in whole steps and not in x, where a rounding error at the peak would cost a whole stair.
        within = position % self.total
        climbed = within * stairs / self.rise if within <= self.rise else (self.total - within) * stairs / self.fall
        return math.floor(climbed) / stairs
