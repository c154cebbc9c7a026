"""`stateroom ckpt ls` and `stateroom ckpt show`: what lies in a directory, and in one checkpoint."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .source import Source


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("dir", metavar="DIR", help="directory of tags, or one checkpoint")
    parser.add_argument("--json", action="store_true", help="print JSON")
    if parser.prog.endswith("show"):
        parser.add_argument("--tag", metavar="T", help="which checkpoint; default: the latest")
        parser.add_argument("--files", action="store_true", help="say which file holds which elements of each state")
        parser.add_argument("--inert", action="append", default=[], metavar="MODULE.CLASS", help="read such objects as plain data")


def run(args: argparse.Namespace) -> int:
    """Print, and return 0."""
    if hasattr(args, "files"):
        from .opener import open_source

        source = open_source(args.dir, args.tag, tuple(args.inert))
        print(json.dumps(describe(source), indent=2) if args.json else "\n".join(shown(source, args.files)))
        return 0
    rows = listed(Path(args.dir))
    print(json.dumps(rows, indent=2) if args.json else "\n".join(table_of_tags(rows)))
    return 0


# ---- ls


def listed(path: Path) -> list[dict[str, Any]]:
    """Return a row for each checkpoint in a directory, or for the one that it is: newest steps last.

    Raises:
        CheckpointError: there is no such directory, or no checkpoint in it.
    """
    from ..errors import CheckpointError
    from .opener import LATEST, LATEST_UNIVERSAL, kind_of, tags_in

    if not path.exists():
        raise CheckpointError(f"{path} does not exist; name a directory in which checkpoints were saved")
    folders = [path / name for name in tags_in(path)] if path.is_dir() else []
    named = {}
    for name in (LATEST, LATEST_UNIVERSAL):
        if (path / name).is_file():
            named[(path / name).read_text(errors="replace").strip()] = name
    if not folders:
        if path.is_dir() and kind_of(path) is None:
            raise CheckpointError(f"{path} holds no checkpoints; name a directory in which checkpoints were saved")
        folders = [path]
    rows = [_row(folder, named.get(folder.name)) for folder in folders]
    return sorted(rows, key=lambda row: (row["step"] is None, row["step"] or 0, row["date"]))


def _row(folder: Path, named_by: str | None) -> dict[str, Any]:
    from .opener import kind_of, open_source

    files = [file for file in (folder.rglob("*") if folder.is_dir() else [folder]) if file.is_file()]
    kind = kind_of(folder) if folder.is_dir() else None
    problem = kind.problem(folder) if kind is not None else ""
    facts: dict[str, Any] = {}
    counters: dict[str, int] = {}
    if not problem:
        source = open_source(folder)
        facts, counters = source.facts(), dict(source.counters())
    newest = max((file.stat().st_mtime for file in files), default=folder.stat().st_mtime)
    return {
        "tag": folder.name,
        "step": counters.get("global_steps"),
        "bytes": sum(file.stat().st_size for file in files),
        "date": datetime.fromtimestamp(newest, timezone.utc).isoformat(timespec="seconds"),
        "writer": facts.get("writer") or (kind.name if kind is not None else None),
        "version": facts.get("version"),
        "stage": facts.get("stage"),
        "ranks": facts.get("ranks"),
        "named_by": named_by,
        "complete": not problem,
        "problem": problem,
    }


def table_of_tags(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the rows as lines."""
    from .progress import size

    head = ("tag", "step", "size", "date (UTC)", "written by", "state")
    cells = [head]
    for row in rows:
        writer = " ".join(str(part) for part in (row["writer"], row["version"]) if part)
        stage = f", stage {row['stage']}" if row["stage"] is not None else ""
        state = "complete" if row["complete"] else "broken"
        mark = f" <- {row['named_by']}" if row["named_by"] else ""
        step = "-" if row["step"] is None else str(row["step"])
        cells.append((row["tag"], step, size(row["bytes"]), row["date"][:16].replace("T", " "), writer + stage, state + mark))
    lines = _aligned(cells)
    return lines + [f"{row['tag']}: {row['problem']}" for row in rows if row["problem"]]


# ---- show


def describe(source: Source) -> dict[str, Any]:
    """Return everything but elements as JSON values."""
    return {
        **{key: value for key, value in source.facts().items() if _is_plain(value)},
        "counters": dict(source.counters()),
        "loss_scaler": source.loss_scaler() if _is_plain(source.loss_scaler()) else None,
        "groups": [{key: value for key, value in group.items() if _is_plain(value)} for group in source.groups()],
        "parameters": [_parameter(source, name) for name in source.parameters],
        "buffers": [
            {"name": name, "shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
            for name, tensor in source.buffers().items()
        ],
        "missing": [{"name": name, "state": state, "why": why} for (name, state), why in source.gaps().items()],
        "client_state": sorted(source.client_state()),
    }


def _parameter(source: Source, name: str) -> dict[str, Any]:
    one = source.parameters[name]
    return {
        "name": name,
        "shape": list(one.shape),
        "dtype": str(one.dtype).removeprefix("torch."),
        "trainable": one.trainable,
        "aliases": list(one.aliases),
        "states": {
            state: {
                "shape": list(source.shape_of(name, state)),
                "dtype": str(source.elements(name, state).dtype).removeprefix("torch."),
                "files": [{"file": file, "numel": numel} for file, numel in source.elements(name, state).places()],
            }
            for state in source.states(name)
        },
        "numbers": {key: float(value) for key, value in source.scalars(name).items()},
    }


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def shown(source: Source, files: bool) -> list[str]:
    """Return what a checkpoint holds as lines."""
    facts = source.facts()
    written = [f"{key} {facts[key]}" for key in ("writer", "version", "stage", "ranks") if facts.get(key) not in (None, {})]
    lines = [str(facts["path"]), "  " + ", ".join(written)]
    lines.append("  " + ", ".join(f"{key} {value}" for key, value in source.counters().items()))
    cells = [("parameter", "shape", "dtype", "states")]
    for name, one in source.parameters.items():
        remarks = [", ".join(source.states(name)) or "none"]
        remarks += [] if one.trainable else ["(frozen)"]
        remarks += [f"(also {', '.join(one.aliases)})"] if one.aliases else []
        cells.append((name, _shape(one.shape), str(one.dtype).removeprefix("torch."), " ".join(remarks)))
    for name, tensor in source.buffers().items():
        cells.append((name, _shape(tensor.shape), str(tensor.dtype).removeprefix("torch."), "(buffer)"))
    lines += ["", *_aligned(cells)]
    total = sum(one.numel for one in source.parameters.values())
    lines += ["", f"{len(source.parameters)} parameters, {total:,} elements; client state: {', '.join(source.client_state()) or 'none'}"]
    if files:
        lines += ["", *_places(source)]
    lines += [f"missing: {state} of {name}: {why}" for (name, state), why in source.gaps().items()]
    lines += [f"note: {note}" for note in facts["notes"]]
    return lines


def _places(source: Source) -> list[str]:
    lines = []
    for name in source.parameters:
        for state in source.states(name):
            at, parts = 0, []
            for file, numel in source.elements(name, state).places():
                parts.append(f"{Path(file).name} [{at}, {at + numel})")
                at += numel
            lines.append(f"{name} {state}: {', '.join(parts)}")
    return lines


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _aligned(cells: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
