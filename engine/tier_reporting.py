"""What the engine hands to the ledger about tiers: each state once for each tier that holds some of it, and what a step moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..ledger import LedgerRow, OptimizerRecord, UnitRecord, predict_states
from ..ledger.records import MoveRow
from ..ledger.states import optimizer_states
from ..ledger.tiers import DriveUnit, UnitInUse, predict_buffers, predict_drive, predict_moves, predict_working
from ..zero.backward import IN_FLIGHT
from ..zero.tiers.options import CPU, DEVICE, NVME
from ..zero.tiers.residence import is_stand_in
from ..zero.tiers.space import sub_groups
from ..zero.tiers.sub_groups import BySubGroups
from ..zero.tiers.tiers import GRADIENTS, MASTER, PARAMETERS, Tiers
from ..zero.unit import Unit

if TYPE_CHECKING:
    from .engine import Engine

_FILES = {PARAMETERS: "parameters", GRADIENTS: "gradients", MASTER: "master weights"}
_OTHERS = "optimizer states"
STATES = ("parameters", "gradients", "master weights", _OTHERS)
_COUNT_BYTES = 4  # torch keeps a step count as one fp32 scalar
MoveCounts = dict[tuple[str, str], int]


def tier_rows(
    engine: Engine, records: Sequence[UnitRecord], describe: Callable[[str], tuple[str, str]], optimizer_records: Callable[..., Any]
) -> list[LedgerRow]:
    """Return a row for each state and tier that holds some of it, and one for the buffers in front of a drive.

    Args:
        describe: state -> (dtypes, placement), as rows show them.
        optimizer_records: (optimizer, runs) -> records of these runs only.
    """
    tiers, units = _tiers(engine), engine.sharded.units
    rows = []
    drive = predict_drive([_drive_unit(unit, engine) for unit in units if unit.residence is not None])
    for state in STATES:
        dtypes, placement = describe(state)
        for tier in (DEVICE, CPU):
            chosen = [index for index, unit in enumerate(units) if tier_of(state, unit, tiers) == tier]
            here = [units[index] for index in chosen]
            if not here:
                continue
            runs = [] if engine.optimizer is None else [run for run in engine.optimizer.runs if any(run.unit is unit for unit in here)]
            predicted = predict_states(
                [records[index] for index in chosen], engine.sharded.placement, engine.dp.rank, optimizer_records(engine.optimizer, runs)
            )[state]
            measured = _in_memory(state, here, engine)
            if predicted or measured:
                rows.append(LedgerRow(state, dtypes, placement, tier, predicted, measured))
        if drive[state]:
            rows.append(LedgerRow(state, dtypes, placement, NVME, drive[state], _on_drive(state, tiers)))
    return rows + _rest_of_memory(engine, tiers)


def drive_bytes(engine: Engine) -> dict[str, int]:
    """Return the bytes of each state on a drive; nothing where no state is there."""
    tiers = engine.sharded.tiers
    sizes = {} if tiers is None else {state: _on_drive(state, tiers) for state in STATES}
    return {state: size for state, size in sizes.items() if size}


def buffer_tensors(engine: Engine) -> dict[str, list[torch.Tensor]]:
    """Return the buffers in front of a drive that exist now."""
    update = None if engine.optimizer is None else engine.optimizer.update
    rooms = update.buffers if isinstance(update, BySubGroups) else []
    return {"sub-group buffers": rooms, "staging buffers": _tiers(engine).staging_buffers}


def moves_now(engine: Engine) -> MoveCounts:
    """Return the bytes moved so far, by direction and state."""
    tiers = engine.sharded.tiers
    counts: MoveCounts = {}
    for drive in [] if tiers is None else tiers.drives:
        for (direction, file), moved in drive.moved.items():
            key = (direction, _FILES.get(file, _OTHERS))
            counts[key] = counts.get(key, 0) + moved.num_bytes
    return counts


def move_rows(engine: Engine, counted: MoveCounts) -> list[MoveRow]:
    """Return what the last step moved between drive and memory."""
    units = [_drive_unit(unit, engine) for unit in engine.sharded.units if unit.residence is not None]
    if not units or not counted:
        return []
    micro = engine.gradient_accumulation_steps()
    every_pass = engine.dp.world > 1 and (engine.sharded.placement.reduces_every_pass or engine.config.deterministic)
    predicted = predict_moves(units, micro, micro if every_pass else 1)
    keys = sorted({*predicted, *(key for key, value in counted.items() if value)}, key=lambda key: (key[1], key[0]))
    return [MoveRow(*key, predicted.get(key, 0), counted.get(key, 0), counted.get(key, 0) / _rate(engine, key[0])) for key in keys]


def working_of(engine: Engine) -> tuple[tuple[str, int], ...]:
    """Return what a step of stage 3 has in memory beyond what rests there."""
    used = []
    for unit in engine.sharded.units:
        itemsize = 0 if unit.gradients is None else unit.gradients.dtype.itemsize
        largest = max((slot.numel for slot in unit.slots if unit.gradients is not None), default=0)
        used.append(UnitInUse(unit.full_bytes, unit.layout.padded * itemsize, largest * unit.dtype.itemsize, unit.pinned))
    tiles = [tile for unit in engine.sharded.units for tile in _tiers(engine).tiles_of(unit.index) if unit.trainable]
    largest_group = max((group.numel for group in sub_groups(tiles, _tiers(engine).options.sub_group_numel)), default=0)
    states = max((len(known[0]) for record in _records(engine) if (known := optimizer_states(record)) is not None), default=0)
    ahead = 1 if engine.dp.world == 1 or not _tiers(engine).moves_params else 2
    return predict_working(used, ahead=ahead, in_flight=IN_FLIGHT, created_bytes=states * largest_group * 4)


def _rate(engine: Engine, direction: str) -> float:
    """Return bytes a second over the whole run, all drives together; infinite before anything was measured."""
    drives = _tiers(engine).drives
    num_bytes = sum(moved.num_bytes for drive in drives for (way, _), moved in drive.moved.items() if way == direction)
    seconds = sum(drive.clocks[direction].seconds for drive in drives)
    return num_bytes / seconds if seconds else float("inf")


def _tiers(engine: Engine) -> Tiers:
    assert engine.sharded.tiers is not None
    return engine.sharded.tiers


def tier_of(state: str, unit: Unit, tiers: Tiers) -> str:
    """Return where a unit's state rests in memory, or what is left of one that rests on a drive; "" for what has none."""
    home = unit.residence
    if state == "parameters":
        return NVME if home is not None and home.shard is not None else tiers.param_tiers.get(unit.index, DEVICE)
    if not unit.trainable:
        return ""
    tier = tiers.optimizer_tier(unit)
    if state == "gradients":
        if home is not None and home.gradients is not None:
            return NVME
        return tier if tier == CPU and unit.gradients is not None and unit.gradients.sharded else DEVICE
    if state == "master weights":
        return NVME if home is not None and (home.master is not None or home.shares_master) else tier if tier != NVME else DEVICE
    return NVME if tier == NVME else tier


