"""What the dry run may see of an engine: its states by tier and stage, and functions that give the figures of the moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..ledger import RunningJob
from ..zero.tiers.options import CPU, DEVICE, NVME
from ..zero.tiers.residence import is_stand_in
from ..zero.unit import Unit
from .reporting import ledger_of, optimizer_records, state_tensors, unit_record
from .stages import cut_of, place_of, whole_shape
from .tier_reporting import STATES, buffer_tensors, drive_bytes, tier_of

if TYPE_CHECKING:
    from .engine import Engine

ByState = dict[str, list[torch.Tensor]]


def running_job(engine: Engine) -> RunningJob:
    """Return what the dry run may see of an engine."""
    optimizer = engine.optimizer
    sharded = engine.sharded
    return RunningJob(
        rank=engine.comm.rank,
        world=engine.comm.world,
        config=engine.config,
        on_host=engine.dp.on_host,
        place=place_of(engine),
        shape=lambda: whole_shape(engine.module, cut_of(engine)),
        placement=sharded.placement,
        whole=sharded.whole,
        steps=lambda: engine.global_steps,
        units=lambda: [unit_record(unit, engine) for unit in sharded.units],
        groups=lambda: [[sharded.group_of.get(id(slot.param)) for slot in unit.slots] for unit in sharded.units],
        optimizer=lambda: [] if optimizer is None else optimizer_records(optimizer),
        tensors=lambda: _on_device(engine),
        in_host=lambda: _in_host(engine),
        on_drive=lambda: drive_bytes(engine),
        tiers=lambda: [{state: _tier(state, unit, engine) for state in STATES} for unit in sharded.units],
        ledger=lambda: ledger_of(engine),
        batch=lambda: engine.last_input,
    )


def _tier(state: str, unit: Unit, engine: Engine) -> str:
    return DEVICE if engine.sharded.tiers is None else tier_of(state, unit, engine.sharded.tiers) or DEVICE


def _on_device(engine: Engine) -> ByState:
    units = engine.sharded.units
    graded = [unit.gradients for unit in units if unit.gradients is not None]
    if engine.sharded.tiers is None:
        found = state_tensors(engine)
        found["parameters"] = [unit.shard if unit.sharded else unit.full for unit in units]
        found["gradients"] = [tensor for gradients in graded for tensor in gradients.at_rest()]
    else:
        found = _at_rest(engine, DEVICE)
    return {
        **found,
        "gathered parameters": [unit.full for unit in units if unit.sharded],
        "gradients on their way": [tensor for gradients in graded for tensor in gradients.tensors()],
        "buffers": list(engine.module.buffers()),
    }


def _in_host(engine: Engine) -> ByState:
    """What is left in memory of states on a drive, such as step counts, is there too."""
    if engine.sharded.tiers is None:
        return {}
    found = _at_rest(engine, CPU)
    for state, tensors in _at_rest(engine, NVME).items():
        if state == "optimizer states":
            found["step counts"] = tensors
        elif state == "parameters" or tensors:
            found[state] = [*found[state], *tensors]
    return {**found, **buffer_tensors(engine)}


def _at_rest(engine: Engine, tier: str) -> ByState:
    """Return the tensors of the states that rest on a tier."""
    found: ByState = {state: [] for state in STATES}
    for unit in engine.sharded.units:
        here = {state for state in STATES if _tier(state, unit, engine) == tier}
        if "parameters" in here:
            found["parameters"].append(unit.shard if unit.sharded else unit.full)
        if "gradients" in here and unit.gradients is not None:
            found["gradients"] += unit.gradients.at_rest()
        if "master weights" in here and unit.master is not None and not unit.master_is_shard:
            found["master weights"].append(unit.master)
        if "optimizer states" in here and engine.optimizer is not None:
            found["optimizer states"] += [
                value
                for run in engine.optimizer.runs
                if run.unit is unit
                for value in engine.optimizer.inner.state.get(run.tensor, {}).values()
                if isinstance(value, torch.Tensor)
            ]
    return {state: [tensor for tensor in tensors if not is_stand_in(tensor)] for state, tensors in found.items()}
