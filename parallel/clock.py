"""The time of a step as parts that sum to it: what the engine computes, what it waits for, and what happens outside of it.

On a CPU times are read as they pass. On an accelerator the work is queued, so marks are events on the current stream, and a
step is accounted when the next one ends: all its events have passed then, and nobody waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

OUTSIDE = "outside the engine"  # the data loader, the script, and a loss.backward() that the script calls itself
WAITING = "waiting for "
_MOST_MARKS = 100_000  # a step with more events than this is not accounted: long evaluations lie between two steps


@dataclass(frozen=True)
class Mark:
    """A moment, and how much had been booked as waiting in the step by then: seconds, or a number of waits."""

    at: Any
    waited: Any


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


class StepClock(Protocol):
    """Books the phases and waits of each step."""

    def mark(self) -> Mark:
        """Return this moment."""

    def phase(self, name: str, since: Mark) -> None:
        """Book the time since `since` under a phase, less what was booked as waiting meanwhile."""

    def waited(self, what: str, since: Mark) -> None:
        """Book the time since `since` as waiting for `what`."""

    def end_step(self, number: int) -> StepAccount | None:
        """End step `number` here, and return the account of the newest step whose end has passed; None when there is none yet."""


def clock_for(device: torch.device) -> StepClock:
    """Return the clock of a device."""
    if device.type == "cpu":
        return HostClock()
    return DeviceClock(lambda: torch.Event(device, enable_timing=True))


class HostClock:
    """The host's clock is the device's: sums are kept as times pass."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._time = now
        self._begin: float | None = None  # of the running step; nobody sees the first one begin
        self._parts: dict[str, float] = {}
        self._waited = 0.0

    def mark(self) -> Mark:
        """Return this moment."""
        return Mark(self._time(), self._waited)

    def phase(self, name: str, since: Mark) -> None:
        """Book the time since `since` under a phase, less what was booked as waiting meanwhile."""
        self._add(name, self._time() - since.at - (self._waited - since.waited))

    def waited(self, what: str, since: Mark) -> None:
        """Book the time since `since` as waiting for `what`."""
        seconds = self._time() - since.at
        self._waited += seconds
        self._add(WAITING + what, seconds)

    def _add(self, part: str, seconds: float) -> None:
        self._parts[part] = self._parts.get(part, 0.0) + seconds

    def end_step(self, number: int) -> StepAccount | None:
        """End step `number` here and return its account; None for the first."""
        begin, self._begin = self._begin, self._time()
        parts, self._parts = self._parts, {}
        if begin is None:
            return None
        total = self._begin - begin
        return StepAccount(number, total, {**parts, OUTSIDE: total - sum(parts.values())})


@dataclass
class _Step:
    """Events of a step until it can be accounted."""

    begin: Any
    number: int = 0
    end: Any = None
    phases: list[tuple[str, Mark, Mark]] = field(default_factory=list)
    waits: list[tuple[str, Any, Any]] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        return len(self.waits) + len(self.phases) >= _MOST_MARKS


class DeviceClock:
    """Events on the current stream of an accelerator.

    Args:
        make_event: makes an event that can be timed.
    """

    def __init__(self, make_event: Callable[[], Any]) -> None:
        self._make_event = make_event
        self._now: _Step | None = None
        self._before: _Step | None = None

    def mark(self) -> Mark:
        """Return this moment."""
        return Mark(self._moment(), 0 if self._now is None else len(self._now.waits))

    def phase(self, name: str, since: Mark) -> None:
        """Book the time since `since` under a phase, less what was booked as waiting meanwhile."""
        if self._now is not None and not self._now.is_full:
            self._now.phases.append((name, since, self.mark()))

    def waited(self, what: str, since: Mark) -> None:
        """Book the time since `since` as waiting for `what`."""
        if self._now is not None and not self._now.is_full:
            self._now.waits.append((what, since.at, self._moment()))

    def end_step(self, number: int) -> StepAccount | None:
        """End step `number` here and return the account of the one before it; None when that is not known."""
        moment = self._moment()
        ended, self._now = self._now, _Step(moment)
        if ended is not None:
            ended.end, ended.number = moment, number
        ready, self._before = self._before, ended
        return None if ready is None or ready.is_full else _account(ready)

    def _moment(self) -> Any:
        event = self._make_event()
        event.record()
        return event


def _account(step: _Step) -> StepAccount:
    total = _between(step.begin, step.end)
    waits = [(what, _between(begin, end)) for what, begin, end in step.waits]
    parts: dict[str, float] = {}
    for name, begin, end in step.phases:
        inside = sum(seconds for _, seconds in waits[begin.waited : end.waited])
        parts[name] = parts.get(name, 0.0) + _between(begin.at, end.at) - inside
    for what, seconds in waits:
        parts[WAITING + what] = parts.get(WAITING + what, 0.0) + seconds
    parts[OUTSIDE] = total - sum(parts.values())
    return StepAccount(step.number, total, parts)


def _between(begin: Any, end: Any) -> float:
    return float(begin.elapsed_time(end)) / 1e3
