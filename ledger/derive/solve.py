"""Finds a chain of relations from what is given to what is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..problems import LedgerError
from .quantities import QUANTITIES, quantity
from .rules import RULES, Rule, Switches

_Found = tuple[float, tuple[str, ...]]  # a value and the lines that led to it


@dataclass(frozen=True)
class Answer:
    """The figure, in its quantity's unit, and the relations that led to it, first to last."""

    name: str
    value: float
    unit: str
    steps: tuple[str, ...]
    switches: Switches

    def __str__(self) -> str:
        head = f"{self.name} = {self.value:.6g} {self.unit}".rstrip()
        switches = f"[attention counted: {self.switches.attention}; recompute: {self.switches.recompute or 'not said'}]"
        return "\n  ".join((head, *self.steps, switches))


def derive(want: str, given: Mapping[str, float], *, attention: str = "full", recompute: str | None = None) -> Answer:
    """Return the quantity `want`, from quantities in their own units (see `QUANTITIES`).

    Args:
        attention: how attention is counted where FLOPs come from sizes: "full", "causal" or "none".
        recompute: the policy, where executed FLOPs are asked for.

    Raises:
        LedgerError: an unknown name, or no chain leads there; the message says what would help.
    """
    target = quantity(want).name
    known: dict[str, _Found] = {quantity(name).name: (float(value), ()) for name, value in given.items()}
    switches = Switches(attention, recompute)
    found = _find(target, known, switches, frozenset())
    if found is None:
        lacking = sorted({", ".join(name for name in rule.needs if name not in known) for rule in RULES if rule.gives == target})
        has = ", ".join(sorted(known)) or "nothing"
        raise LedgerError(f"{target} does not follow from {has}; it would with: {'; or '.join(lacking)}")
    value, lines = found
    return Answer(target, value, QUANTITIES[target].unit, tuple(dict.fromkeys(lines)), switches)


def _find(target: str, known: dict[str, _Found], switches: Switches, above: frozenset[str]) -> _Found | None:
    if target in known:
        return known[target]
    for rule in RULES:
        if rule.gives != target or not rule.when(switches):
            continue
        inputs = _inputs(rule, known, switches, above | {target})
        if inputs is None:
            continue
        value = rule.compute(*(each for each, _ in inputs), switches)
        lines = tuple(line for _, before in inputs for line in before)
        known[target] = (value, (*lines, f"{target} = {rule.text} = {value:.6g}"))
        return known[target]
    return None


def _inputs(rule: Rule, known: dict[str, _Found], switches: Switches, above: frozenset[str]) -> list[_Found] | None:
    """Return the inputs of a rule; one that is being looked for above is no way to itself."""
    found = []
    for name in rule.needs:
        each = None if name in above else _find(name, known, switches, above)
        if each is None:
            return None
        found.append(each)
    return found
