"""Two runs beside each other: which config keys differ, and which figures with them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..problems import LedgerError
from ..units import show_bytes, show_seconds
from .run import RunRecord, read_run

_FIGURES = (("step time", "step_s", "s"), ("tokens of a step", "tokens", "tokens"), ("loss", "loss", ""), ("gradient norm", "grad_norm",
    ""),
            ("memory", "memory_bytes", "bytes"))  # fmt: skip
_QUIET = ("run_dir",)


@dataclass(frozen=True)
class Difference:
    """Keys that differ, (path, in A, in B), and figures, (name, A, B, unit)."""

    one: str
    other: str
    keys: tuple[tuple[str, Any, Any], ...]
    figures: tuple[tuple[str, float | None, float | None, str], ...]

    def lines(self) -> list[str]:
        """Return the difference as text."""
        lines = [f"A: {self.one}", f"B: {self.other}", "config keys that differ:" if self.keys else "the configs are equal"]
        lines += [f"  {path}: {first!r} -> {second!r}" for path, first, second in self.keys]
        lines.append("figures (median of the settled steps):")
        for name, first, second, unit in self.figures:
            change = f"  {100 * (second / first - 1):+.2f} %" if first and second is not None else ""
            lines.append(f"  {name}: {_shown(first, unit)} -> {_shown(second, unit)}{change}")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as plain data."""
        return {
            "a": self.one,
            "b": self.other,
            "config": [{"key": path, "a": first, "b": second} for path, first, second in self.keys],
            "figures": [{"name": name, "a": first, "b": second, "unit": unit} for name, first, second, unit in self.figures],
        }


def diff_runs(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> Difference:
    """Return how two run directories, or two accounts written with --json, differ.

    Raises:
        LedgerError: one of them cannot be read, or they are not of one kind.
    """
    first, second = Path(one), Path(other)
    if first.is_dir() != second.is_dir():
        raise LedgerError(f"compare two run directories, or two files of `stateroom ledger --json`, not {first} with {second}")
    if first.is_dir():
        return _runs(read_run(first), read_run(second))
    return _accounts(first, second)


def _runs(one: RunRecord, other: RunRecord) -> Difference:
    keys = _differing(one.config, other.config) + _differing(one.environment, other.environment, "environment.")
    figures = [(name, one.typical(key), other.typical(key), unit) for name, key, unit in _FIGURES]
    states = {row["state"]: row["measured_bytes"] for row in one.ledger.get("states", [])}
    others = {row["state"]: row["measured_bytes"] for row in other.ledger.get("states", [])}
    figures += [(name, states.get(name), others.get(name), "bytes") for name in dict.fromkeys([*states, *others])]
    return Difference(str(one.path), str(other.path), tuple(keys), tuple(figures))


def _accounts(one: Path, other: Path) -> Difference:
    import json

    try:
        data = [json.loads(path.read_text()) for path in (one, other)]
    except (OSError, json.JSONDecodeError) as error:
        raise LedgerError(f"an account cannot be read: {error}") from None
    keys = _differing(
        {**data[0].get("layout", {}), "cluster": data[0].get("cluster")}, {**data[1].get("layout", {}), "cluster": data[1].get("cluster")}
    )
    figures: list[tuple[str, float | None, float | None, str]] = []
    for name, path, unit in (("peak memory", ("memory", "peak_bytes"), "bytes"), ("step time", ("time", "parts", "total"), "s"), ("MFU",
        ("time", "mfu"), ""),
                             ("tokens a second", ("time", "tokens_per_s"), "tokens")):  # fmt: skip
        figures.append((name, _at(data[0], path), _at(data[1], path), unit))
    parts = [{term["name"]: term["value"] for term in _at(each, ("time", "parts", "terms")) or []} for each in data]
    figures += [(name, parts[0].get(name, 0.0), parts[1].get(name, 0.0), "s") for name in dict.fromkeys([*parts[0], *parts[1]])]
    return Difference(str(one), str(other), tuple(keys), tuple(figures))


def _at(data: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        if not isinstance(data, dict) or key not in data:
            return None
        data = data[key]
    return data


def _differing(one: dict[str, Any], other: dict[str, Any], above: str = "") -> list[tuple[str, Any, Any]]:
    found: list[tuple[str, Any, Any]] = []
    for key in dict.fromkeys([*one, *other]):
        path, first, second = f"{above}{key}", one.get(key), other.get(key)
        if path in _QUIET or first == second:
            continue
        if isinstance(first, dict) and isinstance(second, dict):
            found += _differing(first, second, f"{path}.")
        else:
            found.append((path, first, second))
    return found


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "bytes":
        return show_bytes(value)
    return show_seconds(value) if unit == "s" else f"{value:,.6g}"
