"""Lion: the sign of an interpolated momentum as the update."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import BatchedOptimizer, check_hyper_parameters


class Lion(BatchedOptimizer):
    """Lion with decoupled weight decay (Chen et al., 2023, arXiv:2302.06675); one state, `exp_avg`, a parameter.

    An element whose momentum and gradient are both 0 stays where it is, as in the paper (sign(0) is 0).

    Args:
        params: tensors or groups, as for any torch optimizer.
        lr: size of the step that each element takes.
        betas: weights of the momentum in the update and in its own running average.
        weight_decay: share of lr by which the weights shrink at each step.
        fp32_optimizer_states: keep the momentum of 16-bit parameters in fp32, else in their dtype.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        """Raise ValueError for values out of range."""
        check_hyper_parameters(lr, betas, weight_decay)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "fp32_optimizer_states": fp32_optimizer_states}
        super().__init__(params, defaults)

    def new_state(self, group: dict[str, Any], param: Tensor) -> dict[str, Any]:
        """Return a zero momentum."""
        return {"exp_avg": torch.zeros_like(param, memory_format=torch.preserve_format)}

    def update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]) -> None:
        """One Lion step in place."""
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        momenta = [state["exp_avg"] for state in states]
        direction = torch._foreach_mul(momenta, beta1)
        torch._foreach_add_(direction, grads, alpha=1 - beta1)
        torch._foreach_sign_(direction)
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_add_(params, direction, alpha=-lr)
        torch._foreach_mul_(momenta, beta2)
        torch._foreach_add_(momenta, grads, alpha=1 - beta2)