def _in_memory(state: str, units: Sequence[Unit], engine: Engine) -> int:
    """Walk the storages that exist now."""
    tensors: list[torch.Tensor] = []
    for unit in units:
        if state == "parameters":
            tensors += [unit.full, unit.shard]
        elif state == "gradients":
            tensors += [] if unit.gradients is None else unit.gradients.tensors()
        elif state == "master weights":
            tensors += [unit.master] if unit.master is not None and not unit.master_is_shard else []
        elif engine.optimizer is not None:
            tensors += [
                value
                for run in engine.optimizer.runs
                if run.unit is unit
                for value in engine.optimizer.inner.state.get(run.tensor, {}).values()
                if isinstance(value, torch.Tensor)
            ]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if not is_stand_in(t)}.values())


def _on_drive(state: str, tiers: Tiers) -> int:
    """Ask the file system."""
    files = {name for drive in tiers.drives for name in drive.states}
    wanted = {name for name in files if _FILES.get(name, _OTHERS) == state}
    return sum(drive.held_bytes(name) for drive in tiers.drives for name in wanted)


def _rest_of_memory(engine: Engine, tiers: Tiers) -> list[LedgerRow]:
    """Return rows for step counts of states on a drive, and for the buffers in front of it."""
    rows = []
    units = [unit for unit in engine.sharded.units if unit.residence is not None]
    update = None if engine.optimizer is None else engine.optimizer.update
    on_drive = [unit for unit in units if unit.residence is not None and unit.residence.takes_states]
    if engine.optimizer is not None and on_drive:
        runs = [run for run in engine.optimizer.runs if any(run.unit is unit for unit in on_drive)]
        states = [
            value for run in runs for value in engine.optimizer.inner.state.get(run.tensor, {}).values() if isinstance(value, torch.Tensor)
        ]
        small = sum(value.nbytes for value in states if not is_stand_in(value))
        known = [optimizer_states(record) for record in _records(engine)]
        counts = [None if (each := known[run.group]) is None else each[1] * _COUNT_BYTES for run in runs]
        scalars = None if None in counts else sum(count for count in counts if count is not None)
        if small or scalars:
            rows.append(LedgerRow("step counts", "float32", "beside the states", CPU, scalars, small))
    if isinstance(update, BySubGroups) and on_drive:
        described = [_drive_unit(unit, engine) for unit in on_drive]
        predicted = predict_buffers(described, tiers.options.sub_group_numel, update.rooms)
        rows.append(LedgerRow("sub-group buffers", "uint8", "aligned", CPU, predicted, update.held_bytes))
    whole = [_drive_unit(unit, engine) for unit in units]
    if units:
        staging = tiers.staging
        passes = any(unit.param_itemsize or unit.master_itemsize or unit.grad_itemsize for unit in whole)
        predicted = staging.most_bytes if passes else 0  # optimizer states pass by sub-group, unless a script reads them
        if predicted or staging.held_bytes:
            rows.append(LedgerRow("staging buffers", "uint8", "aligned", CPU, predicted, staging.held_bytes))
    return rows


