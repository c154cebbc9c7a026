"""An account: named terms that add up to a total, each with its formula and numbers, printable and as plain data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from .units import show_bytes, show_count, show_seconds

_SHOWN: dict[str, Callable[[float], str]] = {
    "bytes": show_bytes,
    "s": show_seconds,
    "parameters": lambda number: f"{number:,.0f}",
    "FLOP": lambda number: f"{show_count(number)}FLOP" if number >= 1000 else f"{number:g} FLOP",
    "elements": show_count,
}


@dataclass(frozen=True)
class Term:
    """One line: `value` is in the account's unit; `why` is the formula or the reason in words."""

    name: str
    value: float
    why: str = ""


@dataclass(frozen=True)
class Account:
    """Terms whose sum is the total, and the switches under which they were counted.

    Attributes:
        unit: bytes, s, parameters, FLOP, elements, or any other word.
        switches: convention -> value in force; printed, since each of them changes the answer.
    """

    title: str
    unit: str
    terms: tuple[Term, ...]
    switches: dict[str, str] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Sum of the terms."""
        return sum(term.value for term in self.terms)

    def __getitem__(self, name: str) -> float:
        """Return the sum of the terms of this name."""
        values = [term.value for term in self.terms if term.name == name]
        if not values:
            raise KeyError(f"{self.title} has no term {name!r}; it has {', '.join(term.name for term in self.terms)}")
        return sum(values)

    def part(self, *starts: str) -> float:
        """Return the sum of the terms whose names begin with one of `starts`."""
        return sum(term.value for term in self.terms if term.name.startswith(starts))

    def scaled(self, factor: float, title: str | None = None) -> Account:
        """Return the same account with every term times `factor`."""
        terms = tuple(Term(term.name, term.value * factor, term.why) for term in self.terms)
        return Account(title or self.title, self.unit, terms, dict(self.switches))

    def to_dict(self) -> dict[str, Any]:
        """Return the account as plain data; the total is among it."""
        return {
            "title": self.title,
            "unit": self.unit,
            "terms": [{"name": term.name, "value": term.value, "why": term.why} for term in self.terms],
            "total": self.total,
            "switches": dict(self.switches),
        }

    def to_json(self) -> str:
        """Return to_dict() as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def lines(self) -> list[str]:
        """Return the account as aligned text, one term a line, the total last."""
        show = _SHOWN.get(self.unit, lambda number: f"{number:,.6g}")
        suffix = "" if self.unit in ("bytes", "s", "FLOP") else f" {self.unit}"
        rows = [(term.name, show(term.value) + suffix, self._share(term.value), term.why) for term in self.terms]
        rows.append(("total", show(self.total) + suffix, "", ""))
        wide = [max(len(row[column]) for row in rows) for column in range(3)]
        text = [f"  {name:<{wide[0]}}  {value:>{wide[1]}}  {share:>{wide[2]}}  {why}".rstrip() for name, value, share, why in rows]
        switches = [f"  [{name}: {value}]" for name, value in self.switches.items()]
        return [f"{self.title}", *text, *switches]

    def _share(self, value: float) -> str:
        return f"{100 * value / self.total:.1f} %" if self.total else ""

    def __str__(self) -> str:
        return "\n".join(self.lines())


def account(title: str, unit: str, terms: Iterable[tuple[str, float, str]], **switches: object) -> Account:
    """Return an account of (name, value, why) triples; terms that are nothing are left out."""
    kept = tuple(Term(name, value, why) for name, value, why in terms if value)
    return Account(title, unit, kept, {name.replace("_", " "): str(value) for name, value in switches.items()})
