"""Reads what the engine leaves in a run directory."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ..problems import LedgerError

_WARM_UP = 2  # the first steps build kernels, buffers and communicators


@dataclass(frozen=True)
class RunRecord:
    """A run directory: its resolved config, the facts of its environment, the engine's account, and a record for each step."""

    path: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    ledger: dict[str, Any]
    steps: tuple[dict[str, Any], ...]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return int(self.environment.get("ranks") or self.ledger.get("world") or 1)

    @property
    def seq(self) -> int | None:
        """Tokens of a sequence that the engine saw, or None."""
        return int((self.ledger.get("step") or {}).get("seq") or 0) or None

    @property
    def model(self) -> dict[str, Any] | None:
        """The model's sizes as the engine read them off the module, or None."""
        return self.ledger.get("model")

    def part(self, *starts: str) -> float | None:
        """Return the median seconds of the parts of a step's account whose names begin with one of `starts`, or None without accounts."""
        sums = [
            sum(seconds for name, seconds in step["account"].items() if name.startswith(starts))
            for step in self.settled()
            if isinstance(step.get("account"), dict)
        ]
        return median(sums) if sums else None

    def settled(self) -> Sequence[dict[str, Any]]:
        """Return the steps after the warm-up; all of them in a run that has no more."""
        return self.steps[_WARM_UP:] or self.steps

    def typical(self, key: str) -> float | None:
        """Return the median of a figure over the settled steps, or None where no step has it."""
        values = [float(step[key]) for step in self.settled() if isinstance(step.get(key), (int, float))]
        return median(values) if values else None


def read_run(folder: str | os.PathLike[str]) -> RunRecord:
    """Return a run directory's records; a file that is not there yet is empty.

    Raises:
        LedgerError: no such folder, nothing of a run in it, or a file that cannot be read.
    """
    path = Path(folder)
    if not path.is_dir():
        raise LedgerError(f"{path} is no folder; a run directory is what the config key run_dir names")
    found = {name: _json(path / name) for name in ("config.resolved.json", "environment.json", "ledger.json")}
    steps = _lines(path / "metrics.jsonl")
    if not steps and not any(found.values()):
        raise LedgerError(f"{path} holds none of metrics.jsonl, ledger.json, config.resolved.json; set run_dir in the config of the run")
    return RunRecord(path, found["config.resolved.json"], found["environment.json"], found["ledger.json"], steps)


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise LedgerError(f"{path} is cut off or no JSON: {error}") from None
    return data if isinstance(data, dict) else {}


def _lines(path: Path) -> tuple[dict[str, Any], ...]:
    """A run that was killed may leave half a last line, which is left out."""
    if not path.exists():
        return ()
    found = []
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise LedgerError(f"{path}, line {number}: no JSON") from None
    return tuple(found)