def _records(engine: Engine) -> list[OptimizerRecord]:
    if engine.optimizer is None:
        return []
    options = ("amsgrad", "momentum", "centered", "use_muon")
    return [
        OptimizerRecord(type(engine.optimizer.inner).__name__, tuple((name, group.get(name)) for name in options), (), 4)
        for group in engine.optimizer.param_groups
    ]


def _drive_unit(unit: Unit, engine: Engine) -> DriveUnit:
    home = unit.residence
    assert home is not None
    tiles = _tiers(engine).tiles_of(unit.index)
    names: dict[str, int] = {}
    if home.takes_states and engine.optimizer is not None and unit.master is not None:
        groups = {run.group for run in engine.optimizer.runs if run.unit is unit}
        for index, record in enumerate(_records(engine)):
            known = optimizer_states(record) if index in groups else None
            names.update({} if known is None else dict.fromkeys(known[0], unit.master.dtype.itemsize))
    return DriveUnit(
        tiles=tuple((tile.stop - tile.start, tile.end - tile.base) for tile in tiles),
        param_itemsize=0 if home.shard is None else unit.dtype.itemsize,
        master_itemsize=0 if home.master is None else home.master.dtype.itemsize,
        grad_itemsize=0 if home.gradients is None else home.gradients.dtype.itemsize,
        states=tuple(names.items()),
        is_root=unit.pinned,
        shares_master=home.shares_master,
        trainable=unit.trainable,
    )
