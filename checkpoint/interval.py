"""When a job saves by itself: every so many steps or minutes, or as often as failures make worth while."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass


def daly_interval_s(save_s: float, mtbf_s: float) -> float:
    """Return the time between saves at which the least work is lost to saving and to failures together.

    Young's first-order answer with the two further terms of Daly (2006, Future Generation Computer Systems 22, 303-312);
    where a save takes as long as half the time between failures, saving is all that can be done.

    Args:
        save_s: seconds that training stands still for one save.
        mtbf_s: mean seconds between failures of the job.
    """
    ratio = save_s / (2 * mtbf_s)
    if ratio >= 1:
        return mtbf_s
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


@dataclass(frozen=True)
class Every:
    """What the config asks for; None where it does not."""

    steps: int | None = None
    minutes: float | None = None
    mtbf_hours: float | None = None  # save as often as this failure rate asks for


class Schedule:
    """Tells whether a save is due. Times are this rank's: rank 0 decides for all."""

    def __init__(self, every: Every, clock: Callable[[], float] = time.monotonic) -> None:
        self._every, self._clock = every, clock
        self._last = clock()
        self._cost_s: float | None = None

    @property
    def active(self) -> bool:
        """Whether anything is saved without being asked for."""
        return self._every != Every()

    def saved(self, cost_s: float) -> None:
        """Note that a save has been taken, and how long training stood still for it."""
        self._last, self._cost_s = self._clock(), cost_s

    def interval_s(self) -> float:
        """Return the seconds from one save to the next; 0 until the cost of one is known, infinite without a time limit."""
        limits = [math.inf if self._every.minutes is None else 60 * self._every.minutes]
        if self._every.mtbf_hours is not None:
            # the first save is due at once: it measures the cost, and a job that cannot save should know early
            limits.append(0.0 if self._cost_s is None else daly_interval_s(self._cost_s, 3600 * self._every.mtbf_hours))
        return min(limits)

    def due_by_time(self) -> bool:
        """Whether so much time has passed."""
        return self._clock() - self._last >= self.interval_s()

    def due_by_steps(self, steps: int) -> bool:
        """Whether a save is due after step number `steps`."""
        return self._every.steps is not None and steps % self._every.steps == 0
