"""Writing the files of a universal directory: what one thread does with one batch."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..zero.tiers.disk import Output, aligned_buffer, round_up, view_of
from . import elements
from .batch import Batch
from .container import ITEM_LIMIT_BYTES, ItemFrame, TensorMark
from .crc import crc32
from .deepspeed import pickling
from .universal_plan import PARAM, CopiedFile, File, TensorFile

BATCH_BYTES, BATCH_FILES = 64 << 20, 64
DIRECT_BYTES = 4 << 20  # smaller files go through the page cache, where a batch is synced together
SUM_BYTES = 4 << 20  # read by the checksum and written while still in the processor's cache
CHUNK_NUMEL = 4 << 20  # elements that are converted to another dtype at once
JOURNAL = "journal"
_SUB_PARAM_SHAPE = "sub_param_shape"
_SUB_PARAM_CLASS = "deepspeed.checkpoint.universal_checkpoint.SubparamShape"


@dataclass(frozen=True)
class Work:
    """Files that are written, and become visible, together."""

    files: tuple[File, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the files' tensors."""
        return sum(file.num_bytes for file in self.files)


def batches(files: Sequence[File]) -> Iterator[Work]:
    """Cut files into batches of some 64 MB; a larger file is one by itself. The largest come first, so that none is left for the end."""
    pending: list[File] = []
    pending_bytes = 0
    for file in sorted(files, key=lambda file: -file.num_bytes):
        if pending and (pending_bytes + file.num_bytes > BATCH_BYTES or len(pending) == BATCH_FILES):
            yield Work(tuple(pending))
            pending, pending_bytes = [], 0
        pending.append(file)
        pending_bytes += file.num_bytes
    if pending:
        yield Work(tuple(pending))


class Writer:
    """Writes batches into a folder, from several threads; each thread holds one tensor at a time, in memory that it keeps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own = threading.local()

    def write(self, work: Work) -> None:
        """Write a batch and note in this thread's journal that it is done."""
        with Batch() as batch:
            for file in work.files:
                if isinstance(file, TensorFile) and DIRECT_BYTES <= file.num_bytes <= ITEM_LIMIT_BYTES:
                    self._write_direct(file, batch.stage(self._folder / file.path))
                else:
                    batch.write(self._folder / file.path, partial(_fill, file))
        lines = [json.dumps([file.path, (self._folder / file.path).stat().st_size]) + "\n" for file in work.files]
        with (self._folder / f"{JOURNAL}.{os.getpid()}.{threading.get_ident()}").open("a") as journal:
            journal.writelines(lines)

    def _write_direct(self, file: TensorFile, path: Path) -> None:
        """Write what `_save_tensor` would, past the page cache: the elements are read to where they are written from."""
        frame = ItemFrame(pickling.structure(_content(file, TensorMark(_shape(file), file.dtype))), file.num_bytes)
        begin = len(frame.header)
        end = begin + file.num_bytes
        buffer = self._buffer(round_up(end + len(frame.trailer(0))))
        view = view_of(buffer)
        view[:begin] = frame.header
        _read(file, buffer[begin:end].view(file.dtype))
        crc = 0
        with Output(path, end + len(frame.trailer(0))) as output:
            for low in range(0, len(view), SUM_BYTES):
                high = min(low + SUM_BYTES, len(view))
                crc = crc32(view[max(low, begin) : min(high, end)], crc)
                if high > end:
                    trailer = frame.trailer(crc)
                    view[end : end + len(trailer)] = trailer
                output.write(buffer[low:high], low)
            output.cut()  # the batch syncs its files together, before they get their names

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        kept = getattr(self._own, "buffer", None)
        if kept is None or kept.numel() < num_bytes:
            self._own.buffer = kept = None  # let go of it first
            self._own.buffer = kept = aligned_buffer(num_bytes)
        return kept[:num_bytes]


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
    _read(file, flat)
    pickling.save(_content(file, flat.view(_shape(file))), out)


def _shape(file: TensorFile) -> tuple[int, ...]:
    return (file.elements.numel,) if file.bare else file.shape


def _content(file: TensorFile, tensor: Any) -> Any:
    """Return what the file holds, given its tensor or what stands for it."""
    if file.bare:
        return tensor
    content = {**dict(file.tags), PARAM: tensor}
    if _SUB_PARAM_SHAPE in content:
        content[_SUB_PARAM_SHAPE] = pickling.record(_SUB_PARAM_CLASS, content[_SUB_PARAM_SHAPE])
    return content


def _read(file: TensorFile, flat: torch.Tensor) -> None:
    """Fill `flat` with the elements, in its dtype."""
    if file.elements.dtype == file.dtype:
        if flat.numel():
            file.elements.fill(flat, 0)
        return
    for start in range(0, flat.numel(), CHUNK_NUMEL):
        stop = min(start + CHUNK_NUMEL, flat.numel())
        flat[start:stop] = elements.read(file.elements, start, stop)
