"""Follows one parameter: gathers from units, optimizer and checkpoint what `engine.trace_parameter` shows."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoint import open_source
from ..errors import CheckpointError, EngineError
from ..ledger.trace import Event, ParameterTrace, State, places_of
from ..zero.parameter import Slot, slot_of
from ..zero.unit import LIFE, UPDATED

if TYPE_CHECKING:
    from .engine import Engine


def trace_parameter(engine: Engine, name: str) -> ParameterTrace:
    """Return the life of the parameter called `name` in the module, as this rank sees it.

    Raises:
        EngineError: the module has no such parameter.
    """
    named = dict(engine.module.named_parameters(remove_duplicate=False))
    if name not in named:
        near = ", ".join(difflib.get_close_matches(name, named, n=3, cutoff=0.4)) or "none"
        raise EngineError(f"the module has no parameter {name!r}; nearest: {near}; all are named by engine.module.named_parameters()")
    slot = slot_of(named[name])
    assert slot is not None
    unit = slot.unit
    is_cut = unit.sharded or unit.master_interval != (0, unit.layout.padded)
    checkpoint, files = _files(engine, slot)
    notes = [] if slot.name == name else [f"the same parameter is also called {slot.name}"]
    if len(unit.life) == LIFE:
        notes.append(f"only the newest {LIFE} events of a unit are kept: those before are missing where a step has more")
    return ParameterTrace(
        name=name,
        shape=tuple(slot.shape),
        dtype=_short(unit.dtype),
        unit=unit.name,
        unit_numel=unit.layout.padded,
        numel=slot.numel,
        offset=slot.offset,
        rank=engine.comm.rank,
        world=engine.comm.world,
        trainable=unit.trainable,
        places=places_of(unit.layout, slot.index) if is_cut and engine.comm.world > 1 else (),
        states=tuple(_states(engine, slot)),
        step=engine.global_steps,
        events=_events(engine, slot),
        checkpoint=checkpoint,
        files=files,
        notes=tuple(notes),
    )


def _states(engine: Engine, slot: Slot) -> list[State]:
    unit = slot.unit
    mine = _part(slot, unit.lo, unit.hi)
    param = mine if unit.sharded else slot.numel
    where = "cut over the ranks, whole while in use" if unit.sharded else "whole on every rank"
    found = [State("parameter", _short(unit.dtype), where, param * unit.dtype.itemsize)]
    gradients = unit.gradients
    if gradients is None:
        return found
    where = "cut over the ranks, whole while backward collects it" if gradients.sharded else "whole on every rank until the step"
    kept = _part(slot, *gradients.interval) if gradients.sharded else slot.numel
    found.append(State("gradient", _short(gradients.dtype), where, kept * gradients.dtype.itemsize, f"travels as {_short(gradients.wire)}"))
    low, high = unit.master_interval
    owned = _part(slot, low, high)
    cut = "cut over the ranks" if (low, high) != (0, unit.layout.padded) else "whole on every rank"
    if unit.master is not None:
        note = "the parameter's own bytes: the optimizer updates them in place" if unit.master_is_shard else ""
        size = 0 if unit.master_is_shard else owned * unit.master.dtype.itemsize
        found.append(State("master weight", _short(unit.master.dtype), cut, size, note))
    for key, value in _optimizer_states(engine, slot).items():
        found.append(State(key, _short(value.dtype), cut if value.dim() else "one number for each tensor", _bytes(value, owned)))
    return found


def _optimizer_states(engine: Engine, slot: Slot) -> dict[str, torch.Tensor]:
    if engine.optimizer is None:
        return {}
    for run in engine.optimizer.runs:
        if run.unit is slot.unit and slot.index in run.slots:
            state: dict[str, Any] = engine.optimizer.inner.state.get(run.tensor, {})
            return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    return {}


def _bytes(value: torch.Tensor, owned: int) -> int:
    return (owned if value.dim() else 1) * value.dtype.itemsize


def _part(slot: Slot, low: int, high: int) -> int:
    return max(0, min(slot.offset + slot.numel, high) - max(slot.offset, low))


def _events(engine: Engine, slot: Slot) -> tuple[Event, ...]:
    """Return what happened to the unit between the ends of the last two steps."""
    if len(engine.step_ends) < 2:
        return ()
    begin, end = engine.step_ends
    found, updated = [], False
    for at, during, what in slot.unit.life:
        if begin < at <= end:
            updated = updated or what == UPDATED
            in_backward = during == "backward" or "gradient" in what  # the last reductions end when autograd has ended
            found.append(Event(at - begin, "step" if updated else "backward" if in_backward else "forward", what))
    return tuple(found)


def _files(engine: Engine, slot: Slot) -> tuple[str, tuple[tuple[str, str, int], ...]]:
    """Return the newest checkpoint that this engine saved or loaded, and its files with elements of the parameter."""
    folder: Path | None = engine.last_checkpoint
    if folder is None:
        return "this engine has saved and loaded none", ()
    try:
        source = open_source(folder)
        places = [
            (state, str(file), numel) for state in source.states(slot.name) for file, numel in source.elements(slot.name, state).places()
        ]
    except (CheckpointError, KeyError) as error:
        return f"{folder} cannot be read now: {error}", ()
    return str(folder), tuple(places)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
