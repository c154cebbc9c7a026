"""Finds ranks that wait for each other for ever, because they ran different modules, and ends them with the reason."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from .elsewhere import Elsewhere, standing_call

PATIENCE_S = 3.0  # a wait longer than this is looked into
PERIOD_S = 1.0
EXIT_STATUS = 70
TELLING_S = 4 * PERIOD_S  # every rank looks once in a period
_TROUBLE, _HEARD, _ALL_HEARD = "trouble", "trouble/heard", "trouble/heard by all"


@dataclass(frozen=True)
class Waiting:
    """What a rank says of itself while it waits: for which call, and how often it ran each call.

    `ranks` is set for a collective that the script itself called: these must call it too. `state` is then its line.
    """

    rank: int
    call: str
    number: int
    state: str
    counts: Mapping[str, int]
    ranks: Sequence[int] | None = None

    def lacks(self, other: Waiting) -> bool:
        """Whether this rank has not yet started the call that `other` waits for."""
        if other.ranks is not None:
            return self.rank in other.ranks and (self.ranks is None or self.call != other.call)
        return self.counts.get(other.call, 0) < other.number

    def describe(self) -> str:
        """Say in words what it waits for."""
        if self.ranks is not None:
            return f"waits in torch.distributed.{self.call} at {self.state}"
        kind, _, unit = self.call.partition("/")
        return f"waits in {kind} of {self.state} for unit {unit!r} (call {self.number})"

    def to_json(self) -> str:
        """Return it as text for the store."""
        return json.dumps([self.rank, self.call, self.number, self.state, dict(self.counts), self.ranks])

    @classmethod
    def from_json(cls, text: str) -> Waiting:
        """Read what to_json wrote."""
        return cls(*json.loads(text))


def find_cycle(waiting: Mapping[int, Waiting]) -> list[int]:
    """Return ranks that wait for each other in a ring, or an empty list.

    Rank a waits for rank b when b has not started the call that a waits for. If b itself waits, and its own wait leads
    back to a, none of them can go on, whatever the other ranks do.
    """
    for start in sorted(waiting):
        path = [start]
        while True:
            here = waiting[path[-1]]
            following = [rank for rank in sorted(waiting) if rank != here.rank and waiting[rank].lacks(here)]
            if not following:
                break
            if following[0] in path:
                return path[path.index(following[0]) :]
            path.append(following[0])
    return []


def describe_cycle(waiting: Mapping[int, Waiting], cycle: list[int]) -> str:
    """Say in one line who waits for what."""
    parts = [
        f"rank {rank} {waiting[rank].describe()}, which rank {following} has not started"
        for rank, following in zip(cycle, [*cycle[1:], cycle[0]], strict=True)
    ]
    start = f"ranks are out of step: {'; '.join(parts)}."
    if any(waiting[rank].ranks is not None for rank in cycle):
        return (
            f"{start} They took a different number of steps, or one of them left the loop early. Let every rank take as many: "
            "`for batch in engine.together(loader)` ends the epoch on all ranks when the first has no more"
        )
    return (
        f"{start} They ran different modules, or a different number of times or of batches. "
        "Let every rank run the same units (multiply an unused one's output by zero), mark the part that branches with "
        "stateroom.utils.set_z3_leaf_modules, use ZeRO stage 0, 1 or 2, where ranks may differ, or end epochs with "
        "engine.together(loader) where ranks have different numbers of batches"
    )


class Watch:
    """Keeps the counts of one communicator and looks, from a thread of its own, at waits that take long.

    A rank that waits says so in the store and reads what others say. Only a closed ring of waiting ranks, seen twice, is
    an end: slow ranks are waited for. A call of torch.distributed that blocks cannot be interrupted, so the process is
    ended, with the message and the stack of every thread on standard error.

    Attributes:
        trouble: why some rank will not come to the calls that others wait in, as that rank has told; "" while all is well.
    """

    def __init__(
        self, rank: int, world: int, store: Any, on_end: Callable[[str], None] | None = None, patience_s: float = PATIENCE_S
    ) -> None:
        self._rank, self._world, self._store = rank, world, store
        self._on_end = on_end or _end_process
        self._patience_s = patience_s
        self.trouble = ""
        self._counts: dict[str, int] = {}
        self._current: tuple[str, int, str, float] | None = None
        self._said = ""
        self._stands: tuple[Elsewhere, float] | None = None
        self._last: tuple[list[int], list[tuple[str, int]]] = ([], [])
        self._stop = threading.Event()
        # the thread holds no reference, so that an engine that is dropped without destroy() does not live on in it
        threading.Thread(target=_loop, args=(weakref.ref(self), self._stop), name="stateroom-watch", daemon=True).start()

    def started(self, call: str) -> int:
        """Count a call that starts and return its number."""
        number = self._counts.get(call, 0) + 1
        self._counts[call] = number
        return number

    def waits(self, call: str, number: int, state: str) -> None:
        """Note that this rank now waits for a call to finish."""
        self._current = (call, number, state, time.monotonic())

    def done(self) -> None:
        """Note that the wait is over."""
        self._current = None

    def close(self) -> None:
        """End the thread."""
        self._stop.set()

    def tell(self, trouble: str) -> None:
        """Let the other ranks know why this one cannot go on; return when all of them know, or after a few seconds.

        A rank that fails alone says it before it raises: the store may end with it, and others would only see it gone.
        """
        if self.trouble:
            return
        self.trouble = trouble
        try:
            self._store.set(_TROUBLE, trouble)
            self._store.wait([_ALL_HEARD], timedelta(seconds=TELLING_S))
        except (RuntimeError, OSError):  # somebody is gone already; this rank's own error is raised all the same
            return

    def _hear(self) -> None:
        if self.trouble or not self._store.check([_TROUBLE]):
            return
        self.trouble = self._store.get(_TROUBLE).decode()
        # at once: what started the ranks may end this one as soon as the other has raised
        print(f"stateroom: rank {self._rank} hears: {self.trouble}", file=sys.stderr, flush=True)
        if self._store.add(_HEARD, 1) == self._world - 1:
            self._store.set(_ALL_HEARD, "yes")

    def look(self) -> None:
        """Hear what others tell; say whether this rank waits, and end it if it waits for a rank in trouble or in a ring."""
        self._hear()
        mine = self._own_wait()
        if mine is not None and self.trouble:
            self._on_end(f"rank {self._rank} {mine.describe()}, in vain: {self.trouble}")
            return
        mine = mine or self._script_waits()
        if mine is None:
            self._say("")
            return
        self._say(mine.to_json())
        waiting = self._others()
        waiting[self._rank] = mine
        cycle = find_cycle(waiting)
        seen = (cycle, [(waiting[rank].call, waiting[rank].number) for rank in cycle])
        if cycle and seen == self._last:
            self._on_end(describe_cycle(waiting, cycle))
        self._last = seen

    def _own_wait(self) -> Waiting | None:
        current = self._current
        if current is None or time.monotonic() - current[3] < self._patience_s:
            return None
        call, number, state, _ = current
        return Waiting(self._rank, call, number, state, dict(self._counts))

    def _script_waits(self) -> Waiting | None:
        """Return what the script waits for in a collective of its own, such as a barrier at the end of an epoch."""
        stands = standing_call() if self._current is None else None
        if stands is None:
            self._stands = None
            return None
        if self._stands is None or self._stands[0] != stands:
            self._stands = (stands, time.monotonic())
        if time.monotonic() - self._stands[1] < self._patience_s:
            return None
        return Waiting(self._rank, stands.call, 0, stands.where, dict(self._counts), stands.ranks)

    def _say(self, text: str) -> None:
        if text != self._said:
            self._store.set(self._key(self._rank), text)
            self._said = text

    def _others(self) -> dict[int, Waiting]:
        found = {}
        for rank in range(self._world):
            if rank != self._rank and self._store.check([self._key(rank)]):
                text = self._store.get(self._key(rank)).decode()
                if text:
                    found[rank] = Waiting.from_json(text)
        return found

    def _key(self, rank: int) -> str:
        return f"waiting/{rank}"


def _loop(watch: weakref.ref[Watch], stop: threading.Event) -> None:
    while not stop.wait(PERIOD_S):
        alive = watch()
        if alive is None:
            return
        try:
            alive.look()
        except (RuntimeError, OSError):  # the store is gone with its owner; the collective's own error says the rest
            return
        del alive


class NoWatch:
    """The same calls for a group of one rank, without effect."""

    trouble = ""

    def tell(self, trouble: str) -> None:
        """Tell nobody."""

    def started(self, call: str) -> int:
        """Count nothing."""
        return 0

    def waits(self, call: str, number: int, state: str) -> None:
        """Note nothing."""

    def done(self) -> None:
        """Note nothing."""

    def close(self) -> None:
        """End nothing."""


def _end_process(message: str) -> None:
    sys.stdout.flush()
    print(f"stateroom.errors.RankError: {message}", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    sys.stderr.flush()
    time.sleep(3 * PERIOD_S)  # the other ranks of the ring are to see it too before this one's connections close
    os._exit(EXIT_STATUS)
