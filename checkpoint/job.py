"""One save on one rank, from tensors to a committed directory: staged, written, reported, and on rank 0 put in its place."""

from __future__ import annotations

import json
import resource
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, StateroomError
from .board import Board
from .collect import Collected
from .container import FRAMING, METADATA_FILE, StoredTensor, metadata_bytes
from .directory import commit, examine, partial_path, sync_folder
from .image import Image, ImageWriter
from .manifest import dump_json, index_file, rank_file, read_checked, write_durably, write_manifest
from .plan import data_file, place

_DONE = "outcome"


@dataclass
class SaveRecord:
    """What a save cost: seconds that training stood still, bytes of this rank, seconds until they were durable, host memory."""

    tag: str
    stall_s: float = 0.0
    num_bytes: int = 0
    write_s: float = 0.0
    buffer_bytes: int = 0
    peak_memory_bytes: int = 0  # of the whole process so far
    error: str = ""

    def __str__(self) -> str:
        rate = self.num_bytes / max(self.write_s, 1e-9) / 1e6
        return (
            f"stall {self.stall_s:.2f} s, {self.num_bytes / 1e6:,.1f} MB a rank in {self.write_s:.2f} s ({rate:,.0f} MB/s), "
            f"{self.buffer_bytes / 1e6:,.1f} MB of buffers, peak host memory {self.peak_memory_bytes / 1e9:.2f} GB"
        )


@dataclass
class SaveJob:
    """What one rank needs to save without asking anybody.

    Attributes:
        facts: rank 0's part of the manifest: everything but what the other ranks report.
        own: content of this rank's own file.
        staged: set when training may change the tensors again.
        finished: set when the outcome is known; `record.error` says what went wrong.
    """

    folder: Path
    tag: str
    rank: int
    world: int
    collected: Collected
    image: Image
    own: bytes
    facts: Mapping[str, Any]
    writer: ImageWriter
    board: Board
    record: SaveRecord
    after_commit: Callable[[], None]
    staged: threading.Event = field(default_factory=threading.Event)
    finished: threading.Event = field(default_factory=threading.Event)

    def run(self, stage: bool) -> None:
        """Do all of it; with `stage` first copy the tensors away. What goes wrong is in the record."""
        began = time.perf_counter()
        self.record.error = f"rank {self.rank} was interrupted"
        try:
            self._agree(self._report(stage))
        except Exception as error:
            self.record.error = f"rank {self.rank}: {_said(error)}"
        finally:
            self.record.write_s = time.perf_counter() - began
            self.record.buffer_bytes = self.writer.buffer_bytes
            self.record.peak_memory_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            self.finished.set()

    def write_apart(self) -> None:
        """Write this rank's files and leave word of it, without waiting for the others. What goes wrong is in the record."""
        report = self._report(False)
        self.record.error = report["error"]
        self.board.put(_reporter(self.rank), json.dumps(report))

    def _report(self, stage: bool) -> dict[str, Any]:
        """Write this rank's files and return what rank 0 is to know of it."""
        try:
            return self._write(stage)
        except Exception as error:
            return {"error": f"rank {self.rank}: {_said(error)}"}
        finally:
            self.staged.set()

    # ---- this rank's files

    def _write(self, stage: bool) -> dict[str, Any]:
        staged = None
        if stage and not self.image.on_drive:  # what rests on a drive is read while it is written; the next update waits for that
            staged = self.writer.stage(self.image)
            self.staged.set()
        target = partial_path(self.folder, self.tag)
        name = data_file(self.rank)
        self.writer.write(self.image, target / name, staged)
        files = {
            name: {"bytes": self.image.num_bytes, "index": index_file(self.rank)},
            index_file(self.rank): _written(target / index_file(self.rank), dump_json(self._index())),
            rank_file(self.rank): _written(target / rank_file(self.rank), self.own),
        }
        sync_folder(target)
        return {"error": "", "files": files}

    def _index(self) -> dict[str, Any]:
        pieces: dict[str, list[Any]] = {}
        for item, crcs in zip(self.image.items, self.image.checksums, strict=True):
            pieces.setdefault(item.key, []).append([item.start, item.numel, item.at, crcs])
        collected = self.collected
        return {
            "file": data_file(self.rank),
            "bytes": self.image.num_bytes,
            "tensors": {key: [dtype, list(shape), pieces.get(key, [])] for key, (dtype, shape) in collected.described.items()},
            "homes": list(collected.homes),
            "scalars": collected.scalars,
            "cuts": collected.cuts,
        }

    # ---- all ranks together

    def _agree(self, report: Mapping[str, Any]) -> None:
        """Report to rank 0 and learn the outcome; rank 0 makes it."""
        try:
            if self.rank:
                self.board.put(_reporter(self.rank), json.dumps(report))
                outcome = self._outcome()
            else:
                outcome = self._conclude(report)
                self.board.put(_DONE, outcome)
        finally:
            if self.rank:
                self.board.clear()  # rank 0's word stays until its next save: others may not have read it yet
        self.record.error = outcome

    def _outcome(self) -> str:
        """Wait for rank 0's word; a store that ended with rank 0's process says nothing, but the directory does."""
        try:
            return self.board.collect([_DONE])[_DONE]
        except (RuntimeError, OSError):
            if examine(self.folder / self.tag, self.tag).problem:
                raise
            return ""

    def _conclude(self, own: Mapping[str, Any]) -> str:
        """Wait for all reports and commit, or remove what was written; return what went wrong."""
        try:
            texts = self.board.collect(_reporter(rank) for rank in range(1, self.world))
            reports = [own, *(json.loads(texts[_reporter(rank)]) for rank in range(1, self.world))]
            errors = [report["error"] for report in reports if report["error"]]
            if errors:
                raise CheckpointError("; ".join(errors))
            self._complete({name: facts for report in reports for name, facts in report["files"].items()})
            commit(self.folder, self.tag, self.facts["save_latest"])
        except Exception as error:
            shutil.rmtree(partial_path(self.folder, self.tag), ignore_errors=True)
            return f"saving {self.folder / self.tag} failed: {_said(error)}"
        try:
            self.after_commit()
        except Exception as error:  # the checkpoint is safe; what was to be deleted is not
            return f"{self.folder / self.tag} is saved, but older checkpoints could not be removed: {_said(error)}"
        return ""

    def _complete(self, files: dict[str, Any]) -> None:
        """Write the metadata and the manifest over all ranks' files."""
        target = partial_path(self.folder, self.tag)
        merged = _Merged()
        for rank in range(self.world):
            try:
                content = read_checked(target / index_file(rank), files[index_file(rank)]["sha256"])
            except CheckpointError as error:
                raise CheckpointError(f"{error} (rank {rank} wrote it: is {self.folder} on a disk that all ranks share?)") from error
            merged.add(json.loads(content), rank)
        aliases = self.facts["aliases"]
        metadata = metadata_bytes(merged.stored(), {alias: name for alias, name in aliases.items() if name in merged.tensors})
        files[METADATA_FILE] = _written(target / METADATA_FILE, metadata)
        described = {key: {"dtype": dtype, "shape": shape} for key, (dtype, shape, _) in merged.tensors.items()}
        together = {"tensors": described, "homes": merged.homes, "scalars": merged.scalars, "cuts": sorted(merged.cuts), "files": files}
        write_manifest(target, {**self.facts, **together})


