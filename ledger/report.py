"""The ledger as a user sees it: tables that add up, and the same as plain data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

from .records import LedgerRow, MoveRow, TrafficRow

if TYPE_CHECKING:
    from .figures import StepFigures


@dataclass(frozen=True)
class Ledger:
    """States and traffic of one rank, and what its newest steps cost. `print(ledger)` gives the tables, `to_dict()` the data."""

    title: str
    rank: int
    world: int
    states: tuple[LedgerRow, ...]
    traffic: tuple[TrafficRow, ...]
    notes: tuple[str, ...] = ()
    step: StepFigures | None = None
    model: dict[str, object] | None = None  # sizes of the model, where its module says them
    moves: tuple[MoveRow, ...] = ()
    working: tuple[tuple[str, int], ...] = ()

    def tier_bytes(self, tier: str) -> tuple[int, int]:
        """Return (predicted, measured) bytes at rest on one tier."""
        rows = [row for row in self.states if row.tier == tier]
        return sum(row.predicted_bytes or 0 for row in rows), sum(row.measured_bytes for row in rows)

    @property
    def predicted_peak_bytes(self) -> int:
        """Bytes in memory at the highest point of a step: what rests there, and what is in use. Activations are not counted."""
        resting = sum(row.predicted_bytes or 0 for row in self.states if row.tier != "nvme")
        return resting + sum(num_bytes for _, num_bytes in self.working)

    @property
    def predicted_bytes(self) -> int:
        """Sum of predicted bytes at rest."""
        return sum(row.predicted_bytes or 0 for row in self.states)

    @property
    def measured_bytes(self) -> int:
        """Sum of measured bytes."""
        return sum(row.measured_bytes for row in self.states)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "title": self.title,
            "rank": self.rank,
            "world": self.world,
            "states": [asdict(row) for row in self.states],
            "traffic": [asdict(row) for row in self.traffic],
            "predicted_bytes": self.predicted_bytes,
            "measured_bytes": self.measured_bytes,
            "model": self.model,
            "step": None if self.step is None else self.step.to_dict(),
            "working": dict(self.working),
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "moves": [asdict(row) for row in self.moves],
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """Return to_dict() as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        return render(self)

    def print(self) -> None:
        """Print the tables."""
        print(render(self), flush=True)


def render(ledger: Ledger, width: int = 118) -> str:
    """Return the tables as text."""
    from rich.console import Console
    from rich.table import Table

    states = Table(title=f"{ledger.title}, rank {ledger.rank} of {ledger.world}: bytes at rest", title_justify="left")
    for heading in ("state", "dtype", "placement", "tier"):
        states.add_column(heading, overflow="fold")
    for heading in ("predicted", "measured", "difference"):
        states.add_column(heading, justify="right", no_wrap=True)
    for row in ledger.states:
        difference = "" if row.predicted_bytes is None else f"{row.measured_bytes - row.predicted_bytes:+,}"
        predicted = "not known" if row.predicted_bytes is None else f"{row.predicted_bytes:,}"
        states.add_row(row.state, row.dtype, row.placement, row.tier, predicted, f"{row.measured_bytes:,}", difference)
    states.add_section()
    tiers = dict.fromkeys(row.tier for row in ledger.states)
    for tier in tiers if len(tiers) > 1 else ():
        predicted_sum, measured_sum = ledger.tier_bytes(tier)
        states.add_row("sum", "", "", tier, f"{predicted_sum:,}", f"{measured_sum:,}", f"{measured_sum - predicted_sum:+,}")
    difference = f"{ledger.measured_bytes - ledger.predicted_bytes:+,}"
    states.add_row("sum", "", "", "", f"{ledger.predicted_bytes:,}", f"{ledger.measured_bytes:,}", difference)
    parts: list[Any] = [states]
    if ledger.traffic:
        parts.append(_traffic_table(ledger.traffic))
    if ledger.moves:
        parts.append(_moves_table(ledger.moves))
    text = StringIO()
    console = Console(file=text, width=width, force_terminal=False, color_system=None, legacy_windows=False)
    for part in parts:
        console.print(part)
    if ledger.step is not None:
        text.write("\n".join(ledger.step.lines()) + "\n")
    if ledger.working:
        terms = ", ".join(f"{num_bytes:,} {name}" for name, num_bytes in ledger.working)
        text.write(f"- at the highest point of a step {ledger.predicted_peak_bytes:,} bytes are in memory, of which in use: {terms}\n")
    for note in [*(f"{row.state}: {row.note}" for row in ledger.states if row.note), *ledger.notes]:
        text.write(f"- {note}\n")
    return text.getvalue()


def _traffic_table(rows: Sequence[TrafficRow]) -> Any:
    from rich.table import Table

    table = Table(title="traffic of the last step: payload bytes of the full buffers", title_justify="left")
    table.add_column("collective")
    table.add_column("state")
    for heading in ("calls predicted", "counted", "bytes predicted", "counted", "sent by this rank"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        numbers = (row.predicted_calls, row.counted_calls, row.predicted_bytes, row.counted_bytes, row.sent_bytes)
        table.add_row(row.kind, row.state, *(f"{number:,}" for number in numbers))
    table.add_section()
    sums = [
        sum(getattr(row, name) for row in rows)
        for name in ("predicted_calls", "counted_calls", "predicted_bytes", "counted_bytes", "sent_bytes")
    ]
    table.add_row("sum", "", *(f"{number:,}" for number in sums))
    return table


def _moves_table(rows: Sequence[MoveRow]) -> Any:
    from rich.table import Table

    table = Table(title="moved by the last step between drive and memory", title_justify="left")
    table.add_column("direction")
    table.add_column("state")
    for heading in ("bytes predicted", "counted", "s at the measured rate"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.direction, row.state, f"{row.predicted_bytes:,}", f"{row.counted_bytes:,}", f"{row.seconds:.4f}")
    table.add_section()
    predicted, counted = sum(row.predicted_bytes for row in rows), sum(row.counted_bytes for row in rows)
    table.add_row("sum", "", f"{predicted:,}", f"{counted:,}", f"{sum(row.seconds for row in rows):.4f}")
    return table
