"""Traffic of a step by mesh axis: which primitive, how often, how many bytes, over which link, and what it can hide behind."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from ..hardware.device import Cluster
from ..job import Job
from ..memory.rank import expert_shard_world, padded, placed_units, rank_units
from ..memory.states import placement_of
from ..pipeline.instructions import home_of
from ..units import dtype_bytes
from .collectives import moved_share


@dataclass(frozen=True)
class Rates:
    """Shares of a link's published bandwidth that collectives reach."""

    link: float = 1.0
    network: float = 1.0


@dataclass(frozen=True)
class Flow:
    """One kind of traffic on one axis, in a step, for one rank.

    Attributes:
        calls: collectives of a step. payload_bytes: of one call, the whole buffer.
        sent_bytes: what this rank sends in a step.
        seconds: of all calls, when nothing else runs.
        crosses: "link" inside the fast domain, "network" beyond it. behind: the compute it can run beside, or "nothing".
    """

    axis: str
    primitive: str
    state: str
    calls: float
    payload_bytes: float
    sent_bytes: float
    seconds: float
    crosses: str
    behind: str


@dataclass(frozen=True)
class Group:
    """Ranks that a collective joins: `inside` of them share a domain, there are `outside` such domains."""

    inside: int
    outside: int

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.inside * self.outside


