"""Loading into a running engine: which checkpoint, what all ranks agree on, and what follows the tensors."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..checkpoint.directory import find, holds_ours
from ..checkpoint.manifest import DamagedError
from ..checkpoint.matching import Rename
from ..checkpoint.names import names_of
from ..checkpoint.native import NativeSource
from ..checkpoint.restore import Restorer
from ..checkpoint.source import Source
from ..errors import CheckpointError, StateroomError
from .saving import COUNTERS, set_rng_state

if TYPE_CHECKING:
    from .engine import Engine


@dataclass(frozen=True)
class LoadOptions:
    """What load() restores."""

    strict: bool = True
    optimizer: bool = True
    scheduler: bool = True
    module_only: bool = False
    rename: Rename | None = None
    custom: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that may be loaded: Stateroom's by its path, another's by folder and tag."""

    path: str
    tag: str | None = None
    is_ours: bool = True


def load(engine: Engine, folder: Path, tag: str | None, options: LoadOptions) -> tuple[str | None, dict[str, Any]]:
    """Restore a checkpoint of any kind under this engine's layout; every rank must call it.

    Without a tag a checkpoint that turns out to be damaged is named, and the next older one is loaded.

    Returns:
        (path, this rank's client state), or (None, {}) where there is nothing to load.

    Raises:
        CheckpointError: nothing there can be loaded, or it does not fit; on every rank.
        RankError: not every rank called it.
    """
    engine.saving.wait()
    engine.comm.meet("load_checkpoint()")
    candidates, remarks = _choose(engine, folder, tag)
    for line in remarks:
        engine.progress.warn(f"load_checkpoint: {line}")
    for number, candidate in enumerate(candidates):
        try:
            return _load_one(engine, candidate, options)
        except DamagedError as error:
            if number + 1 == len(candidates):
                raise
            engine.progress.warn(f"load_checkpoint: {error}; loading {candidates[number + 1].path} instead")
    return None, {}


def _choose(engine: Engine, folder: Path, tag: str | None) -> tuple[list[Candidate], list[str]]:
    """Let rank 0 look and all ranks take what it found."""
    asked = {rank: given for rank, given in enumerate(engine.comm.gather_objects((str(folder), tag)))}
    if len(set(asked.values())) > 1:
        raise CheckpointError(f"load_checkpoint: ranks ask for different checkpoints: {asked}; give the same folder and tag on every rank")
    found: Any = None
    if engine.comm.rank == 0:
        try:
            found = _candidates(folder, tag)
        except (StateroomError, OSError) as error:
            found = str(error)
    found = engine.comm.gather_objects(found)[0]
    if isinstance(found, str):
        raise CheckpointError(found)
    return found


def _candidates(folder: Path, tag: str | None) -> tuple[list[Candidate], list[str]]:
    if not holds_ours(folder, tag):
        if not folder.exists() or (tag is None and folder.is_dir() and not any(folder.iterdir())):
            return [], [f"{folder} holds no checkpoint; nothing is loaded"]
        return [Candidate(str(folder), tag, is_ours=False)], []
    found, remarks = find(folder, tag)
    if not found:
        remarks = [f"there is no {folder / 'latest'}; nothing is loaded. Give a tag to load one that was saved with save_latest=False"]
    return [Candidate(str(there.path)) for there in found], remarks


def _load_one(engine: Engine, candidate: Candidate, options: LoadOptions) -> tuple[str, dict[str, Any]]:
    restorer: list[Restorer] = []
    elsewhere = _names_elsewhere(engine, options.rename)
    _together(engine, lambda: restorer.append(_opened(engine, candidate, options, elsewhere)))
    if options.custom is not None:
        restorer[0].hand_over(options.custom)
    _together(engine, restorer[0].read)
    restorer[0].publish()
    try:
        _together(engine, restorer[0].read_rest)
    except CheckpointError:  # on every rank alike: what was started is ended before another checkpoint is tried
        restorer[0].settle()
        raise
    restorer[0].settle()
    for line in restorer[0].remarks:
        engine.progress.warn(f"load_checkpoint: {line}")
    source = restorer[0].source
    client_state: list[dict[str, Any]] = []
    _together(engine, lambda: client_state.append(_restore_training(engine, source, options)))
    engine.zero_grad()
    engine._window_micros = 0
    if engine.optimizer is not None and options.optimizer and not options.module_only and options.custom is None:
        engine.optimizer.fate.spoiled = ""  # all of it is the checkpoint's now
    path = source.facts()["path"]
    engine.progress.say(f"loaded {path} (step {engine.global_steps})")
    return str(path), client_state[0]


def _names_elsewhere(engine: Engine, rename: Rename | None) -> frozenset[str]:
    """Return the names in a checkpoint that other ranks' parts of the model will load."""
    if engine.part.is_whole:
        return frozenset()
    names = names_of(engine.module)
    here = [*names.buffers, *names.aliases, *(name for found in names.parameters.values() for name in found)]
    there = here if rename is None else [name for name in map(rename, here) if name is not None]
    return frozenset(name for names in engine.comm.gather_objects(there) for name in names)


