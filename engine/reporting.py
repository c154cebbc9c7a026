"""What the engine hands to the ledger: plain records of its units, its optimizer and its counted traffic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..ledger import Ledger, LedgerRow, OptimizerRecord, TrafficRow, UnitRecord, predict_states, predict_traffic
from ..parallel.collectives import CONTROL, Traffic
from ..zero.unit import Unit
from .tier_reporting import move_rows, tier_rows, working_of

if TYPE_CHECKING:
    from .engine import Engine

STEP_STATES = ("parameters", "gradients", CONTROL)  # reading and evaluation are not part of a step
_OPTIONS = ("amsgrad", "momentum", "centered", "use_muon")
_FLAG_BYTES = 4  # the agreement on used parameters sends one int32 per parameter and unit
_ROW_BYTES = 8  # norms and loss reports travel as fp64


def ledger_of(engine: Engine, hardware: str | None = None) -> Ledger:
    """Return the account of this engine on this rank.

    Args:
        hardware: name or file of the device whose peak MFU is counted against; by default the device that is here.
    """
    records = [unit_record(unit, engine) for unit in engine.sharded.units]
    optimizer = [] if engine.optimizer is None else optimizer_records(engine.optimizer)
    placement = engine.sharded.placement
    predicted = predict_states(records, placement, engine.dp.rank, optimizer)
    measured = {state: _storage_bytes(tensors) for state, tensors in state_tensors(engine).items()}
    cells = {
        "parameters": placement.parameters,
        "gradients": placement.gradients,
        "master weights": placement.optimizer,
        "optimizer states": placement.optimizer,
    }
    if engine.sharded.tiers is not None:
        rows = tier_rows(engine, records, lambda state: (_dtypes(engine, state), str(cells[state])), optimizer_records)
    else:
        rows = [
            LedgerRow(
                state, _dtypes(engine, state), str(cells[state]), cells[state].tier, predicted[state], measured[state], _note(engine, state)
            )
            for state in cells
        ]
    buffers = list(engine.module.buffers())
    dtypes = ", ".join(sorted({_short(b.dtype) for b in buffers})) or "-"
    rows.append(LedgerRow("buffers", dtypes, "replicated", "device", sum(b.nbytes for b in buffers), _storage_bytes(buffers)))
    return Ledger(
        title=f"ZeRO stage {placement.stage}",
        rank=engine.comm.rank,
        world=engine.comm.world,
        states=tuple(rows),
        traffic=(*_traffic_rows(engine, records), *engine.stage_traffic()),
        step=None if engine.costs is None else engine.costs.figures(hardware),
        model=None if engine.costs is None else engine.costs.shape(),
        moves=tuple(move_rows(engine, engine.last_step_moves)) if engine.sharded.tiers is not None else (),
        working=working_of(engine) if engine.sharded.tiers is not None and placement.parameters.sharded else (),
    )


def step_traffic(
    before: dict[Any, Traffic], after: dict[Any, Traffic], states: Iterable[str] = STEP_STATES
) -> dict[tuple[str, str], Traffic]:
    """Return what one step moved: the difference of two snapshots, without reading and evaluation."""
    found = {}
    for key, now in after.items():
        if key[1] not in states:
            continue
        was = before.get(key, Traffic())
        delta = Traffic(now.calls - was.calls, now.num_bytes - was.num_bytes, now.sent_bytes - was.sent_bytes)
        if delta.calls:
            found[key] = delta
    return found


def unit_record(unit: Unit, engine: Engine) -> UnitRecord:
    """Return what the ledger's arithmetic needs to know of a unit."""
    gradients = unit.gradients
    master = unit.master
    return UnitRecord(
        name=unit.name,
        layout=unit.layout,
        trainable=unit.trainable,
        is_root=unit.pinned,
        param_itemsize=unit.dtype.itemsize,
        grad_itemsize=0 if gradients is None else gradients.dtype.itemsize,
        wire_itemsize=0 if gradients is None else gradients.wire.itemsize,
        master_itemsize=None if master is None or unit.master_is_shard else master.dtype.itemsize,
    )


