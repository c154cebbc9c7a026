"""Bytes of each state on one rank at rest, from layout and placement alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..zero.layout import Layout
from ..zero.placement import Placement
from .records import OptimizerRecord, UnitRecord

_ADAM = ("exp_avg", "exp_avg_sq")
_STEP_BYTES = 4  # torch keeps the step count as one fp32 scalar per tensor

# optimizer class -> (states as large as the parameter, scalar tensors); options below add to them
_STATES: dict[str, tuple[tuple[str, ...], int]] = {
    "Adam": (_ADAM, 1),
    "AdamW": (_ADAM, 1),
    "SwitchedAdam": (_ADAM, 1),
    "FusedAdam": (_ADAM, 1),
    "DeepSpeedCPUAdam": (_ADAM, 1),
    "NAdam": (_ADAM, 2),
    "RAdam": (_ADAM, 1),
    "Adamax": (("exp_avg", "exp_inf"), 1),
    "Adagrad": (("sum",), 1),
    "DeepSpeedCPUAdagrad": (("sum",), 1),
    "Adadelta": (("square_avg", "acc_delta"), 1),
    "RMSprop": (("square_avg",), 1),
    "Rprop": (("prev", "step_size"), 1),
    "ASGD": (("ax",), 3),
    "Lamb": (_ADAM, 1),
    "FusedLamb": (_ADAM, 1),
    "Muon": (_ADAM, 1),  # groups with use_muon: see below
    "SGD": ((), 0),
    "Lion": (("exp_avg",), 0),
    "FusedLion": (("exp_avg",), 0),
    "DeepSpeedCPULion": (("exp_avg",), 0),
}


def optimizer_states(record: OptimizerRecord) -> tuple[tuple[str, ...], int] | None:
    """Return (names of states as large as the parameter, number of scalar tensors) per tensor, or None when not known."""
    known = _STATES.get(record.name)
    if known is None:
        return None
    names, scalars = known
    options = dict(record.options)
    if record.name == "Muon" and options.get("use_muon"):
        return ("momentum_buffer",), 0
    if options.get("amsgrad"):
        names = (*names, "max_exp_avg_sq")
    if record.name in ("SGD", "RMSprop") and options.get("momentum"):
        names = (*names, "momentum_buffer")
    if record.name == "RMSprop" and options.get("centered"):
        names = (*names, "grad_avg")
    return names, scalars


def predict_optimizer_bytes(record: OptimizerRecord) -> int | None:
    """Return bytes of all optimizer states on this rank once every tensor has been stepped; None for an unknown optimizer."""
    known = optimizer_states(record)
    if known is None:
        return None
    names, scalars = known
    return sum(numel * record.itemsize * len(names) + scalars * _STEP_BYTES for numel in record.run_numels)


def predict_states(
    units: Sequence[UnitRecord], placement: Placement, rank: int, optimizer: Sequence[OptimizerRecord]
) -> Mapping[str, int | None]:
    """Return bytes at rest on `rank` for each state; `optimizer` has a record per parameter group, none: nothing is trained.

    Keys: parameters, gradients, master weights, optimizer states. A state that is sharded over one rank is whole.
    """
    params = grads = masters = 0
    for unit in units:
        params += _resident(unit.layout, rank, placement.parameters.sharded) * unit.param_itemsize
        if not unit.trainable:
            continue
        grads += _resident(unit.layout, rank, placement.gradients.sharded) * unit.grad_itemsize
        if optimizer and unit.master_itemsize is not None:
            masters += _resident(unit.layout, rank, placement.optimizer.sharded) * unit.master_itemsize
    sizes = [predict_optimizer_bytes(record) for record in optimizer]
    states = None if None in sizes else sum(size for size in sizes if size is not None)
    return {"parameters": params, "gradients": grads, "master weights": masters, "optimizer states": states}


def _resident(layout: Layout, rank: int, sharded: bool) -> int:
    low, high = layout.interval(rank)
    return high - low if sharded and layout.world > 1 else layout.padded
