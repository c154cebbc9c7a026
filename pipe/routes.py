"""Which messages a schedule sends from stage to stage, and in which order: from the instruction lists alone."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

from .payload import Spec
from .schedules import Schedule


class Message(NamedTuple):
    """What one stage sends another: the inputs ("F") or the output gradients ("G") of `part` for a micro-batch."""

    kind: str
    part: int
    micro_batch: int


def messages(schedule: Schedule) -> dict[tuple[int, int], list[Message]]:
    """Return (from stage, to stage) -> messages in the order in which they are sent.

    A stage receives in just this order, whatever it needs first: both ends know it, so no message needs a name.
    """
    found: dict[tuple[int, int], list[Message]] = {}
    for stage, row in enumerate(schedule.rows):
        for each in row:
            part = schedule.part(stage, each.chunk)
            if each.kind == "F" and part + 1 < schedule.parts:
                message = Message("F", part + 1, each.microbatch)
            elif each.kind in ("B", "I") and part > 0:
                message = Message("G", part - 1, each.microbatch)
            else:
                continue
            to = schedule.home(message.part)
            if to != stage:
                found.setdefault((stage, to), []).append(message)
    return found


def sent_bytes(schedule: Schedule, stage: int, spec_of: Callable[[int, int], Spec]) -> dict[str, tuple[int, int]]:
    """Return kind of message ("F", "G") -> (tensors, bytes) that a stage sends in one batch, descriptions left out.

    Args:
        spec_of: (part, micro-batch) -> description of the part's inputs.
    """
    return _moved(schedule, lambda source, to: source == stage, spec_of)


def received_bytes(schedule: Schedule, stage: int, spec_of: Callable[[int, int], Spec]) -> dict[str, tuple[int, int]]:
    """Return kind of message -> (tensors, bytes) that a stage receives in one batch; see `sent_bytes`."""
    return _moved(schedule, lambda source, to: to == stage, spec_of)


def _moved(schedule: Schedule, counts: Callable[[int, int], bool], spec_of: Callable[[int, int], Spec]) -> dict[str, tuple[int, int]]:
    totals = {"F": (0, 0), "G": (0, 0)}
    for (source, to), found in messages(schedule).items():
        for kind, part, number in found if counts(source, to) else ():
            leaves = spec_of(part, number).leaves if kind == "F" else spec_of(part + 1, number).wanting
            calls, num_bytes = totals[kind]
            totals[kind] = calls + len(leaves), num_bytes + sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    return totals
