"""LAMB: Adam's direction, scaled for each parameter by the ratio of its norm to the norm of its update."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .base import BatchedOptimizer, check_hyper_parameters, new_step


class Lamb(BatchedOptimizer):
    """LAMB (You et al., 2020, arXiv:1904.00962) with DeepSpeed's bounds on the trust ratio.

    The ratio is taken over a whole parameter, so the optimizer must be given whole parameters, not shards.

    Args:
        params: tensors or groups, as for any torch optimizer.
        lr, betas, eps: as in Adam.
        bias_correction: correct the step size for the zero start of both moments; the norms use uncorrected moments.
        eps_inside_sqrt: add eps to the second moment before the root, not after.
        weight_decay: added to the direction before its norm is taken.
        max_coeff, min_coeff: bounds of the trust ratio.
        fp32_optimizer_states: keep the moments of 16-bit parameters in fp32, else in their dtype.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        fp32_optimizer_states: bool = True,
    ) -> None:
        """Raise ValueError for values out of range."""
        check_hyper_parameters(lr, betas, weight_decay, eps)
        if not 0 <= min_coeff <= max_coeff:
            raise ValueError(f"min_coeff {min_coeff} and max_coeff {max_coeff} are no bounds")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
            "fp32_optimizer_states": fp32_optimizer_states,
        }
        super().__init__(params, defaults)
        self._trust_ratios: list[Tensor] = []

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; return the closure's loss if there is a closure."""
        self._trust_ratios = []
        return super().step(closure)

    def get_lamb_coeffs(self) -> list[float]:
        """Return the trust ratios of the last step, one a parameter that had a gradient."""
        return [float(ratio) for ratio in getattr(self, "_trust_ratios", [])]

    def new_state(self, group: dict[str, Any], param: Tensor) -> dict[str, Any]:
        """Return zero moments and a step counter."""
        zeros = {name: torch.zeros_like(param, memory_format=torch.preserve_format) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": new_step(), **zeros}

    def update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]) -> None:
        """One LAMB step in place."""
        directions = _adam_directions(group, params, grads, states)
        for param, direction, state in zip(params, directions, states, strict=True):
            weight_norm, direction_norm = torch.linalg.vector_norm(param), torch.linalg.vector_norm(direction)
            ratio = (weight_norm / direction_norm).clamp(group["min_coeff"], group["max_coeff"])
            ratio = torch.where((weight_norm != 0) & (direction_norm != 0), ratio, 1.0)  # stays on the device: no wait
            self._trust_ratios.append(ratio)
            param.sub_(direction.mul_(ratio * _step_size(group, state)))


def _adam_directions(group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]) -> list[Tensor]:
    """Advance the moments; return exp_avg / (sqrt(exp_avg_sq) + eps) + weight_decay * param for each parameter."""
    beta1, beta2 = group["betas"]
    means = [state["exp_avg"] for state in states]
    squares = [state["exp_avg_sq"] for state in states]
    torch._foreach_mul_(means, beta1)
    torch._foreach_add_(means, grads, alpha=1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, grads, grads, value=1 - beta2)
    if group["eps_inside_sqrt"]:
        denominators = torch._foreach_add(squares, group["eps"])
        torch._foreach_sqrt_(denominators)
    else:
        denominators = torch._foreach_sqrt(squares)
        torch._foreach_add_(denominators, group["eps"])
    directions = torch._foreach_div(means, denominators)
    torch._foreach_add_(directions, params, alpha=group["weight_decay"])
    return list(directions)


def _step_size(group: dict[str, Any], state: dict[str, Any]) -> float:
    state["step"] += 1
    if not group["bias_correction"]:
        return float(group["lr"])
    step, (beta1, beta2) = float(state["step"]), group["betas"]
    return float(group["lr"]) * math.sqrt(1 - beta2**step) / (1 - beta1**step)
