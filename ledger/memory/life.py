"""The course of device memory over a step: which instant is the peak, on which pipeline stage, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ..account import Account, account
from ..job import Job
from ..pipeline.formulas import schedule_named
from ..shapes.shape import ModelShape
from .rank import placed_units, rank_units, stage_kinds, state_rows
from .states import placement_of
from .tensors import LayerOptions, end_tensors, layer_tensors

Row = tuple[str, float, str]  # name, bytes, why
FRAGMENTATION = 0.02  # of what is allocated and freed within a step; see docs/ledger.md


@dataclass(frozen=True)
class Course:
    """Device memory of one rank of a stage at each instant of a step."""

    stage: int
    instants: tuple[tuple[str, Account], ...]

    @property
    def peak(self) -> tuple[str, Account]:
        """The instant with the most bytes."""
        return max(self.instants, key=lambda item: item[1].total)

    @property
    def why(self) -> str:
        """What makes the peak: the largest terms at it, and what it has that the others have not."""
        name, at = self.peak
        largest = sorted(at.terms, key=lambda term: -term.value)[:3]
        shares = ", ".join(f"{term.name} {100 * term.value / at.total:.0f} %" for term in largest)
        return f"the peak is {name} on stage {self.stage}: {shares}"


def in_flight_chunks(schedule: str, stage: int, pp: int, vp: int, microbatches: int) -> float:
    """Return how many chunks' activations a stage holds at most (a chunk is 1/vp of the stage's layers)."""
    row = schedule_named(schedule)
    if pp == 1:
        return 1.0
    if row.name == "gpipe":
        return float(microbatches)
    if row.name == "1f1b":
        most = pp - stage if vp == 1 else 2 * (pp - 1 - stage) + (vp - 1) * pp + 1
        return float(min(most, microbatches * vp))
    return float(min(row.memory * pp + row.beyond, microbatches)) * vp


def activations(job: Job, stage: int) -> Account:
    """Return bytes of activations that a rank of `stage` holds when most micro-batches are in flight there."""
    flight = _flight(job, stage)
    rows = _activation_rows(job, stage)
    return account(f"activations on stage {stage}", "bytes", rows, in_flight=f"{flight:g} micro-batches", recompute=job.layout.recompute)


def _flight(job: Job, stage: int) -> float:
    layout = job.layout
    return in_flight_chunks(layout.schedule, stage, layout.pp, layout.vp, layout.accumulation) / layout.vp


@lru_cache(maxsize=4096)
def _layer_rows(shape: ModelShape, seq: int, micro_batch: int, options: LayerOptions, kind: str) -> tuple[tuple[str, float], ...]:
    crossed = shape.encoder_layers > 0 and kind != "encoder layer"
    kept = layer_tensors(shape, seq, micro_batch, options, mixture=kind == "mixture layer", crossed=crossed)
    return tuple((term.name, term.value) for term in kept.terms)


@lru_cache(maxsize=4096)
def _end_rows(
    shape: ModelShape, seq: int, micro_batch: int, options: LayerOptions, first: bool, chunks: int
) -> tuple[tuple[str, float], ...]:
    ends = end_tensors(shape, seq, micro_batch, options, first=first, last=not first, loss_chunks=chunks)
    return tuple((term.name, term.value) for term in ends.terms)


def _activation_rows(job: Job, stage: int) -> list[Row]:
    layout, shape = job.layout, job.shape
    options, flight = layout.options(), _flight(job, stage)
    rows: list[Row] = []
    for unit in rank_units(job, stage):
        if not unit.is_root:
            many, why = unit.count * flight, f"{unit.count} layers x {flight:g} micro-batches"
            kept = _layer_rows(shape, job.seq, layout.micro_batch, options, unit.name)
            rows += [(f"{unit.name}: {name}", size * many, why) for name, size in kept]
    if stage == 0:
        kept = _end_rows(shape, job.seq, layout.micro_batch, options, True, 1)
        rows += [(name, size * flight, f"{flight:g} micro-batches") for name, size in kept]
    if stage == layout.last_stage:
        kept = _end_rows(shape, job.seq, layout.micro_batch, options, False, layout.loss_chunks)
        rows += [(name, size, "one micro-batch at a time") for name, size in kept]
    return rows


def _instants(job: Job, stage: int) -> list[tuple[str, list[Row]]]:
    """Return what is on the device at each instant; every figure of memory is read off these rows."""
    held = [(name, size, why) for tier, name, size, why in state_rows(job, stage) if tier == "device"]
    alive = [(f"activations: {name}", size, why) for name, size, why in _activation_rows(job, stage)]
    gathered, full_grad = _working(job, stage)
    moving: tuple[tuple[str, list[Row]], ...] = (
        ("between steps", []),
        ("end of forward", [*alive, *gathered]),
        ("backward", [*alive, *gathered, *full_grad, *_recomputed(job, stage)]),
        ("optimizer", []),
    )
    overhead = ("no tensor", job.cluster.overhead_bytes, "context, communicators, libraries")
    found = []
    for name, rows in moving:
        lost = FRAGMENTATION * sum(size for _, size, _ in rows)
        found.append((name, [*held, *rows, ("fragmentation", lost, f"{100 * FRAGMENTATION:g} % of what comes and goes"), overhead]))
    return found


def course(job: Job, stage: int) -> Course:
    """Return the memory of a rank of pipeline stage `stage` at each instant of a step."""
    return Course(stage, tuple((name, account(f"{name}, stage {stage}", "bytes", rows)) for name, rows in _instants(job, stage)))


def _working(job: Job, stage: int) -> tuple[list[Row], list[Row]]:
    """Return what is whole only while it is used: gathered parameters, and gradients on their way to their shard."""
    placement, layout, sizes = placement_of(job.layout.zero), job.layout, job.layout.sizes
    units = placed_units(job, stage)
    layers = [unit.numel for unit in units if not unit.is_root]
    root = sum(unit.numel for unit in units if unit.is_root)
    largest = max(layers, default=0)
    gathered, grads = [], []
    cut = layout.shard_world > 1
    if placement.parameters.sharded and (cut or layout.parameter_tier != "device"):
        ahead = 1 + layout.prefetch
        gathered.append(("gathered units", (ahead * largest + root) * sizes.param, f"{ahead} layers and the root, whole"))
    if placement.gradients.sharded and (cut or layout.optimizer_tier != "device"):
        grads.append(("gradients of running units", (2 * largest if layers else root) * sizes.grad, "one being written, one being reduced"))
    return gathered, grads


def _recomputed(job: Job, stage: int) -> list[Row]:
    """Under full recomputation one layer's activations are whole while its backward runs."""
    layout = job.layout
    if layout.recompute != "full":
        return []
    options = replace(layout.options(), recompute="none")
    kinds = {unit.name for unit in rank_units(job, stage) if not unit.is_root}
    sizes = [sum(size for _, size in _layer_rows(job.shape, job.seq, layout.micro_batch, options, kind)) for kind in kinds]
    return [("recomputed layer", max(sizes, default=0.0), "one layer at a time")]


def peak_stages(job: Job) -> tuple[int, ...]:
    """Return the stages among which the fullest is: the first of each kind, since earlier stages hold more micro-batches."""
    return tuple(stage for stage, _ in stage_kinds(job))


def peak_bytes(job: Job) -> tuple[float, int]:
    """Return the highest peak of any stage and that stage: the search's figure, without the account around it."""
    return max((max(sum(size for _, size, _ in rows) for _, rows in _instants(job, stage)), -stage) for stage in peak_stages(job))


def fullest(job: Job) -> Course:
    """Return the course of the stage with the highest peak."""
    return course(job, -peak_bytes(job)[1])


def tensors_of(instant: Account) -> float:
    """Return the bytes of tensors at an instant: without fragmentation and without what is no tensor."""
    return sum(term.value for term in instant.terms if term.name not in ("fragmentation", "no tensor"))
