"""Bytes of parameters, gradients and optimizer states per parameter, and what sharding leaves of them on a rank."""

from __future__ import annotations

from dataclasses import dataclass

from ...zero.placement import STAGES, Placement
from ..account import Account, account
from ..problems import LedgerError
from ..units import dtype_bytes


@dataclass(frozen=True)
class StateSizes:
    """Bytes for each parameter.

    Attributes:
        param: what the model computes with.
        grad: what backward writes and accumulates into.
        main_grad: a wider copy that only the optimizer sees; it is sharded as the optimizer is.
        master, first, second: fp32 weights and Adam's two moments; 0 for what an optimizer does without.
    """

    param: float = 2.0
    grad: float = 2.0
    main_grad: float = 0.0
    master: float = 4.0
    first: float = 4.0
    second: float = 4.0

    @property
    def optimizer(self) -> float:
        """Bytes that only the optimizer step reads and writes."""
        return self.main_grad + self.master + self.first + self.second

    @property
    def total(self) -> float:
        """Bytes for each parameter in all: 16, 18 or 20 for the usual mixed precision with Adam."""
        return self.param + self.grad + self.optimizer


def mixed_precision(param: str, grad: str, *, main_grad: bool | None = None) -> StateSizes:
    """Return the sizes that Adam needs: 20 bytes for 16-bit gradients (an fp32 copy is made), 18 for fp32 ones, 16 for all fp32.

    Args:
        main_grad: whether 16-bit gradients are copied to fp32 for the optimizer; by default they are (Megatron-LM), while
            ZeRO's paper counts 16 bytes without the copy.
    """
    param_bytes, grad_bytes = dtype_bytes(param), dtype_bytes(grad)
    copied = (grad_bytes < 4) if main_grad is None else main_grad
    return StateSizes(param_bytes, grad_bytes, 4.0 if copied else 0.0, 4.0 if param_bytes < 4 else 0.0)


def zero_states(
    params: float,
    world: int,
    stage: int,
    sizes: StateSizes | None = None,
    *,
    tp: int = 1,
    pp: int = 1,
    gathered: float = 0.0,
) -> Account:
    """Return bytes of the states on a rank: what ZeRO's `stage` cuts is divided by `world`, all of it by tp and pp.

    Args:
        params: of the whole model.
        sizes: by default 2 + 2 + 12 (arXiv:1910.02054).
        gathered: parameters of the largest unit, which stage 3 has whole while it is in use.

    Raises:
        LedgerError: no such stage.
    """
    placement = placement_of(stage)
    each = sizes or StateSizes()
    share = params / (tp * pp)

    def cut(sharded: bool) -> tuple[float, str]:
        return (1.0 / world, f" / {world:,}") if sharded else (1.0, "")

    per_param, text = cut(placement.parameters.sharded)
    per_grad, grad_text = cut(placement.gradients.sharded)
    per_state, state_text = cut(placement.optimizer.sharded)
    return account(
        f"states on a rank: ZeRO {stage}, {world:,} data-parallel ranks, tp {tp}, pp {pp}",
        "bytes",
        [
            ("parameters", share * each.param * per_param, f"{each.param:g} x {share:,.0f}{text}"),
            ("gradients", share * each.grad * per_grad, f"{each.grad:g} x {share:,.0f}{grad_text}"),
            ("optimizer states", share * each.optimizer * per_state, f"{each.optimizer:g} x {share:,.0f}{state_text}"),
            ("gathered unit", each.param * gathered / tp if placement.parameters.sharded else 0.0, "whole while it is in use"),
        ],
        bytes_per_parameter=f"{each.total:g} = {each.param:g} + {each.grad:g} + {each.optimizer:g}",
    )


def placement_of(stage: int) -> Placement:
    """Return the row of the stage table.

    Raises:
        LedgerError: no such stage.
    """
    if not 0 <= stage < len(STAGES):
        raise LedgerError(f"ZeRO stage {stage} does not exist; it is one of 0 to {len(STAGES) - 1}")
    return STAGES[stage]


def state_bytes(sizes: StateSizes, *, sharded_optimizer: bool, world: int) -> float:
    """Return bytes for each parameter on a rank: the table of Megatron-LM's distributed optimizer, which is ZeRO stage 1."""
    return zero_states(1.0, world, 1 if sharded_optimizer else 0, sizes).total
