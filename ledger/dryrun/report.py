"""What a dry run has found, as text and as plain data, beside the calculator's figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..records import TrafficRow
from ..units import show_bytes, show_count
from .beside import Beside
from .classes import RankClass
from .memory import Instant

INSTANTS = ("between steps", "end of forward", "backward", "optimizer")
CONTROL = "control"  # small agreements of the engine, which the calculator leaves out
Table = Sequence[Sequence[str]]


@dataclass(frozen=True)
class DryRun:
    """The figures of one step of one rank, bytes without prefixes.

    Attributes:
        instants: bytes by state, in the order of INSTANTS. classes: all ranks by what they hold at rest.
        traffic: the engine's collectives; own: the script's, (name, ranks, calls, payload bytes).
        axis: the mesh axis that the engine's collectives run over.
        seconds, host_bytes: what the dry run itself took.
    """

    script: str
    rank: int
    world: int
    stage: int
    steps: int
    instants: tuple[Instant, ...]
    classes: tuple[RankClass, ...]
    traffic: tuple[TrafficRow, ...]
    own: tuple[tuple[str, int, int, int], ...]
    axis: str
    flops: int
    beside: Beside
    seconds: float
    host_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> Instant:
        """The fullest instant."""
        return max(self.instants, key=lambda instant: instant.total)

    @property
    def usable_bytes(self) -> float | None:
        """What a device of the cluster can hold; None when no cluster was named."""
        job = self.beside.job
        limit = None if job is None else job.cluster.accelerator.usable_bytes
        return None if limit is None or limit == float("inf") else limit

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        calculator = self.beside
        return {
            "script": self.script, "rank": self.rank, "world": self.world, "stage": self.stage, "steps": self.steps,
            "memory": {
                "instants": [
                    {"name": each.name, "operation": each.operation, "states": dict(each.states), "total": each.total,
                     "calculator": calculator.instants.get(each.name)} for each in self.instants
                ],
                "peak": self.peak.name, "peak_bytes": self.peak.total, "usable_bytes": self.usable_bytes,
            },
            "rank_classes": [{"ranks": each.spans, "count": each.count, "states": dict(each.states)} for each in self.classes],
            "states": [{"state": state, "bytes": size, "calculator": calculator.states.get(state)} for state, size in self._rest().items()],
            "traffic": [
                {**asdict(row), "axis": self.axis, "calculator": calculator.traffic.get((self.axis, row.kind, row.state))}
                for row in self.traffic
            ],
            "own_collectives": [dict(zip(("name", "ranks", "calls", "bytes"), row, strict=True)) for row in self.own],
            "flops": {"counted": self.flops, "calculator": calculator.flops},
            "calculator": calculator.why or None if calculator.job is None else calculator.job.layout.to_dict(),
            "took": {"seconds": self.seconds, "host_bytes": self.host_bytes},
            "notes": list(self.notes),
        }  # fmt: skip

    def to_json(self) -> str:
        """Return to_dict() as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def _rest(self) -> dict[str, int]:
        """States that are there between steps."""
        return {state: size for state, size in self.instants[0].states.items() if size}

    def lines(self) -> list[str]:
        """Return the report as text."""
        head = (
            f"dry run of {self.script}: rank {self.rank:,} of {self.world:,}, ZeRO stage {self.stage}, figures of step {self.steps} "
            f"({self.seconds:.1f} s, {show_bytes(self.host_bytes)} of host memory)"
        )
        lines = [
            head,
            "",
            "bytes at rest on this rank",
            *_aligned(self._rest_table()),
            "",
            "bytes over a step",
            *_aligned(self._course_table()),
        ]
        lines += [self._peak_line(), "", "rank classes: ranks that hold the same at rest", *_aligned(self._class_table())]
        lines += ["", "collectives of a step: payload is the whole buffer", *_aligned(self._traffic_table())]
        lines += ["", *self._flops_lines()]
        if self.beside.why:
            lines.append(f"- no calculator beside it: {self.beside.why}")
        return [*lines, *(f"- {note}" for note in self.notes)]

    def _rest_table(self) -> Table:
        table = [("state", "dry run", "calculator", "difference")]
        rest, known = self._rest(), self.beside.states
        table += [(state, f"{size:,}", *_beside(size, known.get(state))) for state, size in rest.items()]
        both = [(size, known[state]) for state, size in rest.items() if state in known]
        if both:
            table.append(
                ("sum of what both know", f"{sum(a for a, _ in both):,}", *_beside(sum(a for a, _ in both), sum(b for _, b in both)))
            )
        return [*table, ("sum", f"{sum(rest.values()):,}", "", "")]

    def _course_table(self) -> Table:
        table: list[Sequence[str]] = [("state", *(each.name for each in self.instants))]
        for state in self.instants[0].states:
            table.append((state, *(f"{each.states.get(state, 0):,}" for each in self.instants)))
        table.append(("sum", *(f"{each.total:,}" for each in self.instants)))
        known = self.beside.instants
        if known:
            table.append(("calculator", *(f"{known.get(each.name, 0):,.0f}" for each in self.instants)))
            changes = [each.total / known[each.name] - 1 if known.get(each.name) else None for each in self.instants]
            table.append(("difference", *("" if change is None else f"{100 * change:+.1f} %" for change in changes)))
        return table

    def _peak_line(self) -> str:
        at = self.peak
        after = f", after {at.operation}" if at.operation else ""
        largest = sorted(at.states.items(), key=lambda item: -item[1])[:3]
        shares = ", ".join(f"{state} {100 * size / at.total:.0f} %" for state, size in largest)
        text = f"  the peak is {at.name}{after}: {show_bytes(at.total)} of tensors; {shares}"
        limit = self.usable_bytes
        if limit is not None:
            text += f"; {100 * at.total / limit:.0f} % of the {show_bytes(limit)} that a process can allocate"
        return text

    def _class_table(self) -> Table:
        names = list(self.classes[0].states) if self.classes else []
        own = sum(size for state, size in self._rest().items() if state in names)
        table: list[Sequence[str]] = [("ranks", "how many", *names, "sum", "peak")]
        for each in self.classes:
            sizes = ("not known" if size is None else f"{size:,}" for size in each.states.values())
            table.append((each.words(), f"{each.count:,}", *sizes, f"{each.total:,}", f"{self.peak.total - own + each.total:,}"))
        return table

    def _traffic_table(self) -> Table:
        table: list[Sequence[str]] = [("axis", "collective", "state", "calls", "bytes", "calculator: calls", "bytes", "difference")]
        for row in self.traffic:
            known = self.beside.traffic.get((self.axis, row.kind, row.state))
            calls = "" if known is None else f"{known[0]:,}"
            beside = _beside(row.counted_bytes, None if known is None else known[1])
            table.append((self.axis, row.kind, row.state, f"{row.counted_calls:,}", f"{row.counted_bytes:,}", calls, *beside))
        for name, ranks, calls_made, size in self.own:
            table.append((f"{ranks:,} ranks", name, "the script's own", f"{calls_made:,}", f"{size:,}", "", "", ""))
        if len(table) == 1:
            table.append(("none", "", "", "0", "0", "", "", ""))
        return table

    def _flops_lines(self) -> list[str]:
        line = f"FLOPs of this rank in a step: {show_count(self.flops)}FLOP counted on matrix products and attention (all pairs)"
        known = self.beside.flops
        if known:
            line += f"; calculator {show_count(known)}FLOP ({100 * (self.flops / known - 1):+.2f} %)"
        return [line]


def _beside(found: float, known: float | None) -> tuple[str, str]:
    return ("", "") if known is None else (f"{known:,.0f}", f"{found - round(known):+,}")


def _aligned(table: Table) -> list[str]:
    """Return rows as text, words to the left and numbers to the right."""
    wide = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    words = [
        not any(row[column][:1] in "+-0123456789" and row[column][:1] for row in table[1:]) or column == 0 for column in range(len(wide))
    ]
    return [
        "  "
        + "  ".join(f"{cell:<{size}}" if left else f"{cell:>{size}}" for cell, size, left in zip(row, wide, words, strict=True)).rstrip()
        for row in table
    ]