class _Merged:
    """The indexes of all ranks as one."""

    def __init__(self) -> None:
        self.tensors: dict[str, tuple[str, list[int], list[Any]]] = {}
        self.homes: dict[str, int] = {}
        self.scalars: dict[str, Any] = {}
        self.cuts: set[str] = set()

    def add(self, index: Mapping[str, Any], rank: int) -> None:
        """Add one rank's index.

        Raises:
            CheckpointError: it contradicts that of another rank.
        """
        file = index["file"]
        for key, (dtype, shape, pieces) in index["tensors"].items():
            known = self.tensors.setdefault(key, (dtype, shape, []))
            if known[:2] != (dtype, shape):
                raise CheckpointError(f"rank {rank} has {key!r} as {dtype} {shape}, a lower rank as {known[0]} {known[1]}")
            known[2].extend((start, start + numel, file, at) for start, numel, at, _ in pieces)
        for name, values in index["scalars"].items():
            if self.scalars.setdefault(name, values) != values:
                raise CheckpointError(
                    f"ranks disagree about the optimizer states of {name!r}: {self.scalars[name]} and {values} (rank {rank})"
                )
        self.homes.update(dict.fromkeys(index["homes"], rank))
        self.cuts.update(index["cuts"])

    def stored(self) -> dict[str, StoredTensor]:
        """Return the tensors as the metadata wants them."""
        return {key: StoredTensor(getattr(torch, dtype), tuple(shape), pieces) for key, (dtype, shape, pieces) in self.tensors.items()}


def image_of(collected: Collected) -> Image:
    """Lay the collected tensors out as a file."""
    items = place(collected.pieces, FRAMING)
    source = {(piece.key, piece.start): (piece, tensor) for piece, tensor in zip(collected.pieces, collected.tensors, strict=True)}
    tensors, piece, tensor = [], None, None
    for item in items:
        piece, tensor = source.get((item.key, item.start), (piece, tensor))
        assert piece is not None and tensor is not None
        tensors.append(tensor[item.start - piece.start : item.start - piece.start + item.numel])
    return Image(items, tensors)


def _written(path: Path, content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": write_durably(path, content)}


def _reporter(rank: int) -> str:
    return f"rank {rank}"


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, StateroomError) else f"{type(error).__name__}: {error}"
