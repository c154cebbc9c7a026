"""A case of a known-answers file: its inputs, and how its unit is read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from stateroom.ledger.units import BYTES, PREFIXES, SECONDS

LONG_PREFIXES = {
    "kilo": 1e3, "mega": 1e6, "giga": 1e9, "tera": 1e12, "peta": 1e15, "exa": 1e18, "zetta": 1e21, "yotta": 1e24,
}  # fmt: skip


class Unanswered(Exception):
    """No question of the ledger has these inputs."""


@dataclass(frozen=True)
class Case:
    """What a case says. Which of two figures is meant (total or active, host or device) is said by a word of its name."""

    id: str
    kind: str
    inputs: dict[str, Any]
    expected: float
    unit: str
    rel_tol: float
    formula: str = ""
    note: str = ""
    source: str = ""

    @classmethod
    def read(cls, data: dict[str, Any]) -> Case:
        return cls(
            **{key: data.get(key) or "" if key in ("formula", "note", "source", "unit") else data[key] for key in cls.__annotations__}
        )

    def __getitem__(self, key: str) -> Any:
        return self.inputs[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self.inputs.get(key, default)

    def has(self, *keys: str) -> bool:
        return all(key in self.inputs for key in keys)

    def first(self, *keys: str, default: Any = None) -> Any:
        """Return the value of the first of several names for one thing."""
        for key in keys:
            if key in self.inputs:
                return self.inputs[key]
        return default

    @property
    def words(self) -> set[str]:
        """Words of the name and the unit, in lower case."""
        return set(re.split(r"[^a-z0-9+]+", f"{self.id} {self.unit}".lower().replace("gib", "gib ")))

    def says(self, *texts: str) -> bool:
        """Return whether the formula, the note, the unit or the source has one of the texts."""
        told = f"{self.formula} {self.note} {self.unit} {self.source}".lower()
        return any(text.lower() in told for text in texts)

    def formula_has(self, *texts: str) -> bool:
        """Return whether the formula has one of the texts, blanks aside."""
        plain = self.formula.replace(" ", "").replace("*", "").lower()
        return any(text.replace(" ", "").replace("*", "").lower() in plain for text in texts)


def unit_word(unit: str) -> str:
    """Return the unit without its explanation: `GB (must be ...)` is `GB`."""
    return re.split(r"[\s(]", unit.strip(), maxsplit=1)[0] if unit.strip() else ""


def in_bytes(unit: str) -> float:
    """Return how many bytes the unit is."""
    word = unit_word(unit).split("/")[0]
    if word not in BYTES:
        raise Unanswered(f"{unit!r} is no unit of bytes")
    return BYTES[word]


def in_seconds(unit: str) -> float:
    """Return how many seconds the unit is."""
    word = unit_word(unit)
    if word not in SECONDS:
        raise Unanswered(f"{unit!r} is no unit of time")
    return SECONDS[word]


def is_bytes(unit: str) -> bool:
    return unit_word(unit).split("/")[0] in BYTES


def is_seconds(unit: str) -> bool:
    return unit_word(unit) in SECONDS


def is_share(unit: str) -> bool:
    return unit.strip().startswith("%")


def is_flop(unit: str) -> bool:
    return re.match(r"\s*(?:[kKMGTPEZY]|[a-z]+)?FLOPs?(?:\b|_|$)", unit) is not None or unit.startswith(("PF-", "EF-", "TF-"))


def flop_scale(unit: str) -> float:
    """Return how many FLOP (or FLOP/s) the unit is, from its prefix: TFLOP/s, zettaFLOP, PF-days."""
    match = re.match(r"\s*([A-Za-z]*?)FLOP", unit)
    if match is None:
        days = re.match(r"\s*([A-Za-z])F[-/ ]?(?:s[-/ ])?days?", unit)
        if days is None:
            raise Unanswered(f"{unit!r} is no unit of FLOPs")
        return PREFIXES[days[1]] * 86400
    prefix = match[1]
    if prefix in PREFIXES:
        return PREFIXES[prefix]
    if prefix.lower() in LONG_PREFIXES:
        return LONG_PREFIXES[prefix.lower()]
    raise Unanswered(f"{unit!r} has an unknown prefix")


def leading_number(unit: str) -> float:
    """Return the factor that a unit begins with: `1e3 tokens` counts thousands, `M USD` millions."""
    word = unit.strip().split(" ")[0] if unit.strip() else ""
    try:
        return float(word)
    except ValueError:
        pass
    named = {"thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "G": 1e9}
    return named.get(word, 1.0)
