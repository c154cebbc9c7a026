"""Prints what loading found: a table on a terminal, complete plain lines elsewhere, or JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from ..environment import world_size_hint
from ..errors import ConfigError
from .batch import MICRO, STEPS, TRAIN
from .draft import dotted, walk
from .loading import load
from .root import Config

_SAMPLE_RANKS = (1, 2, 4, 8)


def problem_lines(error: ConfigError) -> list[str]:
    """Return the problems of a failed load, one each, without the heading."""
    lines = [line.strip() for line in str(error).splitlines()]
    return lines[1:] if len(lines) > 1 and " problem" in lines[0] else lines


def print_check(name: str, config: Config, ranks: int | None, as_json: bool) -> None:
    """Print the verdict of every key that the config sets, and what was chosen for it."""
    warnings = config.unsupported()
    if as_json:
        report = {
            "file": name,
            "ok": True,
            "batch": batch_lines(config, ranks),
            "notes": [{"path": note.path, "kind": note.kind, "text": note.text} for note in config.notes],
            "warnings": warnings,
            "keys": [verdict._asdict() for verdict in config.verdicts()],
        }
        print(json.dumps(report, indent=2, default=str))
        return
    print(f"{name}: ok")
    for line in batch_lines(config, ranks):
        print(line)
    autos = [str(note) for note in config.notes if note.kind == "auto"]
    others = [str(note) for note in config.notes if note.kind not in ("auto", "derived")]
    _print_block("auto values are resolved and printed:", autos)
    _print_block("notes:", others)
    _print_block("warnings, asked for but not built yet:", warnings)
    rows = [(verdict.path, _shown(verdict.value), str(verdict)) for verdict in config.verdicts()]
    _print_rows(("key", "value", "what becomes of it"), rows)


def print_resolved(config: Config, as_json: bool) -> None:
    """Print every value of the resolved config with where it came from."""
    if as_json:
        print(json.dumps({"config": config.to_dict(), "origin": config.origin}, indent=2, default=str))
        return
    rows = [(dotted(path), _shown(value), config.origin.get(dotted(path), "default")) for path, value in walk(config.to_dict())]
    _print_rows(("key", "value", "from"), rows)


def batch_lines(config: Config, ranks: int | None) -> list[str]:
    """Return the batch sizes for the number of ranks asked for, or for a few when it is open."""
    ranks = ranks if ranks is not None else world_size_hint()
    given = [name for name in (TRAIN, MICRO, STEPS) if config.origin[name] not in ("derived", "auto")]
    lines = [_batch_line(config, ranks)] if ranks is not None or len(given) == 3 else _sampled_lines(config, given)
    if TRAIN not in given:
        each = config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps
        lines.append(
            f"any number of ranks: micro batch {config.train_micro_batch_size_per_gpu}, "
            f"accumulation {config.gradient_accumulation_steps}, train batch {each} x ranks"
        )
    return lines


def _sampled_lines(config: Config, given: list[str]) -> list[str]:
    """Solve again for some numbers of ranks; those that do not divide the batch are left out."""
    values = {key: value for key, value in config.to_dict().items() if key not in (TRAIN, MICRO, STEPS) or key in given}
    if not given:  # all three were "auto": what was chosen for one rank holds for any number
        values |= {MICRO: config.train_micro_batch_size_per_gpu, STEPS: config.gradient_accumulation_steps}
    lines = []
    for data_parallel in _SAMPLE_RANKS:
        try:
            solved = load(values, dp_world=data_parallel)
        except ConfigError:
            continue
        lines.append(_batch_line(solved, None))
    return lines


def _batch_line(config: Config, ranks: int | None) -> str:
    train, micro, steps = config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    data_parallel = train // (micro * steps)
    ranks = data_parallel if ranks is None else ranks
    plural = "rank" if data_parallel == 1 else "ranks"
    kind = plural if data_parallel == ranks else f"data-parallel {plural}"
    factors = f"{micro} x {data_parallel} {kind}" if steps == 1 else f"{micro} x {steps} x {data_parallel} {kind}"
    return f"{ranks} rank{'' if ranks == 1 else 's'}: micro batch {micro}, accumulation {steps}, train batch {train} ({factors})"


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)


def _print_block(title: str, lines: list[str]) -> None:
    if lines:
        print(title)
        for line in lines:
            print(f"  {line}")


def _print_rows(titles: tuple[str, str, str], rows: list[tuple[str, str, str]]) -> None:
    if not sys.stdout.isatty():
        for key, value, text in rows:
            print(f"{key} = {value}: {text}")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(markup=False).print(table)