def optimizer_records(optimizer: Any, among: Sequence[Any] | None = None) -> list[OptimizerRecord]:
    """Return a record for each group, of all runs or of those in `among`."""
    records = []
    for index, group in enumerate([] if optimizer is None else optimizer.param_groups):
        runs = [run for run in (optimizer.runs if among is None else among) if run.group == index]
        records.append(
            OptimizerRecord(
                name=type(optimizer.inner).__name__,
                options=tuple((name, group.get(name)) for name in _OPTIONS),
                run_numels=tuple(run.tensor.numel() for run in runs),
                itemsize=runs[0].tensor.dtype.itemsize if runs else 4,
            )
        )
    return records


def state_tensors(engine: Engine) -> dict[str, list[torch.Tensor]]:
    """Return the tensors of each state that hold memory now."""
    units = engine.sharded.units
    states: list[torch.Tensor] = []
    if engine.optimizer is not None:
        states = [v for state in engine.optimizer.inner.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return {
        "parameters": [t for unit in units for t in (unit.full, unit.shard)],
        "gradients": [t for unit in units if unit.gradients is not None for t in unit.gradients.tensors()],
        "master weights": [unit.master for unit in units if unit.master is not None and not unit.master_is_shard],
        "optimizer states": states,
    }


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the distinct storages behind tensors."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _dtypes(engine: Engine, state: str) -> str:
    units = engine.sharded.units
    if state == "parameters":
        found = {unit.dtype for unit in units}
    elif state == "gradients":
        found = {unit.gradients.dtype for unit in units if unit.gradients is not None}
    elif state == "master weights":
        found = {unit.master.dtype for unit in units if unit.master is not None and not unit.master_is_shard}
    else:
        states = {} if engine.optimizer is None else engine.optimizer.inner.state
        found = {v.dtype for s in states.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()}
    return ", ".join(sorted(_short(dtype) for dtype in found)) or "-"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _note(engine: Engine, state: str) -> str:
    if state == "master weights" and all(unit.master_is_shard for unit in engine.sharded.units if unit.master is not None):
        return "the parameters themselves: the optimizer updates them in place"
    if state == "optimizer states" and engine.global_steps == 0:
        return "they come to life in the first step"
    return ""


def _traffic_rows(engine: Engine, records: list[UnitRecord]) -> list[TrafficRow]:
    counted = engine.last_step_traffic
    if engine.dp.world == 1 or not counted:
        return []
    every_pass = engine.sharded.placement.reduces_every_pass or engine.config.deterministic
    predicted = predict_traffic(
        records, engine.sharded.placement, engine.dp.world, engine.gradient_accumulation_steps(), reduces_every_pass=every_pass
    )
    predicted.update(_predicted_control(engine))
    rows = []
    for key in sorted({*predicted, *counted}, key=lambda k: (k[1], k[0])):
        calls, num_bytes = predicted.get(key, (0, 0))
        seen = counted.get(key, Traffic())
        rows.append(TrafficRow(key[0], key[1], calls, seen.calls, num_bytes, seen.num_bytes, seen.sent_bytes))
    return rows


def _predicted_control(engine: Engine) -> dict[tuple[str, str], tuple[int, int]]:
    optimizer = engine.optimizer
    if optimizer is None:
        return {}
    flags = sum(len(unit.slots) for unit in optimizer.units) + len(optimizer.units)
    row = 1 + len(optimizer.report)
    found = {("all_reduce", CONTROL): (1, flags * _FLAG_BYTES)}
    if engine.comm is engine.dp:  # else norms are summed over all stages, and counted there
        found["all_gather", CONTROL] = (1, engine.comm.world * row * _ROW_BYTES)
    return found