def _opened(engine: Engine, candidate: Candidate, options: LoadOptions, elsewhere: frozenset[str]) -> Restorer:
    source: Source
    if candidate.is_ours:
        source = NativeSource(Path(candidate.path))
    else:
        from ..checkpoint.opener import open_source

        source = open_source(Path(candidate.path), candidate.tag)
    restorer = Restorer(
        engine.module,
        engine.sharded.units,
        engine.optimizer,
        source,
        strict=options.strict and options.custom is None,
        with_weights=options.custom is None,
        with_optimizer=options.optimizer and not options.module_only,
        rename=options.rename,
        part=engine.part,
        elsewhere=elsewhere,
    )
    restorer.check()
    return restorer


def _together(engine: Engine, work: Callable[[], Any]) -> None:
    """Run something on every rank that may fail on some, and raise on all.

    Raises:
        DamagedError: files are not what was written, on some rank.
        CheckpointError: it failed on some rank; the message names it.
    """
    trouble, damaged = "", False
    cause: Exception | None = None
    try:
        with engine.sharded.agreed_on():
            work()
    except Exception as error:
        cause = error
        trouble = str(error) if isinstance(error, StateroomError) else f"{type(error).__name__}: {error}"
        damaged = isinstance(error, DamagedError)
    said = engine.comm.gather_objects((trouble, damaged))
    texts: dict[str, list[int]] = {}
    for rank, (text, _) in enumerate(said):
        if text:
            texts.setdefault(text, []).append(rank)
    if texts:
        parts = [text if len(ranks) == len(said) else f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in texts.items()]
        raise (DamagedError if any(hurt for _, hurt in said) else CheckpointError)("; ".join(parts)) from cause


# ---- what follows the tensors


def _restore_training(engine: Engine, source: Source, options: LoadOptions) -> dict[str, Any]:
    """Bring schedule, loss scale, counters, data position and random numbers; return this rank's client state."""
    if isinstance(source, NativeSource):
        _restore_extra(engine, source)
    if options.module_only:
        return _client_state(engine, source)
    scale = source.scale_state() if options.optimizer and engine.optimizer is not None else None
    if scale is not None:
        engine.scaler.load_state_dict(scale)
    scheduler = source.scheduler()
    if options.scheduler and engine.lr_scheduler is not None and scheduler is not None:
        engine.lr_scheduler.load_state_dict(scheduler)
    counters = source.counters()
    if "global_steps" in counters:
        counters.setdefault("micro_steps", counters["global_steps"] * engine.gradient_accumulation_steps())
    for name in COUNTERS:
        if name in counters:
            setattr(engine, name, int(counters[name]))
    if isinstance(source, NativeSource):
        _restore_own(engine, source)
    return _client_state(engine, source)


def _restore_own(engine: Engine, source: NativeSource) -> None:
    """Bring data position and this rank's random numbers; a rank that did not exist then gets numbers of its own."""
    position = source.manifest["data"]
    if engine.training_dataloader is not None and position is not None:
        engine.training_dataloader.go_to(position)
    rank, world = engine.comm.rank, source.manifest["world"]
    saved = _own_of(engine, source)["rng"]
    if saved is None:  # imported from what another tool wrote
        return
    if rank < world:
        set_rng_state(saved)
    else:
        _derive_rng(saved, rank)
    if engine.comm.world > world:
        engine.progress.say(f"random numbers of ranks {world} to {engine.comm.world - 1}, new since the save, are derived from rank 0's")


def _restore_extra(engine: Engine, source: NativeSource) -> None:
    """Give modules the extra states that they had."""
    modules = names_of(engine.module).extra
    if modules:
        saved = _own_of(engine, source)["extra_state"]
        if not engine.part.is_whole or any("ranks" in unit for unit in source.manifest["units"]):
            for rank in range(source.manifest["world"]):  # parts lay on other ranks then
                saved = {**source.own(rank)["extra_state"], **saved}
        for name, module in modules.items():
            if name in saved:
                module.set_extra_state(saved[name])


def _own_of(engine: Engine, source: NativeSource) -> dict[str, Any]:
    """Return what this rank saved for itself, or rank 0 where this rank did not exist."""
    rank = engine.comm.rank
    return source.own(rank if rank < source.manifest["world"] else 0)


def _derive_rng(saved: dict[str, Any], rank: int) -> None:
    """Seed from rank 0's generator and the rank: the same whenever this checkpoint is loaded."""
    digest = hashlib.sha256(saved["torch"].numpy().tobytes() + rank.to_bytes(8, "little")).digest()
    seed = int.from_bytes(digest[:8], "little") >> 1
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _client_state(engine: Engine, source: Source) -> dict[str, Any]:
    return _own_of(engine, source)["client_state"] if isinstance(source, NativeSource) else source.client_state()
