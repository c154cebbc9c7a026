"""A job as the ledger sees it: a shape, a cluster, and the layout that puts one on the other."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from .hardware.device import Cluster
from .memory.drive import DriveOptions
from .memory.states import StateSizes, placement_of
from .memory.tensors import LayerOptions
from .pipeline.formulas import schedule_named
from .pipeline.instructions import home_of
from .pipeline.partition import part_sizes
from .problems import LedgerError
from .shapes.shape import ModelShape
from .units import dtype_bytes

TIERS = ("device", "cpu", "nvme")


@dataclass(frozen=True)
class Layout:
    """Degrees of every axis and where the states rest. The ranks are tp x cp x dp_replicate x dp_shard x pp.

    Attributes:
        vp: chunks of layers on each pipeline stage. schedule: see `pipeline`.
        ep, etp: ranks that share the experts, and the matrices of one expert; they lie over part of dp, cp and tp.
        zero: ZeRO stage; states are cut over dp_shard x cp.
        micro_batch: sequences of one forward of a rank. accumulation: forwards of a step.
        grad: dtype that gradients are accumulated in; wire: dtype they travel in, that of `grad` by default.
        loss_chunks: pieces of the head and loss. prefetch: units gathered ahead of the running one.
        optimizer_tier, parameter_tier: device, cpu or nvme.
        drive: how states go to nvme and come back.
        on_host: ranks compute on CPUs, where whole states are updated in the pieces that ZeRO would cut (see zero/runs.py).
        cut: layers of each part that the model is cut into, in the model's order; () shares them out evenly (`part_sizes`).
    """

    tp: int = 1
    pp: int = 1
    vp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp_shard: int = 1
    dp_replicate: int = 1
    zero: int = 1
    micro_batch: int = 1
    accumulation: int = 1
    recompute: str = "none"
    schedule: str = "1f1b"
    sequence_parallel: bool = True
    param: str = "bf16"
    grad: str = "fp32"
    wire: str | None = None
    master: str | None = "fp32"
    first: str = "fp32"
    second: str = "fp32"
    compute: str = "bf16"
    flash: bool = True
    dropout: bool = False
    loss_chunks: int = 1
    prefetch: int = 1
    optimizer_tier: str = "device"
    parameter_tier: str = "device"
    cut: tuple[int, ...] = ()
    drive: DriveOptions = field(default_factory=DriveOptions)
    on_host: bool = False

    @property
    def vee(self) -> bool:
        """Whether each stage holds two parts, which go down the stages and up again: the first stage has the last part too."""
        return self.pp > 1 and schedule_named(self.schedule).vee

    @property
    def parts(self) -> int:
        """Parts that the model is cut into."""
        return self.pp * (2 if self.vee else self.vp)

    @property
    def last_stage(self) -> int:
        """The stage with the head and the loss."""
        return 0 if self.vee else self.pp - 1

    @property
    def dp(self) -> int:
        """Data-parallel ranks in all."""
        return self.dp_shard * self.dp_replicate

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def shard_world(self) -> int:
        """Ranks that ZeRO cuts the dense states over."""
        return self.dp_shard * self.cp

    @property
    def expert_dp(self) -> int:
        """Ranks with the same experts."""
        return self.ranks // (self.pp * self.ep * self.etp)

    @property
    def sequences(self) -> int:
        """Sequences of a step over all ranks."""
        return self.micro_batch * self.accumulation * self.dp

    @cached_property
    def sizes(self) -> StateSizes:
        """Bytes for each parameter; without a separate master the parameter is its own."""
        master = 0.0 if self.master is None or dtype_bytes(self.master) == dtype_bytes(self.param) else dtype_bytes(self.master)
        return StateSizes(dtype_bytes(self.param), dtype_bytes(self.grad), 0.0, master, dtype_bytes(self.first), dtype_bytes(self.second))

    @property
    def wire_bytes(self) -> float:
        """Bytes of a gradient on the wire."""
        return dtype_bytes(self.wire or self.grad)

    def options(self) -> LayerOptions:
        """Return how a layer is run, for the activation account."""
        return LayerOptions(
            tp=self.tp, sequence_parallel=self.sequence_parallel, cp=self.cp, ep=self.ep, flash=self.flash, dropout=self.dropout,
            recompute=self.recompute, itemsize=4.0 if dtype_bytes(self.compute) >= 4 else 2.0,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return asdict(self)

    def _schedule_words(self) -> str:
        if self.pp == 1:
            return ""
        if self.vp > 1:
            return f" (x{self.vp} interleaved)"
        return "" if self.schedule == "1f1b" else f" ({self.schedule})"

    def words(self) -> str:
        """Return the degrees as people write them."""
        parts = [f"TP {self.tp}", f"PP {self.pp}" + self._schedule_words(), f"CP {self.cp}"]
        dp = f"DP {self.dp}" if self.dp_replicate == 1 else f"DP {self.dp} ({self.dp_replicate} x {self.dp_shard} sharded)"
        if self.ep > 1:
            parts.append(f"EP {self.ep}")
        if self.optimizer_tier != "device":
            dp += f", optimizer on {self.optimizer_tier}"
        if self.parameter_tier != "device":
            dp += f", parameters on {self.parameter_tier}"
        tail = f"ZeRO {self.zero}, micro-batch {self.micro_batch} x {self.accumulation}, recompute {self.recompute}"
        return ", ".join([*(part for part in parts if not part.endswith(" 1")), dp, tail])


@dataclass(frozen=True)
class Job:
    """One training job. `attention` is how FLOPs of attention are counted where a figure is printed."""

    shape: ModelShape
    cluster: Cluster
    layout: Layout
    seq: int
    attention: str = "causal"

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.layout.sequences * self.seq

    def with_layout(self, **changes: Any) -> Job:
        """Return the same job with another layout."""
        return replace(self, layout=replace(self.layout, **changes))


def check(job: Job) -> None:
    """Refuse a job whose sizes do not fit each other.

    Raises:
        LedgerError: every problem, one a line, each with the nearest legal values.
    """
    found = problems(job)
    if found:
        raise LedgerError("\n".join(found))


def problems(job: Job) -> list[str]:
    """Return what does not fit, one a line; nothing when the job can run."""
    shape, cluster, layout, seq = job.shape, job.cluster, job.layout, job.seq
    found: list[str] = []
    if seq < 1:
        found.append(f"a sequence of {seq} tokens; it needs at least 1")
    for name in ("tp", "pp", "vp", "cp", "ep", "etp", "dp_shard", "dp_replicate", "micro_batch", "accumulation", "loss_chunks"):
        if getattr(layout, name) < 1:
            found.append(f"{name} is {getattr(layout, name)}; it must be at least 1")
    if found:
        return found
    placement_of(layout.zero)
    if layout.ranks != cluster.devices:
        found.append(f"the axes make {layout.ranks:,} ranks (tp x cp x dp x pp), the cluster has {cluster.devices:,} devices")
    if layout.tp > cluster.domain:
        found.append(f"tp {layout.tp} leaves the {cluster.domain} devices that fast links join; use at most {cluster.domain}")
    found += _indivisible("attention heads", shape.heads, "tp", layout.tp)
    if shape.latent is None and shape.kv % layout.tp and layout.tp % shape.kv:
        found += _indivisible("key and value heads", shape.kv, "tp", layout.tp)
    if shape.plain_layers:
        found += _indivisible("the MLP's inner size", shape.ffn, "tp", layout.tp)
    if layout.cp > 1:
        found += _indivisible("tokens of a sequence", seq, "2 x cp", 2 * layout.cp)
    if layout.tp > 1 and layout.sequence_parallel:
        found += _indivisible("tokens of a sequence", seq // layout.cp, "tp (sequence parallelism)", layout.tp)
    if layout.pp * layout.vp > shape.layers + 2:  # a chunk at either end may hold the embedding or the head alone
        found.append(f"{shape.layers} layers do not fill pp {layout.pp} x vp {layout.vp} chunks; use at most {shape.layers + 2} chunks")
    if layout.vp > 1 and layout.pp > 1 and layout.accumulation % layout.pp:
        found += _indivisible("micro-batches of a step", layout.accumulation, "pp (interleaved)", layout.pp)
    if layout.vp > 1 and layout.pp == 1:
        found.append("vp above 1 needs pp above 1")
    if layout.cut and (len(layout.cut) != layout.parts or sum(layout.cut) != shape.layers or min(layout.cut) < 0):
        found.append(f"the cut {list(layout.cut)} is not {layout.parts} parts of {shape.layers} layers in all")
    found += _expert_problems(shape, layout)
    for name in ("optimizer_tier", "parameter_tier"):
        if getattr(layout, name) not in TIERS:
            found.append(f"{name} is {getattr(layout, name)!r}; known: {', '.join(TIERS)}")
    if layout.parameter_tier != "device" and layout.zero < 3:
        found.append("parameters rest off the device only in ZeRO stage 3")
    if layout.optimizer_tier != "device" and layout.zero < 1:
        found.append("optimizer states rest off the device from ZeRO stage 1 on")
    return found


def _expert_problems(shape: ModelShape, layout: Layout) -> list[str]:
    if layout.ep == 1:
        return []
    if shape.mixture is None:
        return [f"ep is {layout.ep}, but {shape.name} has no experts; use 1"]
    found = _indivisible("experts", shape.mixture.experts, "ep", layout.ep)
    found += _indivisible("ranks of one pipeline stage", layout.ranks // layout.pp, "ep x etp", layout.ep * layout.etp)
    return found


def _indivisible(what: str, total: int, by: str, parts: int) -> list[str]:
    if total % parts == 0:
        return []
    near = sorted((number for number in range(1, total + 1) if total % number == 0), key=lambda number: (abs(number - parts), number))[:2]
    return [f"{what}: {total} does not divide by {by} = {parts}; nearest legal: {' or '.join(map(str, sorted(near)))}"]


def stage_ranges(layers: int, stages: int, parts: int, cut: tuple[int, ...] = (), *, vee: bool = False) -> list[list[range]]:
    """Return for each stage the numbers of its layers, one range for each of its parts."""
    found: list[list[range]] = [[] for _ in range(stages)]
    start = 0
    for part, size in enumerate(cut or part_sizes(layers, parts)):
        found[home_of(part, stages, vee=vee)[0]].append(range(start, start + size))
        start += size
    return found
