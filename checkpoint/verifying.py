"""Reads a whole checkpoint and compares every byte with the checksums that were written with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ..zero.tiers.disk import Input, round_up, view_of
from .directory import find, holds_ours, is_ours, latest_name, tags
from .flow import Buffers, side_by_side
from .manifest import MANIFEST, DamagedError, missing_parts, read_checked, read_manifest, write_durably
from .opener import open_source
from .reader import BUFFER_BYTES, Segment, Stored, base_of, batches, segments_of
from .retention import VERIFIED

Advance = Callable[[int], None]  # told the bytes that have been looked at, from several threads


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: the file, the tensor and the byte range where they are known, and words."""

    file: str
    text: str
    key: str | None = None
    low: int | None = None
    high: int | None = None

    def __str__(self) -> str:
        return self.text


def verify(path: str | Path, tag: str | None = None, advance: Advance | None = None) -> list[Problem]:
    """Return what is wrong with a checkpoint, nothing when it is whole; one that is whole is marked as verified.

    Stateroom's own are compared byte by byte with their checksums; of others every tensor is read.

    Args:
        path: directory of tags, or one checkpoint.
        tag: which tag; default: the one that `latest` names.

    Raises:
        CheckpointError: there is no checkpoint to look at.
    """
    folder = Path(path)
    if not holds_ours(folder, tag):
        return _read_through(folder, tag)
    named = None if tag is not None else latest_name(folder)
    target = target_of(folder, tag)
    problems = verify_folder(target, advance)
    if named is not None and target.name != named:
        text = f"{folder / 'latest'} names {named!r}, which is no complete checkpoint; {target.name} is the newest one"
        problems.insert(0, Problem(str(folder / "latest"), text))
    if problems:
        (target / VERIFIED).unlink(missing_ok=True)
    else:
        write_durably(target / VERIFIED, b"")
    return problems


def target_of(folder: Path, tag: str | None) -> Path:
    """Return the folder to look at: also a broken one, where it is the one that is meant.

    Raises:
        CheckpointError: nothing says which one is meant, or it does not exist.
    """
    if is_ours(folder) and tag is None:
        return folder
    named = tag or latest_name(folder)
    by_name = {found.name: found.path for found in tags(folder)}
    if named in by_name:
        return by_name[named]
    candidates, _ = find(folder, tag)
    if not candidates:
        raise CheckpointError(f"{folder} names no checkpoint: there is no `latest`; give a tag, one of {', '.join(by_name)}")
    return candidates[0].path


def verify_folder(target: Path, advance: Advance | None = None) -> list[Problem]:
    """Compare one of Stateroom's checkpoints with its checksums; return what is wrong."""
    try:
        manifest = read_manifest(target)
    except CheckpointError as error:
        return [Problem(str(target / MANIFEST), str(error))]
    problems = [Problem(str(target / name), f"{target / name} {what}") for name, what in missing_parts(target, manifest).items()]
    damaged = {problem.file for problem in problems}
    for name, facts in manifest["files"].items():
        if "sha256" in facts and str(target / name) not in damaged:
            try:
                read_checked(target / name, facts["sha256"])
            except DamagedError as error:
                problems.append(Problem(str(target / name), str(error)))
    damaged = {problem.file for problem in problems}
    for name, facts in manifest["files"].items():
        if "index" in facts and not {str(target / name), str(target / facts["index"])} & damaged:
            problems += _verify_data(target / name, json.loads((target / facts["index"]).read_bytes()), advance)
    return problems


def data_bytes(target: Path) -> int:
    """Return the bytes of tensors in a checkpoint of Stateroom's; 0 where its manifest cannot be read."""
    try:
        return sum(facts["bytes"] for facts in read_manifest(target)["files"].values() if "index" in facts)
    except CheckpointError:
        return 0


def _verify_data(path: Path, index: dict[str, Any], advance: Advance | None) -> list[Problem]:
    """Read a data file from one end to the other."""
    parts = sorted(_parts(index), key=lambda part: part.low)
    problems: list[Problem] = []

    def read(batch: list[Segment], buffer: torch.Tensor) -> int:
        base = base_of(batch)
        return source.read(buffer[: round_up(batch[-1].end - base)], base)

    def check(batch: list[Segment], buffer: torch.Tensor, got: int) -> None:
        base = base_of(batch)
        for part in batch:
            wrong = part.wrong(view_of(buffer)[:got], base)
            if wrong is not None:
                low, high, what = wrong
                text = f"{path}: bytes [{low}, {high}), {what}, are not what was written"
                problems.append(Problem(str(path), text, part.key, low, high))
        if advance is not None:
            advance(batch[-1].end - batch[0].begin)

    with Input(path) as source:
        side_by_side(batches(parts), read, check, Buffers(BUFFER_BYTES))
    return sorted(problems, key=lambda problem: problem.low or 0)


def _parts(index: dict[str, Any]) -> Iterator[Segment]:
    for key, (dtype, shape, items) in index["tensors"].items():
        for item in items:
            yield from segments_of(key, shape, getattr(torch, dtype), Stored(index["file"], *item))


def _read_through(folder: Path, tag: str | None) -> list[Problem]:
    """Read every tensor of a checkpoint that keeps no checksums."""
    source = open_source(folder, tag)
    problems = [Problem(str(folder), f"{state} of {name}: {why}", name) for (name, state), why in source.gaps().items()]
    for name in source.parameters:
        for state in source.states(name):
            try:
                source.tensor(name, state)
            except CheckpointError as error:
                problems.append(Problem(str(folder), str(error), name))
    return problems
