"""Writing the files of a universal directory: what one worker process does with one batch."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from . import elements
from .batch import Batch
from .deepspeed import pickling
from .universal_plan import PARAM, CopiedFile, File, TensorFile

BATCH_BYTES, BATCH_FILES = 64 << 20, 64
CHUNK_NUMEL = 4 << 20  # elements that are converted to another dtype at once
JOURNAL = "journal"
_SUB_PARAM_SHAPE = "sub_param_shape"
_SUB_PARAM_CLASS = "deepspeed.checkpoint.universal_checkpoint.SubparamShape"


@dataclass(frozen=True)
class Work:
    """Files that are written, and become visible, together."""

    folder: str
    files: tuple[File, ...]


def batches(folder: Path, files: Sequence[File]) -> Iterator[Work]:
    """Cut files into batches of some 64 MB; a larger file is one by itself. The largest come first, so that none is left for the end."""
    pending: list[File] = []
    pending_bytes = 0
    for file in sorted(files, key=lambda file: -file.num_bytes):
        if pending and (pending_bytes + file.num_bytes > BATCH_BYTES or len(pending) == BATCH_FILES):
            yield Work(str(folder), tuple(pending))
            pending, pending_bytes = [], 0
        pending.append(file)
        pending_bytes += file.num_bytes
    if pending:
        yield Work(str(folder), tuple(pending))


def write(work: Work) -> int:
    """Write a batch, note in this process's journal that it is done, and return its bytes."""
    folder = Path(work.folder)
    with Batch() as batch:
        for file in work.files:
            batch.write(folder / file.path, partial(_fill, file))
    lines = [json.dumps([file.path, (folder / file.path).stat().st_size]) + "\n" for file in work.files]
    with (folder / f"{JOURNAL}.{os.getpid()}").open("a") as journal:
        journal.writelines(lines)
    return sum(file.num_bytes for file in work.files)


def finished(folder: Path) -> set[str]:
    """Return the paths that journals call done and that have the length that was written."""
    done = set()
    for journal in folder.glob(f"{JOURNAL}.*"):
        for line in journal.read_text().splitlines():
            try:
                path, size = json.loads(line)
            except ValueError:  # the line that was being written when the process was killed
                continue
            if (folder / path).is_file() and (folder / path).stat().st_size == size:
                done.add(path)
    return done


def _fill(file: File, out: BinaryIO) -> None:
    if isinstance(file, CopiedFile):
        with open(file.origin, "rb") as origin:
            shutil.copyfileobj(origin, out, 8 << 20)
    elif isinstance(file, TensorFile):
        _save_tensor(out, file)
    else:
        out.write(file.content)


def _save_tensor(out: BinaryIO, file: TensorFile) -> None:
    flat = torch.empty(file.elements.numel, dtype=file.dtype)
    if file.elements.dtype == file.dtype:
        if flat.numel():
            file.elements.fill(flat, 0)
    else:
        for start in range(0, flat.numel(), CHUNK_NUMEL):
            stop = min(start + CHUNK_NUMEL, flat.numel())
            flat[start:stop] = elements.read(file.elements, start, stop)
    if file.bare:
        torch.save(flat, out)
        return
    tags: dict[str, Any] = dict(file.tags)
    content = {**tags, PARAM: flat.view(file.shape)}
    if _SUB_PARAM_SHAPE in tags:
        pickling.save({**content, _SUB_PARAM_SHAPE: pickling.record(_SUB_PARAM_CLASS, tags[_SUB_PARAM_SHAPE])}, out)
    else:
        torch.save(content, out)
