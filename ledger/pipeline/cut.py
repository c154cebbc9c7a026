"""Where the engine cuts a model of this shape into stages: the partition that a config asks for, by the parameters of its layers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ...errors import ConfigError
from ..problems import LedgerError
from ..shapes.parts import blocks
from ..shapes.shape import ModelShape
from . import partition


def cut_of(shape: ModelShape, method: str | Sequence[int], stages: int, parts: int) -> tuple[int, ...]:
    """Return layers of each part as `pipeline.split` cuts an ordinary model; () where that shares them out evenly.

    What stands before and behind the layers weighs on the first and the last part. A `PipelineModule` with a list of its own
    may be cut otherwise.

    Args:
        method: `pipeline.partition`: best, uniform, memory, flops, type:PATTERN, or sizes or bounds.

    Raises:
        LedgerError: fewer layers than parts, or sizes that do not cover them.
    """
    try:
        bounds = _bounds(shape, method, parts)
    except ConfigError as error:
        raise LedgerError(f"pipeline.partition with {stages} stages: {error}") from None
    sizes = tuple(high - low for low, high in itertools.pairwise(bounds))
    return () if list(sizes) == partition.part_sizes(shape.layers, parts) else sizes


def _bounds(shape: ModelShape, method: str | Sequence[int], parts: int) -> list[int]:
    if not isinstance(method, str):
        return partition.explicit(method, shape.layers, parts)
    kind = method.partition(":")[0].lower()
    if kind == "uniform":
        return partition.uniform(shape.layers, parts)
    if kind == "type":  # every layer is of the type that is asked for, as far as a shape knows
        return partition.balanced([1.0] * shape.layers, parts)
    layers, before, after = _weights(shape, matrices=kind == "flops")
    sums = [0.0, *itertools.accumulate(layers)]

    def cost(part: int, start: int, stop: int) -> float:
        return sums[stop] - sums[start] + (before if part == 0 else 0.0) + (after if part == parts - 1 else 0.0)

    return partition.lightest(cost, shape.layers, parts)


def _weights(shape: ModelShape, *, matrices: bool) -> tuple[list[float], float, float]:
    """Return what each layer weighs, what stands before the layers, and what stands behind."""
    weight = {
        block.name: float(sum(part.numel for part in block.parts if part.kind == "matrix" or not matrices)) for block in blocks(shape)
    }
    kinds = ["mixture layer" if shape.is_mixture(index) else "layer" for index in range(shape.layers)]
    return [weight[kind] for kind in kinds], weight.get("embedding", 0.0), weight.get("head", 0.0)
