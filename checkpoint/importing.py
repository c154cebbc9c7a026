"""Any checkpoint as one of Stateroom's own: weights, optimizer states and what else it holds, one file's tensors in memory at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import CheckpointError
from ..version import __version__
from . import portable
from .board import Board
from .collect import Collected, short
from .directory import check_tag, make_room, partial_path, remove, sync_folder
from .exporting import size_of
from .image import ImageWriter
from .job import SaveJob, SaveRecord, image_of
from .manifest import FORMAT
from .opener import open_source
from .plan import state_key
from .progress import Progress
from .source import MASTER, WEIGHT, Source
from .values import to_json

_PATIENCE_S = 60.0  # the reports that are waited for lie there already


@dataclass(frozen=True)
class Imported:
    """What was written."""

    path: Path
    num_parameters: int
    num_bytes: int
    remarks: list[str]


@dataclass(frozen=True)
class _Entry:
    """One tensor to write: a state of a parameter, or a buffer where `state` is empty."""

    key: str
    name: str
    state: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def import_checkpoint(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    tag: str | None = None,
    out_tag: str | None = None,
    *,
    strict: bool = True,
    overwrite: bool = False,
    max_file_size: int | str = "2GB",
    inert: tuple[str, ...] = (),
) -> Imported:
    """Write a checkpoint of any kind as a tag in a directory of Stateroom's, and let `latest` name it.

    Args:
        path: any checkpoint, or plain weights; see `open_source`.
        out: directory of tags to write into.
        tag: which checkpoint in `path`; default: the latest.
        out_tag: its name in `out`; default: the one that it has.
        strict: states that the files hold in part are an error; else they are left out with a remark.
        overwrite: replace a tag of that name.
        max_file_size: bytes of one data file, or text such as "2GB"; one state of one parameter is never cut.
        inert: see `open_source`.

    Raises:
        CheckpointError: it cannot be read, holds states in part only, `out` has the tag already, or the disk has no room.
    """
    source = open_source(path, tag, inert)
    facts = source.facts()
    chosen = str(out_tag or facts.get("tag") or Path(facts["path"]).stem)
    check_tag(chosen)
    folder = Path(out)
    if (folder / chosen).exists() and not overwrite:
        raise CheckpointError(f"{folder / chosen} exists already; give another name (--out_tag), or replace it (--overwrite)")
    remarks = [*facts["notes"], *_gaps(source, strict)]
    buffers = source.buffers()
    files = list(_files(list(_entries(source, buffers)), size_of(max_file_size) or 1))
    total = sum(entry.num_bytes for file in files for entry in file)
    remarks += make_room(folder, chosen, total)
    try:
        _write(source, buffers, folder, chosen, files, total)
    except BaseException:
        if partial_path(folder, chosen).exists():
            remove(partial_path(folder, chosen))
        raise
    return Imported(folder / chosen, len(source.parameters), total, remarks)


def _gaps(source: Source, strict: bool) -> list[str]:
    lines = [f"state {state!r} of {name}: {why}" for (name, state), why in source.gaps().items()]
    if lines and strict:
        more = f" (and {len(lines) - 3} more)" if len(lines) > 3 else ""
        raise CheckpointError(f"{source.facts()['path']} is not complete: {'; '.join(lines[:3])}{more}; --no_strict leaves these out")
    return [f"left out: {line}" for line in lines]


def _entries(source: Source, buffers: dict[str, torch.Tensor] | Any) -> Iterator[_Entry]:
    """Yield what is written: of each parameter its most precise weights, then its other states; buffers last."""
    for name in source.parameters:
        weight = source.best_weight(name)
        for state in (weight, *(state for state in source.states(name) if state not in (MASTER, WEIGHT))):
            key = name if state == weight else state_key(name, state)
            yield _Entry(key, name, state, tuple(source.shape_of(name, state)), source.elements(name, state).dtype)
    known = source.names()
    done: set[int] = set()
    for name, tensor in buffers.items():
        if name not in known and id(tensor) not in done:
            done.add(id(tensor))
            yield _Entry(name, name, "", tuple(tensor.shape), tensor.dtype)


def _files(entries: Sequence[_Entry], limit: int) -> Iterator[list[_Entry]]:
    """Yield the entries of each data file: in order, as many as fit, one at least."""
    pending: list[_Entry] = []
    pending_bytes = 0
    for entry in entries:
        if pending and pending_bytes + entry.num_bytes > limit:
            yield pending
            pending, pending_bytes = [], 0
        pending.append(entry)
        pending_bytes += entry.num_bytes
    yield pending


def _write(source: Source, buffers: Any, folder: Path, tag: str, files: Sequence[list[_Entry]], total: int) -> None:
    """Write each file as a rank of a job would, the first one last: it completes the checkpoint."""
    store = dist.HashStore()
    writer = ImageWriter(pinned=False)
    manifest = _facts(source, buffers, len(files))
    with Progress("importing", total) as progress:
        for number in reversed(range(len(files))):
            own = {"rng": None, "extra_state": {}, "buffers": {}, "client_state": source.client_state()}
            collected = _collected(source, buffers, number, files[number])
            job = SaveJob(
                folder=folder,
                tag=tag,
                rank=number,
                world=len(files),
                collected=collected,
                image=image_of(collected),
                own=portable.dump(own, "client state of the checkpoint"),
                facts=manifest,
                writer=writer,
                board=Board(store, _PATIENCE_S),
                record=SaveRecord(tag),
                after_commit=lambda: None,
            )
            job.write_apart() if number else job.run(False)
            if job.record.error:
                raise CheckpointError(job.record.error)
            progress.advance(sum(entry.num_bytes for entry in files[number]))
    sync_folder(folder)


def _collected(source: Source, buffers: Any, number: int, entries: Sequence[_Entry]) -> Collected:
    found = Collected(number)
    for entry in entries:
        found.add_whole(entry.key, source.tensor(entry.name, entry.state) if entry.state else buffers[entry.name])
        if entry.key == entry.name and entry.state:
            scalars = {state: to_json(value, f"state {state!r} of {entry.name}") for state, value in source.scalars(entry.name).items()}
            if scalars:
                found.scalars[entry.name] = scalars
    return found


def _facts(source: Source, buffers: Any, num_files: int) -> dict[str, Any]:
    """Return what the manifest says beside what the files report."""
    about, known = source.facts(), source.names()
    first: dict[int, str] = {}
    aliases = {alias: name for alias, name in known.items() if alias != name}
    for name, tensor in buffers.items():
        owner = first.setdefault(id(tensor), name)
        if owner != name:
            aliases[name] = owner
    return {
        "format": FORMAT,
        "stateroom": __version__,
        "torch": torch.__version__,
        "created": time.time(),
        "world": num_files,
        "save_latest": True,
        "imported_from": {key: about.get(key) for key in ("path", "writer", "version", "ranks")},
        "units": [],
        "parameters": {
            name: {"shape": list(one.shape), "dtype": short(one.dtype), "trainable": one.trainable}
            for name, one in source.parameters.items()
        },
        "excluded": [],
        "buffers": [name for name in buffers if name not in aliases and name not in known],
        "aliases": aliases,
        "stage": about.get("stage"),
        "optimizer": about.get("optimizer"),
        "groups": [to_json(group, f"parameter group {index}") for index, group in enumerate(source.groups())],
        "scheduler": to_json(source.scheduler(), "the scheduler's state"),
        "loss_scaler": to_json(source.scale_state(), "the loss scaler's state"),
        "counters": {"global_steps": 0, **source.counters()},
        "data": None,
        "config": None,
    }
