"""The units of one rank and the bytes of their states: the same padded shares that the engine's layouts cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..account import Account, account
from ..job import Job, stage_ranges
from ..shapes.parts import Block, blocks
from ..shapes.shape import ModelShape
from ..tiers import DriveUnit
from .drive import DriveOptions, buffer_bytes, held, padded_tile, stay_in_host, tiles_of
from .states import StateSizes, placement_of

_STEP_BYTES = 4  # torch keeps an optimizer's step count as one fp32 scalar for each tensor that it updates


@dataclass(frozen=True)
class RankUnit:
    """Units of one kind on a rank: elements of one of them after tensor and expert parallelism, before ZeRO.

    Attributes:
        dense, experts: elements cut over the dense and the expert data-parallel ranks.
        is_root: gathered once a micro-batch, for forward and backward together.
    """

    name: str
    count: int
    dense: int
    experts: int
    is_root: bool = False

    @property
    def numel(self) -> int:
        """Elements of one unit on this rank when it is whole."""
        return self.dense + self.experts


def share(numel: int, world: int) -> int:
    """Return elements of one rank's shard: what `zero.layout.Layout.even` gives each rank, without building its bounds."""
    return -(-numel // world)


def padded(numel: int, world: int) -> int:
    """Return elements of the whole flat buffer: a unit is padded once, at its end."""
    return share(numel, world) * world


def expert_shard_world(job: Job) -> int:
    """Return ranks that ZeRO cuts the experts' states over."""
    return max(1, job.layout.expert_dp // job.layout.dp_replicate)


def rank_units(job: Job, stage: int) -> tuple[RankUnit, ...]:
    """Return the units on a rank of pipeline stage `stage`: its layers by kind, and a root with what else lies there."""
    layout = job.layout
    return _units(job.shape, layout.tp, layout.ep, layout.etp, _cut_of(job), stage)


def placed_units(job: Job, stage: int) -> tuple[RankUnit, ...]:
    """Return the units as the engine places and gathers them: a layer that is alone on its stage is no unit but part of the root."""
    units = rank_units(job, stage)
    layers = [unit for unit in units if not unit.is_root]
    if sum(unit.count for unit in layers) != 1:
        return units
    alone, roots = layers[0], [unit for unit in units if unit.is_root]
    dense, experts = (sum(getattr(unit, part) for unit in [alone, *roots]) for part in ("dense", "experts"))
    return (RankUnit("root", 1, dense, experts, is_root=True),)


@dataclass(frozen=True)
class _Cut:
    """How layers lie on stages."""

    stages: int
    parts: int
    sizes: tuple[int, ...]
    vee: bool

    @property
    def last(self) -> int:
        return 0 if self.vee else self.stages - 1

    def layers(self, count: int, stage: int, *, explicit: bool = True) -> list[range]:
        return stage_ranges(count, self.stages, self.parts, self.sizes if explicit else (), vee=self.vee)[stage]


def _cut_of(job: Job) -> _Cut:
    layout = job.layout
    return _Cut(layout.pp, layout.parts, layout.cut, layout.vee)


@lru_cache(maxsize=4096)
def _units(shape: ModelShape, tp: int, ep: int, etp: int, cut: _Cut, stage: int) -> tuple[RankUnit, ...]:
    found, root_dense = [], 0
    for block in blocks(shape):
        dense = sum(_after(part.numel, tp if part.cut == "tp" else 1) for part in block.parts if part.cut != "ep")
        experts = sum(_after(part.numel, ep * etp) for part in block.parts if part.cut == "ep")
        if block.role == "layer":
            count = _on_stage(block, shape, cut, stage)
            if count:
                found.append(RankUnit(block.name, count, dense, experts))
        elif stage == (cut.last if block.role == "head" else 0):
            root_dense += dense
    if shape.tied and cut.last and stage == cut.last:  # a tied head on another stage than the embedding is a copy
        root_dense += _after(shape.vocab * (shape.embedding_width or shape.hidden), tp)
    if root_dense:
        found.append(RankUnit("root", 1, root_dense, 0, is_root=True))
    return tuple(found)


def stage_kinds(job: Job) -> tuple[tuple[int, int], ...]:
    """Return (first stage, how many) of each kind of pipeline stage: stages with equal units are one kind."""
    layout = job.layout
    return _stage_kinds(job.shape, layout.tp, layout.ep, layout.etp, _cut_of(job))


@lru_cache(maxsize=4096)
def _stage_kinds(shape: ModelShape, tp: int, ep: int, etp: int, cut: _Cut) -> tuple[tuple[int, int], ...]:
    found: dict[tuple[tuple[RankUnit, ...], bool, bool], list[int]] = {}
    for stage in range(cut.stages):
        key = (_units(shape, tp, ep, etp, cut, stage), stage == 0, stage == cut.last)
        found.setdefault(key, []).append(stage)
    return tuple((stages[0], len(stages)) for stages in found.values())


def _after(numel: int, parts: int) -> int:
    return -(-numel // parts)


def _on_stage(block: Block, shape: ModelShape, cut: _Cut, stage: int) -> int:
    """Return how many of a kind of layer lie on a stage."""
    if block.name == "prediction layer":
        return block.repeat if stage == cut.last else 0
    if block.name == "encoder layer":
        return sum(map(len, cut.layers(block.repeat, stage, explicit=False)))
    here = cut.layers(shape.layers, stage)
    count = sum(map(len, here))
    if shape.mixture is None:
        return count
    mixtures = sum(shape.is_mixture(index) for each in here for index in each)
    return mixtures if block.name == "mixture layer" else count - mixtures


Row = tuple[str, str, float, str]  # tier, name, bytes, why


def state_rows(job: Job, stage: int) -> tuple[Row, ...]:
    """Return bytes of each state of a rank, with the tier it rests on, and of the buffers that a drive needs in host memory."""
    layout = job.layout
    tiers = _Tiers(layout.parameter_tier, layout.optimizer_tier, layout.drive, layout.on_host)
    return _state_rows(placed_units(job, stage), layout.zero, layout.shard_world, expert_shard_world(job), layout.sizes, tiers)


@dataclass(frozen=True)
class _Tiers:
    parameters: str
    optimizer: str
    options: DriveOptions
    on_host: bool

    @property
    def is_used(self) -> bool:
        return self.parameters != "device" or self.optimizer != "device"


@lru_cache(maxsize=16384)
def _state_rows(
    units: tuple[RankUnit, ...], stage: int, world: int, expert_world: int, sizes: StateSizes, tiers: _Tiers
) -> tuple[Row, ...]:
    placement = placement_of(stage)
    rows = (
        ("parameters", sizes.param, placement.parameters.sharded, tiers.parameters),
        ("gradients", sizes.grad, placement.gradients.sharded, tiers.optimizer if placement.gradients.sharded else "device"),
        ("master weights", sizes.master, placement.optimizer.sharded, tiers.optimizer),
        ("optimizer states", sizes.first + sizes.second, placement.optimizer.sharded, tiers.optimizer),
    )
    found: list[Row] = []
    for name, each, sharded, tier in rows:
        is_moments = name == "optimizer states"
        where = f"cut over {world:,}" if sharded and world > 1 else "whole"
        counts = sum(unit.count * _updates(unit, world, expert_world, sharded, tiers) for unit in units) if is_moments and each else 0
        if tier == "nvme":
            found += _drive_rows(name, each, units, world, expert_world, tiers)
            if counts:
                found.append(("cpu", "step counts", _STEP_BYTES * counts, f"{counts:,} x {_STEP_BYTES} bytes"))
            continue
        elements = sum(unit.count * _resident(unit, world, expert_world, sharded, is_padded=not is_moments) for unit in units)
        said = f", and {counts:,} step counts of {_STEP_BYTES} bytes" if counts else ""
        found.append((tier, name, elements * each + _STEP_BYTES * counts, f"{elements:,} x {each:g} bytes, {where}{said}"))
    if "nvme" in (tiers.parameters, tiers.optimizer):
        found += _buffer_rows(units, world, expert_world, sizes, tiers, sharded_gradients=placement.gradients.sharded)
    return tuple(found)


def _shares(units: Sequence[RankUnit], world: int, expert_world: int) -> list[int]:
    """Return elements of this rank's part of each unit, in the engine's order: the root first."""
    ordered = sorted(units, key=lambda unit: not unit.is_root)
    return [share(unit.dense, world) + share(unit.experts, expert_world) for unit in ordered for _ in range(unit.count)]


def unit_share(job: Job, unit: RankUnit) -> int:
    """Return elements of one unit that a rank owns when ZeRO cuts it."""
    return share(unit.dense, job.layout.shard_world) + share(unit.experts, expert_shard_world(job))


def drive_units(job: Job, stage: int) -> list[DriveUnit]:
    """Return the units of a rank of which something rests on a drive, as the arithmetic of drives wants them."""
    layout, sizes = job.layout, job.layout.sizes
    ordered = sorted(placed_units(job, stage), key=lambda unit: not unit.is_root)
    each = [(unit.is_root, unit_share(job, unit)) for unit in ordered for _ in range(unit.count)]
    stays = stay_in_host([numel for _, numel in each], layout.drive) if layout.parameter_tier == "nvme" else [True] * len(each)
    far = layout.optimizer_tier == "nvme"
    reduced = far and placement_of(layout.zero).gradients.sharded
    found = []
    for (is_root, numel), here in zip(each, stays, strict=True):
        tiles = tuple((tile, padded_tile(tile)) for tile in tiles_of(numel, layout.drive))
        found.append(
            DriveUnit(
                tiles,
                param_itemsize=0 if here else int(sizes.param),
                master_itemsize=int(sizes.master) if far else 0,
                grad_itemsize=int(sizes.grad) if reduced else 0,
                states=(("first", int(sizes.first)), ("second", int(sizes.second))) if far else (),
                is_root=is_root,
                shares_master=far and not here and not sizes.master,
            )
        )
    return [unit for unit in found if unit.update_itemsize]


def _drive_rows(name: str, each: float, units: Sequence[RankUnit], world: int, expert_world: int, tiers: _Tiers) -> list[Row]:
    shares = _shares(units, world, expert_world)
    stays = stay_in_host(shares, tiers.options) if name == "parameters" else [False] * len(shares)
    near = sum(numel for numel, here in zip(shares, stays, strict=True) if here)
    far = sum(held(numel, tiers.options) for numel, here in zip(shares, stays, strict=True) if not here)
    rows: list[Row] = []
    if near:
        rows.append(("cpu", name, near * each, f"{near:,} x {each:g} bytes: up to {tiers.options.in_host:,} elements stay in host memory"))
    if far:
        rows.append(("nvme", name, far * each, f"{far:,} x {each:g} bytes, cut over {world:,}, in files whose pieces are padded"))
    return rows


def _buffer_rows(
    units: Sequence[RankUnit], world: int, expert_world: int, sizes: StateSizes, tiers: _Tiers, *, sharded_gradients: bool
) -> list[Row]:
    shares, options = _shares(units, world, expert_world), tiers.options
    stays = stay_in_host(shares, options) if tiers.parameters == "nvme" else [True] * len(shares)
    params = [0 if here else int(sizes.param) for here in stays]
    on_drive = tiers.optimizer == "nvme"
    others = (int(sizes.master), int(sizes.grad) * sharded_gradients, int(sizes.first + sizes.second))
    updates, staging = buffer_bytes(shares, params, others if on_drive else (0, 0, 0), options)
    rows: list[Row] = []
    if on_drive:
        rows.append(("cpu", "sub-group buffers", updates, f"states of up to {options.rooms} sub-groups of {options.sub_group:,} elements"))
    if on_drive or not all(stays):
        rows.append(("cpu", "staging buffers", staging, f"{options.staging} x {options.staging_bytes:,} bytes"))
    return rows


def rank_states(job: Job, stage: int) -> dict[str, Account]:
    """Return bytes of the states of a rank by the tier they rest on: device, and cpu or nvme where they are moved there."""
    terms: dict[str, list[tuple[str, float, str]]] = {}
    for tier, name, size, why in state_rows(job, stage):
        terms.setdefault(tier, []).append((name, size, why))
    return {
        tier: account(f"states at rest on {tier}, pipeline stage {stage}", "bytes", rows, bytes_per_parameter=f"{job.layout.sizes.total:g}")
        for tier, rows in terms.items()
    }


def _updates(unit: RankUnit, world: int, expert_world: int, sharded: bool, tiers: _Tiers) -> int:
    """Return how many tensors the optimizer updates: one for each unit, or on a CPU for each rank's interval that is here.

    Where states leave the device an interval is cut into the pieces that are moved together.
    """
    parts = ((unit.dense, world), (unit.experts, expert_world))
    pieces = [len(tiles_of(share(numel, ranks), tiers.options)) if tiers.is_used else 1 for numel, ranks in parts]
    counts = (1 if sharded or not tiers.on_host else -(-numel // share(numel, ranks)) if numel else 0 for numel, ranks in parts)
    return sum(count * piece for (numel, _), count, piece in zip(parts, counts, pieces, strict=True) if numel)


def _resident(unit: RankUnit, world: int, expert_world: int, sharded: bool, *, is_padded: bool = True) -> int:
    if sharded and world > 1:
        return share(unit.dense, world) + share(unit.experts, expert_world)
    if not is_padded:  # the optimizer updates parameters only
        return unit.numel
    return padded(unit.dense, world) + padded(unit.experts, expert_world)
