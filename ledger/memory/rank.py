"""The units of one rank and the bytes of their states: the same padded shares that the engine's layouts cut."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..account import Account, account
from ..job import Job, stage_ranges
from ..shapes.parts import Block, blocks
from ..shapes.shape import ModelShape
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
    """Return bytes of each state of a rank, with the tier it rests on."""
    layout = job.layout
    tiers = (layout.parameter_tier, layout.optimizer_tier)
    return _state_rows(rank_units(job, stage), layout.zero, layout.shard_world, expert_shard_world(job), layout.sizes, tiers)


@lru_cache(maxsize=16384)
def _state_rows(
    units: tuple[RankUnit, ...], stage: int, world: int, expert_world: int, sizes: StateSizes, tiers: tuple[str, str]
) -> tuple[Row, ...]:
    placement = placement_of(stage)
    rows = (
        ("parameters", sizes.param, placement.parameters.sharded, tiers[0]),
        ("gradients", sizes.grad, placement.gradients.sharded, tiers[1] if placement.gradients.sharded else "device"),
        ("master weights", sizes.master, placement.optimizer.sharded, tiers[1]),
        ("optimizer states", sizes.first + sizes.second, placement.optimizer.sharded, tiers[1]),
    )
    found = []
    for name, each, sharded, tier in rows:
        is_moments = name == "optimizer states"
        elements = sum(unit.count * _resident(unit, world, expert_world, sharded, is_padded=not is_moments) for unit in units)
        where = f"cut over {world:,}" if sharded and world > 1 else "whole"
        steps = _STEP_BYTES * sum(unit.count * _updates(unit, world, expert_world, sharded) for unit in units) if is_moments and each else 0
        counts = f", and {steps // _STEP_BYTES:,} step counts of {_STEP_BYTES} bytes" if steps else ""
        found.append((tier, name, elements * each + steps, f"{elements:,} x {each:g} bytes, {where}{counts}"))
    return tuple(found)


def rank_states(job: Job, stage: int) -> dict[str, Account]:
    """Return bytes of the states of a rank by the tier they rest on: device, and cpu or nvme where they are moved there."""
    terms: dict[str, list[tuple[str, float, str]]] = {}
    for tier, name, size, why in state_rows(job, stage):
        terms.setdefault(tier, []).append((name, size, why))
    return {
        tier: account(f"states at rest on {tier}, pipeline stage {stage}", "bytes", rows, bytes_per_parameter=f"{job.layout.sizes.total:g}")
        for tier, rows in terms.items()
    }


def _updates(unit: RankUnit, world: int, expert_world: int, sharded: bool) -> int:
    """Return how many tensors the optimizer updates: one for each rank's interval that is here and is not padding alone."""
    parts = ((unit.dense, world), (unit.experts, expert_world))
    return sum(1 if sharded else -(-numel // share(numel, ranks)) for numel, ranks in parts if numel)


def _resident(unit: RankUnit, world: int, expert_world: int, sharded: bool, *, is_padded: bool = True) -> int:
    if sharded and world > 1:
        return share(unit.dense, world) + share(unit.experts, expert_world)
    if not is_padded:  # the optimizer updates parameters only
        return unit.numel
    return padded(unit.dense, world) + padded(unit.experts, expert_world)