def group_of(cluster: Cluster, ranks: int, stride: int) -> Group:
    """Return how `ranks` that lie `stride` apart fall into domains; the innermost axes are neighbours."""
    inside = max(1, min(ranks, cluster.domain // stride))
    while ranks % inside:
        inside -= 1
    return Group(inside, ranks // inside)


def seconds_of(cluster: Cluster, group: Group, kind: str, size: float, rates: Rates) -> float:
    """Return the time of one collective of `size` bytes: a ring over the links, and one over the network by every device's port.

    Rings overlap, so the slower of the two counts; steps over the network grow with the logarithm of the domains.
    """
    if group.ranks <= 1 or size <= 0:
        return 0.0
    times = 2.0 if kind == "all_reduce" else 1.0
    inner = times * (group.inside - 1) / group.inside * size / (cluster.link_bytes_s * rates.link)
    if group.outside == 1:
        return inner + times * (group.inside - 1) * cluster.link_latency_s
    port = cluster.network_bytes_s * rates.network * group.inside
    outer = times * (group.outside - 1) / group.outside * size / port
    steps = times * (2 * math.log2(group.outside) + group.inside - 1)
    return max(inner, outer) + steps * cluster.network_latency_s


def flows(job: Job, stage: int | None = None, rates: Rates | None = None) -> list[Flow]:
    """Return the traffic of one rank of a pipeline stage (the first by default) in one step."""
    found = [
        *_tensor_parallel(job, stage or 0, rates or Rates()),
        *_context_parallel(job, stage or 0, rates or Rates()),
        *_expert_parallel(job, stage or 0, rates or Rates()),
        *_pipeline(job, stage or 0, rates or Rates()),
        *_data_parallel(job, stage or 0, rates or Rates()),
    ]
    return [flow for flow in found if flow.calls]


def _flow(job: Job, axis: str, primitive: str, state: str, calls: float, size: float, group: Group, rates: Rates, behind: str) -> Flow:
    time = seconds_of(job.cluster, group, primitive, size, rates)
    crosses = "network" if group.outside > 1 else "link"
    if group.ranks <= 1:
        calls = 0.0
    return Flow(
        axis, primitive, state, calls, size, calls * moved_share(primitive, max(group.ranks, 1)) * size, calls * time, crosses, behind
    )


def _layers(job: Job, stage: int) -> int:
    return sum(unit.count for unit in rank_units(job, stage) if not unit.is_root)


def _tokens(job: Job) -> float:
    return job.layout.micro_batch * job.seq / job.layout.cp


def _tensor_parallel(job: Job, stage: int, rates: Rates) -> list[Flow]:
    """Two all-reduces a layer forward and two backward; with sequence parallelism each is an all-gather and a reduce-scatter,
    and backward gathers the inputs of both branches again for the weights' gradients."""
    layout, shape = job.layout, job.shape
    if layout.tp == 1:
        return []
    group = group_of(job.cluster, layout.tp, 1)
    size = _tokens(job) * shape.hidden * 2
    passes = 3 if layout.recompute == "full" else 2
    calls = 2.0 * passes * _layers(job, stage) * layout.accumulation
    if not layout.sequence_parallel:
        return [_flow(job, "tp", "all_reduce", "activations", calls, size, group, rates, "nothing")]
    again = 2.0 * _layers(job, stage) * layout.accumulation
    return [
        _flow(job, "tp", "all_gather", "activations", calls, size, group, rates, "nothing"),
        _flow(job, "tp", "reduce_scatter", "activations", calls, size, group, rates, "nothing"),
        _flow(job, "tp", "all_gather", "inputs again, for weight gradients", again, size, group, rates, "backward"),
    ]


def _context_parallel(job: Job, stage: int, rates: Rates) -> list[Flow]:
    """Keys and values are gathered in forward and again in backward, and their gradients are reduced."""
    layout, shape = job.layout, job.shape
    if layout.cp == 1:
        return []
    group = group_of(job.cluster, layout.cp, layout.tp)
    width = shape.kv * (shape.head + shape.value_head)
    if shape.latent is not None:
        width = shape.latent.kv_rank + shape.latent.qk_rope
    size = layout.micro_batch * job.seq * width * 2 / (layout.tp if shape.latent is None else 1)
    passes = 3 if layout.recompute == "full" else 2
    layers = _layers(job, stage) * layout.accumulation
    return [
        _flow(job, "cp", "all_gather", "keys and values", passes * layers, size, group, rates, "attention"),
        _flow(job, "cp", "reduce_scatter", "gradients of keys and values", layers, size, group, rates, "attention"),
    ]


def _expert_parallel(job: Job, stage: int, rates: Rates) -> list[Flow]:
    """Tokens go to their experts and back, forward and backward."""
    layout, mixture = job.layout, job.shape.mixture
    if layout.ep == 1 or mixture is None:
        return []
    group = group_of(job.cluster, layout.ep, layout.etp)
    along = layout.tp if layout.sequence_parallel else 1
    size = _tokens(job) / along * mixture.top_k * job.shape.hidden * 2
    mixtures = sum(unit.count for unit in rank_units(job, stage) if unit.experts)
    passes = 3 if layout.recompute == "full" else 2
    calls = 2.0 * passes * mixtures * layout.accumulation
    return [_flow(job, "ep", "all_to_all", "tokens", calls, size, group, rates, "other micro-batches")]


def _pipeline(job: Job, stage: int, rates: Rates) -> list[Flow]:
    """What a stage sends and receives: activations forward and their gradients backward, over each border between its parts and
    others' parts, for every micro-batch. Links work both ways at once, so what arrives costs its sender's time alone."""
    layout = job.layout
    if layout.pp == 1:
        return []
    stride = layout.tp * layout.cp * layout.dp
    group = group_of(job.cluster, 2, stride)
    size = _tokens(job) * job.shape.hidden * (4 if dtype_bytes(layout.compute) >= 4 else 2)
    size /= layout.tp if layout.sequence_parallel else 1
    homes = [home_of(part, layout.pp, vee=layout.vee)[0] for part in range(layout.parts)]
    into = sum(here == stage != before for before, here in itertools.pairwise(homes)) * layout.accumulation
    out = sum(here == stage != after for here, after in itertools.pairwise(homes)) * layout.accumulation
    found = []
    for primitive, state, calls in (
        ("send", "activations", out), ("send", "activation gradients", into),
        ("receive", "activations", into), ("receive", "activation gradients", out),
    ):  # fmt: skip
        flow = _flow(job, "pp", primitive, state, calls, size, group, rates, "other micro-batches")
        found.append(flow if primitive == "send" else replace(flow, sent_bytes=0.0, seconds=0.0, behind="(its sender's)"))
    return found


def _data_parallel(job: Job, stage: int, rates: Rates) -> list[Flow]:
    """As `predict_traffic` counts for the engine: the same calls and padded payloads, for the dense and the expert part."""
    layout, sizes = job.layout, job.layout.sizes
    placement = placement_of(layout.zero)
    found = []
    for name, world, group in _data_groups(job):
        if world * layout.dp_replicate == 1:
            continue
        units = [(unit, unit.experts if name == "experts" else unit.dense) for unit in placed_units(job, stage)]
        units = [(unit, numel) for unit, numel in units if numel]
        reductions = layout.accumulation if placement.reduces_every_pass else 1
        grads = sum(unit.count * padded(numel, world) for unit, numel in units) * layout.wire_bytes
        params = sum(unit.count * padded(numel, world) for unit, numel in units) * sizes.param
        count = sum(unit.count for unit, _ in units)
        if not count:
            continue
        state = "" if name == "dense" else " of experts"
        if world > 1:
            found.append(
                _flow(job, "dp", "reduce_scatter", f"gradients{state}", reductions * count, grads / count, group, rates, "backward")
            )
        if placement.parameters.sharded and world > 1:
            gathers = sum(unit.count * padded(numel, world) * (1 if unit.is_root else 2) for unit, numel in units) * sizes.param
            calls = sum(unit.count * (1 if unit.is_root else 2) for unit, _ in units)
            found.append(
                _flow(
                    job,
                    "dp",
                    "all_gather",
                    f"parameters{state}",
                    layout.accumulation * calls,
                    gathers / calls,
                    group,
                    rates,
                    "forward and backward",
                )
            )
        elif placement.optimizer.sharded and world > 1:
            found.append(_flow(job, "dp", "all_gather", f"parameters{state}", count, params / count, group, rates, "forward"))
        elif world > 1:
            full = grads / layout.wire_bytes * sizes.grad
            found.append(_flow(job, "dp", "all_gather", f"gradients{state}", reductions * count, full / count, group, rates, "backward"))
        if layout.dp_replicate > 1:
            outer = Group(1, layout.dp_replicate)
            own = grads / count / world
            found.append(_flow(job, "dp_replicate", "all_reduce", f"gradients{state}", reductions * count, own, outer, rates, "backward"))
    return found


def _data_groups(job: Job) -> list[tuple[str, int, Group]]:
    """Return (part, ranks that cut it, how they lie): dense states over dp_shard x cp, experts over what ep leaves of it."""
    layout = job.layout
    dense = ("dense", layout.shard_world, group_of(job.cluster, layout.shard_world, layout.tp))
    if job.shape.mixture is None:
        return [dense]
    world = expert_shard_world(job)
    return [dense, ("experts", world, group_of(job.cluster, world, layout.ep * layout.etp))]
