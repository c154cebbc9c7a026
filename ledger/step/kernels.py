"""Compute of one micro-batch on one rank: products by their sizes, the attention core, and work bound by device memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..flops.layers import seen_keys
from ..job import Job
from ..memory.rank import rank_units
from ..shapes.parts import blocks
from ..shapes.shape import ModelShape
from .constants import Constants

_PASSES = 3.0  # a forward and twice that backward


@dataclass(frozen=True)
class StageWork:
    """Seconds of one micro-batch on a rank of one stage, forward and backward together, without communication."""

    products: float
    memory: float
    recompute: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.products + self.memory + self.recompute

    @property
    def forward(self) -> float:
        """A third of what is not recomputed."""
        return (self.products + self.memory) / _PASSES

    @property
    def backward(self) -> float:
        """The rest, with what is recomputed."""
        return self.seconds - self.forward


def stage_work(job: Job, stage: int, known: Constants) -> StageWork:
    """Return the compute of one micro-batch on a rank of `stage`."""
    products = memory = recompute = 0.0
    layout = job.layout
    for unit in rank_units(job, stage):
        if unit.is_root:
            continue
        own, moved = _layer(job, unit.name, known)
        products += unit.count * own * _PASSES
        memory += unit.count * moved * _PASSES
        if layout.recompute == "full":
            recompute += unit.count * (own + moved)
        elif layout.recompute == "core":
            recompute += unit.count * _core_seconds(job, unit.name, known)
        elif layout.recompute == "selective":
            recompute += unit.count * moved
    if stage == layout.last_stage and job.shape.vocab:
        own, moved = _head(job, known)
        products += own * _PASSES
        memory += moved
    return StageWork(products, memory, recompute)


def _layer(job: Job, name: str, known: Constants) -> tuple[float, float]:
    """Return seconds of one forward of one layer: its products with the attention core, and what memory bounds."""
    peak = job.cluster.accelerator.peak_flops(job.layout.compute)
    tokens = job.layout.micro_batch * job.seq / job.layout.cp
    time = sum(
        2.0 * tokens * flops / (peak * rate)
        for flops, rate in _products(job.shape, name, tokens, job.layout.tp, job.layout.ep, job.layout.etp, known)
    )
    moved = _elementwise(job, name == "mixture layer") / (job.cluster.accelerator.hbm_bytes_s * known.memory)
    return time + _core_seconds(job, name, known), moved


@lru_cache(maxsize=8192)
def _products(shape: ModelShape, name: str, tokens: float, tp: int, ep: int, etp: int, known: Constants) -> tuple[tuple[float, float], ...]:
    """Return (weights a token meets on this rank, share of peak) of each product."""
    block = next(block for block in blocks(shape) if block.name == name)
    found = []
    for part in block.parts:
        if part.kind != "matrix":
            continue
        if part.cut == "ep" and shape.mixture is not None:
            each = tokens * shape.mixture.top_k / shape.mixture.experts * ep  # tokens that one of this rank's experts sees
            rate = known.product * known.experts * _size_rate(each, shape.hidden, shape.mixture.ffn / etp, known)
            found.append((part.numel * part.active / (tp if etp == 1 else etp), rate))
            continue
        ways = tp if part.cut == "tp" else 1
        narrow = part.numel / shape.hidden / ways
        found.append((part.numel / ways, known.product * _size_rate(tokens, shape.hidden, narrow, known)))
    return tuple(found)


def _size_rate(one: float, two: float, three: float, known: Constants) -> float:
    """Return the share of a large product's rate that one of these sides reaches."""
    rate = 1.0
    for side in (one, two, three):
        rate *= side / (side + known.half)
    return rate


def _core_seconds(job: Job, name: str, known: Constants) -> float:
    """Scores and values. The kernel skips what the mask hides, however FLOPs are counted."""
    shape, layout = job.shape, job.layout
    counting = "causal" if shape.causal and name != "encoder layer" else "full"
    narrow = shape.windowed if shape.window is not None and shape.window < job.seq else 0.0
    keys = narrow * seen_keys(job.seq, shape.window, counting) + (1 - narrow) * seen_keys(job.seq, None, counting)
    tokens = layout.micro_batch * job.seq / layout.cp
    if shape.encoder_layers and name != "encoder layer":
        keys += job.seq  # cross attention meets every token of the encoder
    flops = 2.0 * tokens * keys * shape.heads * (shape.head + shape.value_head) / layout.tp
    peak = job.cluster.accelerator.peak_flops("bf16" if layout.compute in ("fp8", "fp4") else layout.compute)
    return flops / (peak * known.core)


def _elementwise(job: Job, mixture: bool) -> float:
    """Return bytes that one layer's forward reads and writes outside of products: norms, residuals, rotary, activation."""
    shape, layout = job.shape, job.layout
    tokens = layout.micro_batch * job.seq / layout.cp
    along = layout.tp if layout.sequence_parallel else 1
    hidden = (2 * 2 + 2 * 3) * shape.hidden / along  # two norms read and write, two residual adds read two and write one
    rotary = 2 * (shape.heads * shape.head + shape.kv * shape.head) / layout.tp
    inner = (3 if shape.gated else 2) * shape.ffn / layout.tp
    if mixture and shape.mixture is not None:
        routed = shape.mixture.top_k * (4 * shape.hidden + (3 if shape.gated else 2) * shape.mixture.ffn) / along
        inner = routed + (3 if shape.gated else 2) * shape.mixture.shared_width / layout.tp
    scores = 0.0 if layout.flash else 4 * job.seq * shape.heads / layout.tp
    return 2.0 * tokens * (hidden + rotary + inner + scores)


def _head(job: Job, known: Constants) -> tuple[float, float]:
    """Return seconds of the head's forward product, and of the loss forward and backward."""
    shape, layout = job.shape, job.layout
    tokens = layout.micro_batch * job.seq / layout.cp
    width = shape.embedding_width or shape.hidden
    rate = known.product * _size_rate(tokens, width, shape.vocab / layout.tp, known)
    peak = job.cluster.accelerator.peak_flops("bf16" if layout.compute in ("fp8", "fp4") else layout.compute)
    product = 2.0 * tokens * width * shape.vocab / layout.tp / (peak * rate) * (1 + shape.mtp)
    logits = 16.0 * tokens * shape.vocab / layout.tp  # written, cast, softmax and gradient: 2 + 4 + 4 + 4 + 2 bytes
    return product, logits / (job.cluster.accelerator.hbm_bytes_s * known.memory)
