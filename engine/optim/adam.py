"""Adam with the switches that DeepSpeed configs have and torch's classes lack: no bias correction, fp32 states of 16-bit weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from .base import BatchedOptimizer, check_hyper_parameters, new_step
from .fused import can_fuse


def adam_update(
    group: dict[str, Any],
    params: list[Tensor],
    grads: list[Tensor],
    states: list[dict[str, Any]],
) -> None:
    """One Adam step (Kingma and Ba, 2015, arXiv:1412.6980) in place, by torch's kernels, fused where there is one.

    `group` holds lr, betas, eps, weight_decay and adam_w_mode (decoupled decay, arXiv:1711.05101), and may hold
    bias_correction, amsgrad, maximize and fused.
    """
    fused = group.get("fused")
    if fused is None:
        fused = can_fuse("Adam", params)
    for state in states:
        if fused and state["step"].device != params[0].device:
            state["step"] = state["step"].to(params[0].device)
    steps = [state["step"] for state in states]
    if not group.get("bias_correction", True):
        # The correction 1 - beta ** step is exactly 1 at infinity, so torch's kernels serve here too.
        torch._foreach_add_(steps, 1.0)
        steps = [torch.full_like(step, torch.inf) for step in steps]
    amsgrad = group.get("amsgrad", False)
    adam(
        params,
        grads,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [state["max_exp_avg_sq"] for state in states] if amsgrad else [],
        steps,
        foreach=not fused,
        fused=fused,
        amsgrad=amsgrad,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group.get("maximize", False),
        decoupled_weight_decay=group["adam_w_mode"],
    )


def new_adam_state(param: Tensor, amsgrad: bool = False) -> dict[str, Any]:
    """Return zero moments like `param` and a step counter, under torch's names."""
    moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if amsgrad else ("exp_avg", "exp_avg_sq")
    return {"step": new_step(), **{name: torch.zeros_like(param, memory_format=torch.preserve_format) for name in moments}}


class SwitchedAdam(BatchedOptimizer):
    """Adam or AdamW by `adam_w_mode`, with or without bias correction.

    Args:
        params: tensors or groups, as for any torch optimizer.
        lr, betas, eps, weight_decay, amsgrad, maximize: as in torch.optim.Adam.
        adam_w_mode: decay the weights themselves, not through the gradient.
        bias_correction: divide the moments by 1 - beta ** step.
        fp32_optimizer_states: keep the moments of 16-bit parameters in fp32, else in their dtype.
        fused: force torch's fused kernel on or off; None takes it where there is one.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        fp32_optimizer_states: bool = True,
        maximize: bool = False,
        fused: bool | None = None,
    ) -> None:
        """Raise ValueError for values out of range."""
        check_hyper_parameters(lr, betas, weight_decay, eps)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "adam_w_mode": adam_w_mode,
            "bias_correction": bias_correction,
            "fp32_optimizer_states": fp32_optimizer_states,
            "maximize": maximize,
            "fused": fused,
        }
        super().__init__(params, defaults)

    def new_state(self, group: dict[str, Any], param: Tensor) -> dict[str, Any]:
        """Return zero moments and a step counter."""
        return new_adam_state(param, group["amsgrad"])

    def update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]) -> None:
        """One Adam step in place."""
        adam_update(group, params, grads, states)
