"""Runs a schedule's instructions against a clock: when each stage works and waits, and how many activations it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..problems import LedgerError
from .instructions import Instruction, virtual_stage


@dataclass(frozen=True)
class Simulation:
    """What came out.

    Attributes:
        seconds: from the first instruction to the end of the last.
        busy: of each stage.
        held: most micro-batches (of one chunk's activations) that each stage held at once.
        spans: of each stage, (start, end, instruction).
    """

    seconds: float
    busy: tuple[float, ...]
    held: tuple[int, ...]
    spans: tuple[tuple[tuple[float, float, Instruction], ...], ...]

    @property
    def bubble(self) -> float:
        """Idle time of the busiest stage."""
        return self.seconds - max(self.busy)

    def share(self, over: str = "ideal") -> float:
        """Return the bubble over the busiest stage's work ("ideal") or over the whole time ("total")."""
        return self.bubble / (max(self.busy) if over == "ideal" else self.seconds)


def simulate(
    schedule: Sequence[Sequence[Instruction]],
    forward: float = 1.0,
    backward: float = 1.0,
    weight: float = 1.0,
    transfer: float = 0.0,
    *,
    vee: bool = False,
    cost_of: Callable[[int, Instruction], float] | None = None,
) -> Simulation:
    """Return the course of a schedule whose stages take the same time for a chunk, or the times that were measured.

    Args:
        forward, backward, weight: seconds of F, I and W of one chunk; a B is both an I and a W.
        transfer: seconds from one stage to the next, during which both work on.
        vee: chunks go down the stages and up again; see `virtual_stage`.
        cost_of: (stage, instruction) -> seconds, in place of the three above.

    Raises:
        LedgerError: the instructions wait for each other for ever, or one is missing.
    """
    stages = len(schedule)
    cost = {"F": forward, "B": backward + weight, "I": backward, "W": weight}
    last = stages * (1 + max(each.chunk for row in schedule for each in row)) - 1
    done: dict[tuple[str, int, int], float] = {}
    at, clock = [0] * stages, [0.0] * stages
    spans: list[list[tuple[float, float, Instruction]]] = [[] for _ in range(stages)]
    waiting = set(range(stages))
    while waiting:
        moved = False
        for stage in list(waiting):
            while at[stage] < len(schedule[stage]):
                each = schedule[stage][at[stage]]
                virtual = virtual_stage(stage, each.chunk, stages, vee=vee)
                ready = _ready(each, virtual, last, done, transfer)
                if ready is None:
                    break
                start = max(ready, clock[stage])
                clock[stage] = start + (cost[each.kind] if cost_of is None else cost_of(stage, each))
                done["I" if each.kind == "B" else each.kind, virtual, each.microbatch] = clock[stage]
                spans[stage].append((start, clock[stage], each))
                at[stage] += 1
                moved = True
            if at[stage] == len(schedule[stage]):
                waiting.discard(stage)
        if not moved:
            stuck = ", ".join(f"stage {stage}: {schedule[stage][at[stage]]}" for stage in sorted(waiting))
            raise LedgerError(f"the schedule cannot go on; {stuck}")
    busy = tuple(sum(end - start for start, end, _ in row) for row in spans)
    return Simulation(max(clock), busy, tuple(held(each for *_, each in row) for row in spans), tuple(tuple(row) for row in spans))


def _ready(each: Instruction, virtual: int, last: int, done: dict[tuple[str, int, int], float], transfer: float) -> float | None:
    """Return when the inputs of an instruction are there, or None while they are not."""
    if each.kind == "W":
        return done.get(("I", virtual, each.microbatch))
    if each.kind == "F":
        if virtual == 0:
            return 0.0
        before = done.get(("F", virtual - 1, each.microbatch))
        return None if before is None else before + transfer
    own = done.get(("F", virtual, each.microbatch))
    if own is None or virtual == last:
        return own
    after = done.get(("I", virtual + 1, each.microbatch))
    return None if after is None else max(own, after + transfer)


def held(row: Iterable[Instruction]) -> int:
    """Return the most activations that a stage holds at once: they go with the last backward that needs them, W or B."""
    now = most = 0
    for each in row:
        now += 1 if each.kind == "F" else -1 if each.kind in ("B", "W") else 0
        most = max(most, now)
    return most
