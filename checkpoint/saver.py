"""Saving from a running job: what all ranks agree on first, one save in flight at most, and who waits for what."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import CheckpointError, StateroomError
from ..parallel.collectives import Collectives
from ..parallel.distributed import default_store
from ..version import __version__
from ..zero.intact import follow_writes
from ..zero.optimizer import ShardedOptimizer
from ..zero.tiers.disk import view_of
from ..zero.unit import Unit
from . import portable
from .board import Board
from .collect import Collected, collect, short
from .crc import crc32
from .directory import check_tag, make_room
from .image import Image, ImageWriter
from .job import SaveJob, SaveRecord, image_of
from .manifest import FORMAT, dump_json, pack_bounds
from .names import ModuleNames, names_of, plain
from .parts import Part, joined

PATIENCE_S = 3600.0  # a rank that writes for longer without a word is taken for lost


@dataclass(frozen=True)
class Contents:
    """What an engine gives to be saved.

    Attributes:
        units, optimizer, module: the states and where they live.
        training: returns schedule, loss scale, counters, data position, config: the same on every rank, in JSON form.
        own: this rank's random number generators and client state.
        part: which part of the model the units are.
        trainable_only: leave frozen parameters out.
    """

    module: torch.nn.Module
    units: Sequence[Unit]
    optimizer: ShardedOptimizer | None
    training: Callable[[], Mapping[str, Any]]
    own: dict[str, Any]
    part: Part
    trainable_only: bool = False


@dataclass
class _Prepared:
    """This rank's part of a save before anything is written."""

    error: str = ""
    collected: Collected = field(default_factory=lambda: Collected(0))
    image: Image = field(default_factory=lambda: Image([], []))
    own: bytes = b""
    facts: dict[str, Any] = field(default_factory=dict)


