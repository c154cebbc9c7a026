"""Payload bytes of each collective in one step, from layout and placement alone."""

from __future__ import annotations

from collections.abc import Sequence

from ..zero.placement import Placement
from .records import UnitRecord

Traffic = dict[tuple[str, str], tuple[int, int]]  # (kind, state) -> (calls, payload bytes)


def predict_traffic(
    units: Sequence[UnitRecord], placement: Placement, world: int, micro_batches: int, *, reduces_every_pass: bool | None = None
) -> Traffic:
    """Return calls and payload bytes of one optimizer step; the payload is the full buffer of a unit.

    An all-reduce is a reduce-scatter and an all-gather. With Psi bytes of parameters and one micro-batch, stages 0, 1
    and 2 move 2 Psi and stage 3 moves 3 Psi, less the root's second gather (Rajbhandari et al., 2020, arXiv:1910.02054).

    Args:
        reduces_every_pass: gradients are reduced after each micro-batch; None: as the placement says.
    """
    found: Traffic = {}
    if world == 1:
        return found

    def add(kind: str, state: str, calls: int, num_bytes: int) -> None:
        before = found.get((kind, state), (0, 0))
        found[kind, state] = (before[0] + calls, before[1] + calls * num_bytes)

    every_pass = placement.reduces_every_pass if reduces_every_pass is None else reduces_every_pass
    for unit in units:
        padded = unit.layout.padded
        if placement.parameters.sharded:
            gathers = micro_batches * (1 if unit.is_root else 2)
            add("all_gather", "parameters", gathers, padded * unit.param_itemsize)
        if not unit.trainable:
            continue
        reductions = micro_batches if every_pass else 1
        add("reduce_scatter", "gradients", reductions, padded * unit.wire_itemsize)
        if not placement.optimizer.sharded:
            add("all_gather", "gradients", reductions, padded * unit.grad_itemsize)
        elif not placement.parameters.sharded:
            add("all_gather", "parameters", 1, padded * unit.param_itemsize)
    return found
