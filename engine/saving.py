"""Plain save and load of the engine's state, one file a rank; the checkpoint package takes this over."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..environment import read_launch
from ..errors import CheckpointError

if TYPE_CHECKING:
    from .engine import Engine

FORMAT = 1


@dataclass(frozen=True)
class LoadOptions:
    """What load() restores."""

    strict: bool = True
    optimizer: bool = True
    scheduler: bool = True
    module_only: bool = False


def local_rank() -> int:
    """Return this process's number on its host."""
    launch = read_launch()
    return 0 if launch is None else launch.local_rank


def module_state(engine: Engine, exclude_frozen: bool = False) -> dict[str, torch.Tensor]:
    """Return whole weights and buffers by name; every rank must call it."""
    state = engine.module.state_dict()
    if exclude_frozen:
        frozen = {name for name, param in engine.module.named_parameters(remove_duplicate=False) if not param.requires_grad}
        state = {name: value for name, value in state.items() if name not in frozen}
    return state


def save_weights(engine: Engine, folder: Path, filename: str, exclude_frozen: bool) -> bool:
    """Write whole weights in the compute dtype from rank 0."""
    state = {name: value.detach().cpu() for name, value in module_state(engine, exclude_frozen).items()}
    if engine.comm.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        _write(state, folder / filename)
    engine.comm.barrier()
    return True


def save(engine: Engine, folder: Path, tag: str | None, client_state: dict[str, Any], save_latest: bool) -> bool:
    """Write this rank's shards, states, counters and RNG; `latest` moves only when every rank is done.

    Raises:
        RankError: not every rank called it.
    """
    engine.comm.meet("save_checkpoint()")
    tag = str(tag) if tag is not None else f"global_step{engine.global_steps}"
    target = folder / tag
    target.mkdir(parents=True, exist_ok=True)
    _write(_rank_state(engine, client_state), target / _file_of(engine.comm.rank))
    engine.comm.barrier()
    if engine.comm.rank == 0 and save_latest:
        temporary = folder / "latest.partial"
        temporary.write_text(tag)
        os.replace(temporary, folder / "latest")
    engine.comm.barrier()
    engine.progress.say(f"saved {target}")
    return True


def load(engine: Engine, folder: Path, tag: str | None, options: LoadOptions) -> tuple[str | None, dict[str, Any]]:
    """Restore this rank's part of a save with the same ranks, stage and model.

    Raises:
        CheckpointError: the save was made with another number of ranks, stage or model, or a part is missing.
    """
    latest = folder / "latest"
    if tag is None:
        if not latest.is_file():
            engine.progress.warn(f"load_checkpoint: no {latest}; nothing is loaded")
            return None, {}
        tag = latest.read_text().strip()
    path = folder / tag / _file_of(engine.comm.rank)
    if not path.is_file():
        there = sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []
        raise CheckpointError(f"{path} does not exist; tags in {folder}: {there or 'none'}; number of ranks now: {engine.comm.world}")
    state = torch.load(path, map_location="cpu", weights_only=False)
    _check_compatible(engine, state, path)
    _restore_units(engine, state)
    if not options.module_only:
        _restore_training(engine, state, options)
    engine.comm.barrier()
    engine.progress.say(f"loaded {folder / tag} (step {engine.global_steps})")
    return str(folder / tag), state["client_state"]


def _rank_state(engine: Engine, client_state: dict[str, Any]) -> dict[str, Any]:
    units = {}
    for unit in engine.sharded.units:
        units[unit.name] = {
            "bounds": unit.layout.bounds,
            "names": [slot.name for slot in unit.slots],
            "shard": unit.shard if unit.sharded or engine.comm.rank == 0 or unit.master is None else None,
            "master": None if unit.master_is_shard else unit.master,
            "full": None if unit.sharded else unit.full,
        }
    counters = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
    return {
        "format": FORMAT,
        "world": engine.comm.world,
        "stage": engine.zero_optimization_stage(),
        "units": units,
        "buffers": {name: b for name, b in engine.module.named_buffers()},
        "optimizer": None if engine.optimizer is None else engine.optimizer.state_dict(),
        "scheduler": None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict(),
        "loss_scale": engine.scaler.state_dict(),
        "counters": {name: getattr(engine, name) for name in counters},
        "rng": _rng_state(),
        "data": None if engine.training_dataloader is None else engine.training_dataloader.state_dict(),
        "client_state": client_state,
    }


def _check_compatible(engine: Engine, state: dict[str, Any], path: Path) -> None:
    here = (engine.comm.world, engine.zero_optimization_stage())
    there = (state["world"], state["stage"])
    if here != there:
        raise CheckpointError(
            f"{path} was saved on {there[0]} rank(s) at stage {there[1]}, this engine has {here[0]} at stage {here[1]}; "
            "this plain format loads only into the same layout"
        )
    for unit in engine.sharded.units:
        saved = state["units"].get(unit.name)
        names = [slot.name for slot in unit.slots]
        if saved is None or tuple(saved["bounds"]) != tuple(unit.layout.bounds) or saved["names"] != names:
            raise CheckpointError(f"{path} does not fit unit {unit.name!r} of this model: its parameters or their sizes differ")


def _restore_units(engine: Engine, state: dict[str, Any]) -> None:
    with torch.no_grad():
        for unit in engine.sharded.units:
            saved = state["units"][unit.name]
            unit.release()
            if unit.sharded:
                unit.shard.copy_(saved["shard"])
            else:
                unit.full.copy_(saved["full"])
            if unit.master is not None and not unit.master_is_shard:
                unit.master.copy_(saved["master"])
            unit.acknowledge()
        for name, buffer in engine.module.named_buffers():
            if name in state["buffers"]:
                buffer.copy_(state["buffers"][name])


def _restore_training(engine: Engine, state: dict[str, Any], options: LoadOptions) -> None:
    if options.optimizer and engine.optimizer is not None and state["optimizer"] is not None:
        engine.optimizer.load_state_dict(state["optimizer"])
        engine.scaler.load_state_dict(state["loss_scale"])
    if options.scheduler and engine.lr_scheduler is not None and state["scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(state["scheduler"])
    for name, value in state["counters"].items():
        setattr(engine, name, value)
    if engine.training_dataloader is not None and state["data"] is not None:
        engine.training_dataloader.load_state_dict(state["data"])
    _set_rng_state(state["rng"])


def _rng_state() -> dict[str, Any]:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return {
        "torch": torch.get_rng_state(),
        "device": torch.get_device_module(device).get_rng_state() if device is not None else None,
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def _set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["device"] is not None and torch.accelerator.is_available():
        torch.get_device_module(torch.accelerator.current_accelerator()).set_rng_state(state["device"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


def _file_of(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def _write(value: Any, path: Path) -> None:
    """Write durably under another name, then rename: a crash leaves the old file or the new one."""
    temporary = path.with_suffix(".partial")
    with temporary.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
