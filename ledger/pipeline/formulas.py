"""Bubble and activation memory of pipeline schedules in closed form; over ideal or over total time is a switch."""

from __future__ import annotations

from dataclasses import dataclass

from ..problems import LedgerError, dividing, plain


@dataclass(frozen=True)
class Schedule:
    """A schedule by its published figures.

    Attributes:
        f, b, w, fb: the bubble is (stages - 1) x (f F + b B + w W + fb F&B), where B is the backward for inputs alone, W the one
            for weights and F&B a forward and a backward that overlap; `halved`: (stages / 2 - 1) instead.
        equal_share: bubble over 1F1B's when F = B = W.
        memory: activations over 1F1B's; `beyond` micro-batches more. weights: copies of the weights.
        vee: each stage holds two parts, which go down the stages and up again.
    """

    name: str
    f: float
    b: float
    w: float
    equal_share: float
    memory: float
    fb: float = 0.0
    halved: bool = False
    beyond: int = 0
    weights: int = 1
    vee: bool = False
    source: str = ""


_SC21, _ZB, _V = "arXiv:2104.04473", "arXiv:2401.10241", "arXiv:2405.15362"
_ROWS = (
    (Schedule("gpipe", 1, 1, 1, 1.0, 1.0, source="arXiv:1811.06965"), ("afab",)),
    (Schedule("1f1b", 1, 1, 1, 1.0, 1.0, source=_SC21), ("pipedream-flush", "interleaved", "interleaved-1f1b", "dapple")),
    (Schedule("zb-h1", 1, 1, -1, 1 / 3, 1.0, source=_ZB), ("zb1p", "zero-bubble-h1")),
    (Schedule("zb-h2", 1, 1, -2, 0.0, 2.0, source=_ZB), ("zb2p",)),
    (Schedule("zb-v", 1, 1, -2, 0.0, 1.0, vee=True, source=_ZB), ("zbv", "v-zb")),
    (Schedule("v-half", 0.5, 0.5, 0.5, 0.5, 0.5, vee=True, source=_V), ("vhalf",)),
    (Schedule("v-min", 2 / 3, 2 / 3, 2 / 3, 2 / 3, 1 / 3, vee=True, source=_V), ("vmin",)),
    (
        Schedule("dualpipe", 0, 1, -2, 0.0, 1.0, fb=1, halved=True, beyond=1, weights=2, source="arXiv:2412.19437"),
        ("dualpipev", "dualpipe-v"),
    ),
)
SCHEDULES: dict[str, Schedule] = {plain(name): row for row, aliases in _ROWS for name in (row.name, *aliases)}


def schedule_named(name: str) -> Schedule:
    """Return a schedule by name or alias.

    Raises:
        LedgerError: no such schedule.
    """
    found = SCHEDULES.get(plain(name))
    if found is None:
        raise LedgerError(f"unknown schedule {name!r}; known: {', '.join(row.name for row, _ in _ROWS)}")
    return found


def bubble_time(
    schedule: str, stages: int, forward: float, backward: float, weight: float, *, overlapped: float | None = None, interleave: int = 1
) -> float:
    """Return idle time of a stage in a step.

    Args:
        backward: for inputs alone; a full backward is backward + weight.
        overlapped: of a forward and a full backward of another micro-batch at once; by default their sum.
        interleave: chunks of layers on each stage; the time of a chunk, and with it the bubble, shrinks by it.
    """
    row = schedule_named(schedule)
    both = forward + backward + weight if overlapped is None else overlapped
    factor = stages / 2 - 1 if row.halved else stages - 1
    idle = row.f * forward + row.b * backward + row.w * weight + row.fb * both
    return max(0.0, factor * idle) / interleave


def bubble_share(stages: int, microbatches: float, *, interleave: int = 1, schedule: str = "1f1b", over: str = "ideal") -> float:
    """Return the bubble as a share of the ideal time, (p - 1)/(v m), or of the total, (p - 1)/(v m + p - 1), when F = B = W.

    Other schedules have their published share of 1F1B's figure in the same denominator (zero-bubble tables do it this way).

    Raises:
        LedgerError: an unknown schedule or denominator, or no micro-batch.
    """
    if microbatches <= 0:
        raise LedgerError(f"{microbatches} micro-batches; a step needs at least one")
    row = schedule_named(schedule)
    slots = interleave * microbatches
    if over == "ideal":
        return row.equal_share * (stages - 1) / slots
    if over == "total":
        return row.equal_share * (stages - 1) / (slots + stages - 1)
    raise LedgerError(f"a bubble is a share of 'ideal' or of 'total' time, not of {over!r}")


def activation_factor(schedule: str, stages: int, interleave: int = 1) -> float:
    """Return the most activations of a stage over those that 1F1B keeps (p micro-batches of its layers)."""
    row = schedule_named(schedule)
    extra = (stages - 1) / (stages * interleave) if interleave > 1 else 0.0
    return row.memory + extra + row.beyond / stages


def in_flight(schedule: str, stages: int, microbatches: int, interleave: int = 1) -> float:
    """Return how many micro-batches' activations the first stage keeps at once; all of them under gpipe."""
    if schedule_named(schedule).name == "gpipe":
        return float(microbatches)
    return min(activation_factor(schedule, stages, interleave) * stages, microbatches)


def microbatches(global_batch: int, micro_batch: int, data_parallel: int) -> int:
    """Return micro-batches of a step on each pipeline.

    Raises:
        LedgerError: the batch does not divide.
    """
    return dividing("the global batch", global_batch, micro_batch * data_parallel, "micro batch x data-parallel ranks")
