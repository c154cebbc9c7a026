"""The time of a step as parts that sum to it: what the engine computes, what it waits for, and what happens outside of it.

On a CPU times are read as they pass. On an accelerator the work is queued, so marks are events on the current stream, and a
step is accounted when the next one ends: all its events have passed then, and nobody waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

OUTSIDE = "outside the engine"  # the data loader, the script, and a loss.backward() that the script calls itself
WAITING = "waiting for "


@dataclass(frozen=True)
class Mark:
    """A moment: seconds of a clock, or an event; and how many waits had been booked in the step by then."""

    at: Any
    waits: int


@dataclass
class _Step:
    """What is booked of a step until it can be accounted."""

    number: int
    begin: Any
    end: Any = None
    phases: list[tuple[str, Mark, Mark]] = field(default_factory=list)
    waits: list[tuple[str, Any, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class StepAccount:
    """Seconds of one step by part; they sum to `seconds`. A phase does not contain what it waited for: that is a part of its own."""

    step: int
    seconds: float
    parts: dict[str, float]

    @property
    def exposed_s(self) -> float:
        """Seconds that communication kept the step waiting for."""
        return sum(seconds for part, seconds in self.parts.items() if part.startswith(WAITING))


class StepClock:
    """Books phases and waits of each step.

    Args:
        make_event: makes an event that can be timed, on an accelerator; None: the host's clock is the device's.
    """

    def __init__(self, make_event: Callable[[], Any] | None = None) -> None:
        self._make_event = make_event
        self._now: _Step | None = None
        self._before: _Step | None = None

    def mark(self) -> Mark:
        """Return this moment."""
        return Mark(self._moment(), 0 if self._now is None else len(self._now.waits))

    def phase(self, name: str, since: Mark) -> None:
        """Book the time since `since` under a phase, less what was booked as waiting meanwhile."""
        if self._now is not None:
            self._now.phases.append((name, since, self.mark()))

    def waited(self, what: str, since: Mark) -> None:
        """Book the time since `since` as waiting for `what`."""
        if self._now is not None:
            self._now.waits.append((what, since.at, self._moment()))

    def end_step(self, number: int) -> StepAccount | None:
        """End step `number` here, and return the account of the newest step whose end has passed; None for the first."""
        moment = self._moment()
        ended, self._now = self._now, _Step(number + 1, moment)
        if ended is None:  # nobody saw the first step begin
            return None
        ended.end, ended.number = moment, number
        if self._make_event is None:
            return self._account(ended)
        ready, self._before = self._before, ended
        return None if ready is None else self._account(ready)

    def _moment(self) -> Any:
        if self._make_event is None:
            return time.perf_counter()
        event = self._make_event()
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return end - begin if self._make_event is None else begin.elapsed_time(end) / 1e3

    def _account(self, step: _Step) -> StepAccount:
        total = self._between(step.begin, step.end)
        waits = [(what, self._between(begin, end)) for what, begin, end in step.waits]
        parts: dict[str, float] = {}
        for name, begin, end in step.phases:
            inside = sum(seconds for _, seconds in waits[begin.waits : end.waits])
            parts[name] = parts.get(name, 0.0) + self._between(begin.at, end.at) - inside
        for what, seconds in waits:
            parts[WAITING + what] = parts.get(WAITING + what, 0.0) + seconds
        parts[OUTSIDE] = total - sum(parts.values())
        return StepAccount(step.number, total, parts)


def clock_for(device: torch.device) -> StepClock:
    """Return the clock of a device."""
    if device.type == "cpu":
        return StepClock()
    return StepClock(lambda: torch.Event(device, enable_timing=True))
