"""Runs a schedule's instructions against a clock: when each stage works and waits, and how many activations it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..problems import LedgerError
from .instructions import Instruction


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
) -> Simulation:
    """Return the course of a schedule whose stages take the same time for a chunk.

    Args:
        forward, backward, weight: seconds of F, B and W of one chunk; a schedule without W does both in B.
        transfer: seconds from one stage to the next, during which both work on.

    Raises:
        LedgerError: the instructions wait for each other for ever, or one is missing.
    """
    stages = len(schedule)
    split = any(each.kind == "W" for each in schedule[0])
    cost = {"F": forward, "B": backward if split else backward + weight, "W": weight}
    chunks = 1 + max(each.chunk for row in schedule for each in row)
    done: dict[tuple[str, int, int], float] = {}
    at, clock = [0] * stages, [0.0] * stages
    spans: list[list[tuple[float, float, Instruction]]] = [[] for _ in range(stages)]
    waiting = set(range(stages))
    while waiting:
        moved = False
        for stage in list(waiting):
            while at[stage] < len(schedule[stage]):
                each = schedule[stage][at[stage]]
                ready = _ready(each, stage, stages, chunks, done, transfer)
                if ready is None:
                    break
                start = max(ready, clock[stage])
                clock[stage] = start + cost[each.kind]
                done[each.kind, each.chunk * stages + stage, each.microbatch] = clock[stage]
                spans[stage].append((start, clock[stage], each))
                at[stage] += 1
                moved = True
            if at[stage] == len(schedule[stage]):
                waiting.discard(stage)
        if not moved:
            stuck = ", ".join(f"stage {stage}: {schedule[stage][at[stage]]}" for stage in sorted(waiting))
            raise LedgerError(f"the schedule cannot go on; {stuck}")
    busy = tuple(sum(end - start for start, end, _ in row) for row in spans)
    return Simulation(max(clock), busy, tuple(_held(row, split) for row in spans), tuple(tuple(row) for row in spans))


def _ready(
    each: Instruction, stage: int, stages: int, chunks: int, done: dict[tuple[str, int, int], float], transfer: float
) -> float | None:
    """Return when the inputs of an instruction are there, or None while they are not."""
    virtual = each.chunk * stages + stage
    if each.kind == "W":
        return done.get(("B", virtual, each.microbatch))
    if each.kind == "F":
        if virtual == 0:
            return 0.0
        before = done.get(("F", virtual - 1, each.microbatch))
        return None if before is None else before + transfer
    own = done.get(("F", virtual, each.microbatch))
    if own is None or virtual == chunks * stages - 1:
        return own
    after = done.get(("B", virtual + 1, each.microbatch))
    return None if after is None else max(own, after + transfer)


def _held(row: Sequence[tuple[float, float, Instruction]], split: bool) -> int:
    """Activations go with the last backward that needs them: W where there is one."""
    last = "W" if split else "B"
    now = most = 0
    for _, _, each in row:
        now += 1 if each.kind == "F" else -1 if each.kind == last else 0
        most = max(most, now)
    return most
