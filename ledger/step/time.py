"""The time of one step as parts that sum to the total: ideal compute first, then each thing that keeps it from being that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..account import Account, account
from ..comm.axes import Flow, flows
from ..comm.tiers import HOST_AXIS, tier_flows
from ..flops.layers import StepFlops, step_flops
from ..job import Job
from ..memory.rank import rank_units, share, stage_kinds
from ..memory.states import placement_of
from ..pipeline.formulas import schedule_named
from .constants import Constants, constants_of
from .kernels import StageWork, stage_work


@dataclass(frozen=True)
class StepTime:
    """The account, and what is derived from it."""

    parts: Account
    flows: tuple[Flow, ...]
    flops: StepFlops
    peak_flops: float
    tokens: int
    devices: int
    lower_bound_s: float
    constants: Constants
    constants_from: str

    @property
    def seconds(self) -> float:
        """Time of the step."""
        return self.parts.total

    @property
    def mfu(self) -> float:
        """Model FLOPs over peak, 0 to 1."""
        return self.flops.model.total / (self.seconds * self.devices * self.peak_flops)

    @property
    def hfu(self) -> float:
        """Executed FLOPs over peak, 0 to 1."""
        return self.flops.hardware / (self.seconds * self.devices * self.peak_flops)

    @property
    def tokens_s(self) -> float:
        """Tokens a second of the whole job."""
        return self.tokens / self.seconds


def step_time(job: Job, constants: Constants | None = None) -> StepTime:
    """Return the predicted time of a step.

    Every part is what a rank waits for it: bubble and unevenness are those of the slowest stage, communication is what no
    compute hides.
    """
    layout, device = job.layout, job.cluster.accelerator
    known, origin = constants_of(device) if constants is None else (constants, "given")
    kinds = stage_kinds(job)
    works = [stage_work(job, stage, known) for stage, _ in kinds]
    counts = [count for _, count in kinds]
    slowest = max(works, key=lambda work: work.seconds)
    mean = _weighted(works, counts, lambda work: work.seconds)
    peak = device.peak_flops(layout.compute)
    flops = step_flops(job.shape, job.seq, layout.sequences, attention=job.attention, recompute=layout.recompute)
    ideal = flops.model.total / (job.cluster.devices * peak)
    micro = layout.accumulation
    bubble = schedule_named(layout.schedule).equal_share * (layout.pp - 1) * mean / layout.vp if layout.pp > 1 else 0.0
    again = micro * _weighted(works, counts, lambda work: work.recompute)
    products = micro * _weighted(works, counts, lambda work: work.products) - ideal
    usual = max(zip(kinds, works, strict=True), key=lambda pair: (pair[0][1], pair[1].seconds))[0][0]
    moved = [*flows(job, usual, known.rates), *tier_flows(job, usual)]  # of the kind that most stages are of
    exposed = {axis: _exposed(job, axis, moved, slowest, known) for axis in _AXES}
    optimizer = _optimizer_seconds(job, known)
    terms = [
        ("ideal compute", ideal, f"model FLOPs at peak, attention {job.attention}"),
        ("product efficiency", products, "matrix products and attention below peak"),
        ("memory-bound work", micro * _weighted(works, counts, lambda work: work.memory), "norms, activations, loss"),
        ("recompute", again, layout.recompute),
        ("uneven stages", micro * (slowest.seconds - mean), "the slowest stage sets the pace"),
        ("bubble", bubble, f"{layout.schedule}, {layout.pp} stages, {layout.vp} chunks, {micro} micro-batches"),
        *((f"exposed {axis}", time, "communication that nothing hides") for axis, time in exposed.items()),
        ("optimizer", optimizer, "reads and writes its states"),
    ]
    subtotal = sum(value for _, value, _ in terms)
    spread = known.spread * _doublings(job.cluster.nodes) * subtotal
    terms.append(("spread over nodes", spread, "stragglers and congestion, by doublings of the nodes"))
    switches = {"attention_counted": job.attention, "peak": f"{peak:.4g} FLOP/s {layout.compute}", "constants": origin}
    parts = account(f"time of a step: {job.shape.name} on {job.cluster}", "s", terms, **switches)
    bound = max(ideal, max((_sum(moved, axis) for axis in _AXES), default=0.0))
    return StepTime(parts, tuple(moved), flops, peak, job.tokens, job.cluster.devices, bound, known, origin)


def _weighted(works: list[StageWork], counts: list[int], read: Callable[[StageWork], float]) -> float:
    return sum(count * read(work) for work, count in zip(works, counts, strict=True)) / sum(counts)


def _sum(moved: list[Flow], axis: str) -> float:
    return sum(flow.seconds for flow in moved if flow.axis == axis)


def _exposed(job: Job, axis: str, moved: list[Flow], work: StageWork, known: Constants) -> float:
    """Return what no compute hides. Data-parallel traffic runs beside the pass that makes or needs it; of its window,
    `overlap` can be used, and the first unit's gather and the last one's reduction have nothing beside them."""
    own = [flow for flow in moved if flow.axis == axis or (axis == "dp" and flow.axis == "dp_replicate")]
    if axis in ("tp", "pp"):
        hidden = {"nothing": known.tp_hidden if axis == "tp" else 0.0}
        return sum(flow.seconds * (1 - hidden.get(flow.behind, known.overlap)) for flow in own)
    if axis in ("cp", "ep"):
        return _HALF_HIDDEN * sum(flow.seconds for flow in own)
    every_pass = placement_of(job.layout.zero).reduces_every_pass
    passes = job.layout.accumulation
    windows = {"nothing": 0.0, "forward": work.forward, "backward": work.backward, "forward and backward": work.forward + work.backward}
    exposed = 0.0
    used = 0.0
    for flow in own:
        several = passes if every_pass or flow.behind == "forward and backward" else 1
        window = known.overlap * several * windows[flow.behind]
        tail = flow.seconds / max(1.0, flow.calls) * several
        left = max(0.0, window - used if flow.behind != "forward" else window)
        used += min(flow.seconds, left) if flow.behind != "forward" else 0.0
        exposed += max(min(tail, flow.seconds), flow.seconds - left)
    return exposed


def _optimizer_seconds(job: Job, known: Constants) -> float:
    """Gradient, master and moments are read, all but the gradient written, and the parameter is written."""
    layout, sizes = job.layout, job.layout.sizes
    world = layout.shard_world if placement_of(layout.zero).optimizer.sharded else 1
    elements = sum(unit.count * (share(unit.dense, world) + share(unit.experts, world if world == 1 else max(1,
        layout.expert_dp // layout.dp_replicate)))
                   for unit in rank_units(job, 0))  # fmt: skip
    moved = elements * (sizes.grad + 2 * (sizes.master or sizes.param) + 2 * (sizes.first + sizes.second) + sizes.param)
    speed = job.cluster.accelerator.hbm_bytes_s * known.memory
    if layout.optimizer_tier != "device":
        speed = job.cluster.accelerator.needed("host_bytes_s") * known.memory
    return moved / speed


_AXES = ("tp", "cp", "ep", "pp", "dp", HOST_AXIS)
_HALF_HIDDEN = 0.5  # of the gathers of keys and values, and of dispatch to experts: attention and other chunks run beside them


def _doublings(nodes: int) -> float:
    return max(0, nodes - 1).bit_length()
