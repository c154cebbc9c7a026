"""The error of the ledger, and the nearest known name for one that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

from ..errors import StateroomError

Found = TypeVar("Found")


class LedgerError(StateroomError, ValueError):
    """A question that the ledger cannot answer: an unknown name, a size that does not divide, a missing figure."""


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Return up to `count` known names that look like `name`, best first."""
    by_plain = {plain(each): each for each in known}
    wanted = plain(name)
    close = difflib.get_close_matches(wanted, by_plain, n=count, cutoff=0.5)
    inside = [each for each in by_plain if wanted and (wanted in each or each in wanted) and each not in close]
    return [by_plain[each] for each in (close + inside)[:count]]


def plain(name: str) -> str:
    """Return a name without case and separators, so that `Llama-3.1 8B` and `llama3_1_8b` are one."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def look_up(kind: str, name: str, table: Mapping[str, Found]) -> Found:
    """Return the entry whose name is `name`, whatever its case and separators.

    Raises:
        LedgerError: no such entry; the message names the nearest ones.
    """
    by_plain = {plain(each): each for each in table}
    found = by_plain.get(plain(name))
    if found is not None:
        return table[found]
    near = nearest(name, table)
    hint = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(sorted(table))}"
    raise LedgerError(f"unknown {kind} {name!r}; {hint}")


def dividing(what: str, total: int, parts: int, by: str) -> int:
    """Return total / parts.

    Raises:
        LedgerError: it leaves a remainder; the message names the nearest numbers that divide.
    """
    if parts < 1:
        raise LedgerError(f"{by} is {parts}; it must be at least 1")
    if total % parts:
        legal = [number for number in range(1, total + 1) if total % number == 0]
        below = max(number for number in legal if number < parts) if parts > 1 else 1
        above = min((number for number in legal if number > parts), default=total)
        near = f"{below}" if above == below else f"{below} or {above}"
        raise LedgerError(f"{what} is {total} and does not divide by {by} = {parts}; nearest {by} that divides: {near}")
    return total // parts
