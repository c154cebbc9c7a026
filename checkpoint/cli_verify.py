"""`stateroom ckpt verify`: whether every byte of a checkpoint is the one that was written."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .verifying import Advance, Problem


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("dir", metavar="DIR", help="directory of tags, or one checkpoint")
    parser.add_argument("--tag", metavar="T", help="which checkpoint; default: the latest")
    parser.add_argument("--all", action="store_true", help="every checkpoint in the directory")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print what is wrong; return 0 when nothing is, else 1."""
    from .verifying import verify

    folder = Path(args.dir)
    found: dict[str, list[Problem]] = {}
    for tag in _tags(folder) if args.all else [args.tag]:
        with _progress(folder, tag) as (name, advance):
            found[name] = verify(folder, tag, advance)
    if args.json:
        print(json.dumps({name: [vars(problem) for problem in problems] for name, problems in found.items()}, indent=2))
    else:
        for name, problems in found.items():
            print("\n".join(map(str, problems)) if problems else f"{name}: every byte is what was written")
    return int(any(found.values()))


def _tags(folder: Path) -> list[str]:
    from ..errors import CheckpointError
    from .directory import tags

    found = [tag.name for tag in tags(folder)]
    if not found:
        raise CheckpointError(f"{folder} holds no checkpoints of Stateroom; leave --all out to read one of another kind")
    return found


@contextmanager
def _progress(folder: Path, tag: str | None) -> Iterator[tuple[str, Advance | None]]:
    """Yield the checkpoint's name, and what shows how far it has been read."""
    from .directory import holds_ours
    from .progress import Progress
    from .verifying import data_bytes, target_of

    if not holds_ours(folder, tag):
        yield str(folder / tag if tag else folder), None
        return
    target = target_of(folder, tag)
    with Progress(f"verifying {target}", data_bytes(target)) as progress:
        yield str(target), progress.advance