class Saver:
    """Writes checkpoints of one engine.

    Args:
        say, warn: print a line from the first rank.
        after_commit: called on rank 0 with the folder when a checkpoint is complete; deletes what is not kept.
        in_background: copy the states first and write beside training.

    Attributes:
        last: what the last save cost, once it has ended.
    """

    def __init__(
        self,
        comm: Collectives,
        say: Callable[[str], None],
        warn: Callable[[str], None],
        after_commit: Callable[[Path], None],
        *,
        in_background: bool = False,
    ) -> None:
        self._comm, self._say, self._warn, self._after_commit = comm, say, warn, after_commit
        self.in_background = in_background
        self.last: SaveRecord | None = None
        self._writer = ImageWriter(pinned=comm.device.type != "cpu")
        self._job: SaveJob | None = None
        self._thread: threading.Thread | None = None
        self._board: Board | None = None
        self._saves = 0
        group = str(getattr(comm.group, "group_name", "world"))
        serial = default_store().add(f"stateroom/savers/{group}/{comm.rank}", 1)
        self._store = dist.PrefixStore(f"stateroom/save/{group}/{serial}", default_store())
        # a thread that saves keeps the process alive; what became of it is said when the script has come to its end
        self._at_exit = partial(_say_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    def close(self) -> None:
        """End the save in flight; nothing is saved after this."""
        self.wait()
        atexit.unregister(self._at_exit)

    # ---- what a save in flight means for training

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._job is not None and not self._job.finished.is_set()

    def wait_staged(self) -> None:
        """Return when the tensors of a save in flight have been copied and may change."""
        job = self._job
        if job is not None and not job.staged.is_set():
            began = time.perf_counter()
            job.staged.wait()
            job.record.stall_s += time.perf_counter() - began

    def poll(self) -> None:
        """Report a save that has ended since the last call."""
        if self._job is not None and self._job.finished.is_set():
            self._end()

    def wait(self) -> None:
        """Return when no save is in flight any more; its outcome is reported."""
        if self._job is not None:
            self._job.finished.wait()
            self._end()

    def _end(self) -> None:
        job, self._job = self._job, None
        assert job is not None
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.last = job.record
        if job.record.error:
            self._warn(f"checkpoint: {job.record.error}")
        else:
            self._say(f"saved {job.folder / job.tag}: {job.record}")

    # ---- a save

    def save(self, folder: Path, tag: str, contents: Contents, *, save_latest: bool, on_other_tags: str = "Warn") -> SaveRecord:
        """Write a checkpoint; every rank must call it. In the background only what must be settled first is done here.

        Args:
            on_other_tags: "Fail", "Warn" or "Ignore" when ranks give different tags; rank 0's is used.

        Raises:
            RankError: not every rank called it.
            CheckpointError: it cannot be written; on every rank alike. In the background, what goes wrong later is
                reported by `poll` and `wait`.
        """
        began = time.perf_counter()
        self._comm.meet("save_checkpoint()")
        if self._job is not None:
            if not self._job.finished.is_set():
                self._say(f"save_checkpoint: waiting for the save of {self._job.tag!r} that is in flight")
            self.wait()
        names = names_of(contents.module)
        prepared = self._prepare(tag, contents, names, self._differing(names, contents.part.comm), save_latest)
        tag = self._agree(folder, tag, prepared, on_other_tags)
        if not contents.part.is_whole:
            prepared.facts = joined(self._comm.gather_objects(prepared.facts if contents.part.comm.rank == 0 else None))
        if self._board is not None:
            self._board.clear()  # here every rank has read the outcome of the save before
        job = self._job_of(folder, tag, prepared)
        self._job = job
        if self.in_background:
            self._thread = threading.Thread(target=job.run, args=(True,), name="stateroom-save")
            self._thread.start()
            job.record.stall_s = time.perf_counter() - began
            return job.record
        job.run(False)
        job.record.stall_s = time.perf_counter() - began
        self._job, self.last = None, job.record
        if job.record.error:
            raise CheckpointError(job.record.error)
        self._say(f"saved {folder / tag}: {job.record}")
        return job.record

    def _prepare(self, tag: str, contents: Contents, names: ModuleNames, differing: Sequence[str], save_latest: bool) -> _Prepared:
        """Collect this rank's part; what is wrong with it is told to all ranks before anything is written."""
        prepared = _Prepared()
        try:
            check_tag(tag)
            follow_writes(contents.units)
            prepared.collected = collect(
                contents.units, contents.optimizer, names, differing, contents.part, trainable_only=contents.trainable_only
            )
            prepared.image = image_of(prepared.collected)
            own = {**contents.own, "extra_state": {name: module.get_extra_state() for name, module in names.extra.items()}}
            own["buffers"] = {name: _buffer(names, name).detach().cpu() for name in differing}
            prepared.own = portable.dump(own, "save_checkpoint: what this rank saves")
            prepared.facts = _facts(contents, names, self._comm, save_latest)
            dump_json(prepared.facts)
        except (StateroomError, OSError, ValueError, TypeError, RuntimeError) as error:
            prepared.error = str(error)
        return prepared

    def _differing(self, names: ModuleNames, comm: Collectives) -> list[str]:
        """Return the buffers that are not the same on every rank; each rank keeps its own beside rank 0's."""
        if comm.world == 1 or not names.buffers:
            return []
        sums = [crc32(_bytes_of(_buffer(names, name))) for name in names.buffers]
        rows = comm.gather_rows(torch.tensor(sums, dtype=torch.int64, device=comm.device))
        return [name for name, column in zip(names.buffers, rows.T.tolist(), strict=True) if len(set(column)) > 1]

    def _agree(self, folder: Path, tag: str, prepared: _Prepared, on_other_tags: str) -> str:
        """Let all ranks know each other's tags and troubles; rank 0 makes room. Return the tag that is saved."""
        said = self._comm.gather_objects((tag, prepared.error, prepared.image.num_bytes + len(prepared.own)))
        errors = [f"rank {rank}: {error}" for rank, (_, error, _) in enumerate(said) if error]
        given = {rank: theirs for rank, (theirs, *_) in enumerate(said)}
        if len(set(given.values())) > 1:
            text = f"save_checkpoint: ranks gave different tags {given}"
            if on_other_tags == "Fail":
                errors.append(f"{text}; give the same one on every rank (checkpoint.tag_validation is Fail)")
            elif on_other_tags == "Warn":
                self._warn(f"{text}; that of rank 0 is used (checkpoint.tag_validation Fail makes this an error)")
        trouble = ""
        if not errors and self._comm.rank == 0:
            try:
                for line in make_room(folder, tag, sum(num_bytes for *_, num_bytes in said)):
                    self._warn(f"save_checkpoint: {line}")
            except (StateroomError, OSError) as error:
                trouble = str(error)
        if not errors:
            errors = [text for text in self._comm.gather_objects(trouble) if text]
        if errors:
            raise CheckpointError("; ".join(errors))
        return given[0]

    def _job_of(self, folder: Path, tag: str, prepared: _Prepared) -> SaveJob:
        self._saves += 1
        comm = self._comm
        self._board = Board(dist.PrefixStore(str(self._saves), self._store), PATIENCE_S * (2 if comm.rank else 1))
        return SaveJob(
            folder=folder,
            tag=tag,
            rank=comm.rank,
            world=comm.world,
            collected=prepared.collected,
            image=prepared.image,
            own=prepared.own,
            facts=prepared.facts,
            writer=self._writer,
            board=self._board,
            record=SaveRecord(tag, num_bytes=prepared.image.num_bytes),
            after_commit=lambda: self._after_commit(folder),
        )


def _say_at_exit(saver: weakref.ref[Saver]) -> None:
    alive = saver()
    if alive is not None:
        alive.wait()


def _buffer(names: ModuleNames, name: str) -> torch.Tensor:
    owner, key = names.buffers[name]
    return owner._buffers[key]  # type: ignore[return-value]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return view_of(flat.view(torch.uint8)) if flat.numel() else memoryview(b"")


def _facts(contents: Contents, names: ModuleNames, comm: Collectives, save_latest: bool) -> dict[str, Any]:
    """Return what the manifest says beside what ranks report."""
    own = [unit for unit in contents.units if not unit.is_copy]
    units = [unit for unit in own if unit.trainable or not contents.trainable_only]
    left_out = [plain(slot.name) for unit in own if unit not in units for slot in unit.slots]
    placed = {id(slot.param): (unit, slot) for unit in contents.units for slot in unit.slots}
    parameters = {
        plain(slot.name): {"shape": list(slot.shape), "dtype": short(unit.dtype), "trainable": unit.trainable}
        for unit, slot in (placed[key] for key in names.parameters if key in placed)
        if not unit.is_copy
    }
    return {
        "format": FORMAT,
        "stateroom": __version__,
        "torch": torch.__version__,
        "created": time.time(),
        "world": comm.world,
        "save_latest": save_latest,
        "units": [
            {
                "name": unit.name,
                "names": [plain(slot.name) for slot in unit.slots],
                "bounds": pack_bounds(unit.layout.bounds),
                **({} if contents.part.is_whole else {"ranks": list(contents.part.ranks)}),
            }
            for unit in units
        ],
        "parameters": parameters,
        "excluded": left_out,
        "buffers": [name for name in names.buffers if contents.part.owns(name)],
        "aliases": {**names.aliases, **_parameter_aliases(contents.units, names, contents.part.stored_names)},
        **contents.training(),
    }


def _parameter_aliases(units: Sequence[Unit], names: ModuleNames, stored_names: Mapping[int, str]) -> dict[str, str]:
    """Return further name -> stored name of tied parameters."""
    found: dict[str, str] = {}
    for unit in units:
        for slot in unit.slots:
            stored = stored_names.get(id(slot.param), plain(slot.name))
            found.update((name, stored) for name in names.parameters.get(id(slot.param), ()) if name != stored)
    return found
