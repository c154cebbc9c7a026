"""Pipelines without ZeRO: which layers each stage's optimizer holds, found from the number and shapes of its states.

A stage's optimizer lists the tied modules of the stage first, then the parameters of its layers in order. A tied module
has a file at its first occurrence only, so a later stage may begin with states whose layer lies in an earlier stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeAlias

from ..pickles import Stored
from .found import Found
from .matching import Unmatched
from .whole import names_for, read_whole

Weights: TypeAlias = "dict[str, Stored]"


@dataclass(frozen=True)
class Stage:
    """The layers whose parameters one stage's optimizer holds: tied ones, then a run of all others."""

    tied: tuple[int, ...]
    run: tuple[int, ...]


def read_stages(optimizers: Sequence[dict[str, Any]], layers: Mapping[int, Weights]) -> list[Found]:
    """Return what each stage holds, under names like `3.weight`; a tied module has the number of its first occurrence.

    Args:
        optimizers: what each stage's model states hold under "optimizer".
        layers: layer -> weights without buffers, in order.
    """
    for most_tied, frozen in ((0, False), (1, False), (2, False), (0, True), (1, True)):
        plans = {plan for tied in combinations(layers, most_tied) for plan in _plans(optimizers, layers, tied, frozen)}
        if len(plans) == 1:
            return [read_whole(optimizer, _held(stage, layers), _any) for optimizer, stage in zip(optimizers, plans.pop(), strict=True)]
        if plans:
            break
    every = {name: stored for weights in layers.values() for name, stored in weights.items()}
    return [_unnamed(optimizer, every) for optimizer in optimizers]


def _any(_name: str, _group: dict[str, Any]) -> bool:
    return True


def _unnamed(optimizer: dict[str, Any], every: Weights) -> Found:
    """Report every state as one that belongs to nobody: an empty optimizer is what no order of weights fits."""
    found = read_whole(optimizer, every, lambda _name, _group: False)
    found.notes.append("which layers lie on which pipeline stage cannot be told from the shapes of the optimizer's states")
    return found


def _plans(
    optimizers: Sequence[dict[str, Any]], layers: Mapping[int, Weights], tied: tuple[int, ...], frozen: bool
) -> Iterator[tuple[Stage, ...]]:
    """Yield the ways to give the layers to the stages when the layers `tied` are tied; two are enough."""
    order = tuple(layer for layer in layers if layer not in tied)
    subsets = [some for size in range(len(tied) + 1) for some in combinations(tied, size)]
    given = 0
    open_: list[tuple[int, tuple[Stage, ...]]] = [(0, ())]
    while open_ and given < 2:
        first, plan = open_.pop()
        if len(plan) == len(optimizers):
            if first == len(order) and all(sum(layer in stage.tied for stage in plan) > 1 for layer in tied):
                given += 1
                yield plan
            continue
        lasts = (len(order),) if len(plan) == len(optimizers) - 1 else range(first, len(order) + 1)
        for held in subsets:
            for last in lasts:
                stage = Stage(held, order[first:last])
                if _fits(optimizers[len(plan)], _held(stage, layers), frozen):
                    open_.append((last, (*plan, stage)))


def _held(stage: Stage, layers: Mapping[int, Weights]) -> Weights:
    return {name: stored for layer in (*stage.tied, *stage.run) for name, stored in layers[layer].items()}


def _fits(optimizer: dict[str, Any], weights: Weights, frozen: bool) -> bool:
    base = optimizer.get("optimizer_state_dict", optimizer)
    count = sum(len(group["params"]) for group in base["param_groups"])
    if optimizer.get("fp32_groups_flat") is None and (len(weights) < count or (len(weights) > count and not frozen)):
        return False
    try:
        names_for(optimizer, weights, _any)
    except Unmatched as why:
        return why.several
    return True
