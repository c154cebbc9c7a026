"""The life of one parameter over a step: where its parts lie, when it is whole, reduced and updated, and which files hold it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..zero.layout import Layout
from .units import show_seconds

_MOST_RANKS = 16  # that a table of places lists


@dataclass(frozen=True)
class Place:
    """Elements [start, stop) of the flattened parameter on a rank, at element `at` of what the rank keeps of the unit."""

    rank: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class State:
    """One state of the parameter. `where` is whole or cut; `num_bytes` are those of this rank."""

    name: str
    dtype: str
    where: str
    num_bytes: int
    note: str = ""


@dataclass(frozen=True)
class Event:
    """Something that happened to the parameter's unit, `at_s` seconds after the step began, on the host's clock."""

    at_s: float
    during: str
    what: str


@dataclass(frozen=True)
class ParameterTrace:
    """What `engine.trace_parameter(name)` returns; `print(trace)` gives the tables.

    Attributes:
        numel, offset: of the parameter in the flat space of its unit, whose buffer has `unit_numel` elements, padding included.
        places: the ranks that keep a part, where it is cut; empty where every rank keeps all of it.
        events: of the newest whole step, in order. step: its number.
        files: (state, file, elements) of the newest checkpoint; checkpoint: its folder, or why there is none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    unit: str
    unit_numel: int
    numel: int
    offset: int
    rank: int
    world: int
    trainable: bool
    places: tuple[Place, ...]
    states: tuple[State, ...]
    step: int
    events: tuple[Event, ...]
    checkpoint: str
    files: tuple[tuple[str, str, int], ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(self)

    def to_json(self) -> str:
        """Return to_dict() as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return the tables as text."""
        shape = " x ".join(map(str, self.shape)) or "scalar"
        lines = [
            f"{self.name}: {shape}, {self.dtype}, {self.numel:,} elements{'' if self.trainable else ', frozen'}",
            f"  elements {self.offset:,} to {self.offset + self.numel:,} of unit {self.unit}, whose buffer has {self.unit_numel:,}",
            "",
            f"states on rank {self.rank} of {self.world}",
            *_table(
                [("state", "dtype", "where", "bytes", ""), *((s.name, s.dtype, s.where, f"{s.num_bytes:,}", s.note) for s in self.states)]
            ),
            "",
            *self._place_lines(),
            "",
            *self._event_lines(),
            "",
            *self._file_lines(),
        ]
        return [*lines, *(f"- {note}" for note in self.notes)]

    def _place_lines(self) -> list[str]:
        if not self.places:
            return ["every rank keeps all of it"]
        rows = [(f"{p.rank:,}", f"[{p.start:,}, {p.stop:,})", f"{p.at:,}") for p in self.places[:_MOST_RANKS]]
        rest = len(self.places) - len(rows)
        tail = [f"  and {rest:,} more ranks"] if rest else []
        return ["parts", *_table([("rank", "elements", "at, in its shard"), *rows]), *tail]

    def _event_lines(self) -> list[str]:
        if not self.events:
            return ["no step has ended since the engine was built"]
        rows = [(show_seconds(e.at_s), e.during, e.what) for e in self.events]
        return [f"step {self.step} on this rank (host's clock)", *_table([("after", "during", "what"), *rows])]

    def _file_lines(self) -> list[str]:
        if not self.files:
            return [f"checkpoint: {self.checkpoint}"]
        rows = [(state, file, f"{numel:,}") for state, file, numel in self.files]
        return [f"checkpoint {self.checkpoint}", *_table([("state", "file", "elements"), *rows])]


def places_of(layout: Layout, extent: int) -> tuple[Place, ...]:
    """Return which ranks own which elements of parameter number `extent` of a unit."""
    found = []
    wanted = layout.extents[extent]
    for rank in range(layout.world):
        low, high = layout.interval(rank)
        start, stop = max(low, wanted.offset), min(high, wanted.end)
        if start < stop:
            found.append(Place(rank, start - wanted.offset, stop - wanted.offset, start - low))
    return tuple(found)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    wide = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  " + "  ".join(f"{cell:<{size}}" for cell, size in zip(row, wide, strict=True)).rstrip() for row in rows]
