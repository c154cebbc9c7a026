"""Optimizers under DeepSpeed's class names and signatures, without compiled code of our own."""

from __future__ import annotations

from typing import Any

import torch

from .adam import SwitchedAdam
from .base import HALF_DTYPES, as_groups
from .fused import can_fuse
from .lamb import Lamb
from .lion import Lion


class FusedAdam(SwitchedAdam):
    """Adam by torch's fused kernel where there is one; moments have the dtype of their parameters.

    `amsgrad` works here. `set_grad_none` False makes `zero_grad()` fill gradients with zeros.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        """Raise ValueError for values out of range."""
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            adam_w_mode=adam_w_mode,
            bias_correction=bias_correction,
            fp32_optimizer_states=False,
        )
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, or fill them with zeros."""
        super().zero_grad(getattr(self, "set_grad_none", True) if set_to_none is None else set_to_none)


class DeepSpeedCPUAdam(SwitchedAdam):
    """Adam for parameters in host memory, by torch's fused CPU kernel; it also takes parameters on other devices."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        """Raise ValueError for values out of range."""
        super().__init__(
            model_params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            adam_w_mode=adamw_mode,
            bias_correction=bias_correction,
            fp32_optimizer_states=fp32_optimizer_states,
        )


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Adagrad by torch's fused kernel where there is one; the sum of squares has the dtype of its parameter."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        """Raise ValueError for `amsgrad`, and for 16-bit parameters unless their sums may be 16-bit too."""
        if amsgrad:
            raise ValueError("DeepSpeedCPUAdagrad: Adagrad has no AMSGrad variant")
        groups = as_groups(model_params)
        tensors = [item[1] if isinstance(item, tuple) else item for group in groups for item in group["params"]]
        if fp32_optimizer_states and any(t.dtype in HALF_DTYPES for t in tensors):
            raise ValueError("DeepSpeedCPUAdagrad: give fp32 parameters, or fp32_optimizer_states=False for sums in 16 bit")
        super().__init__(groups, lr=lr, eps=eps, weight_decay=weight_decay, fused=can_fuse("Adagrad", tensors) or None)


class FusedLion(Lion):
    """Lion; the momentum has the dtype of its parameter. `set_grad_none` False makes `zero_grad()` fill with zeros."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        """Raise ValueError for values out of range."""
        super().__init__(params, lr, betas, weight_decay, fp32_optimizer_states=False)
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, or fill them with zeros."""
        super().zero_grad(getattr(self, "set_grad_none", True) if set_to_none is None else set_to_none)


class DeepSpeedCPULion(Lion):
    """Lion for parameters in host memory; it also takes parameters on other devices."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        """Raise ValueError for values out of range."""
        super().__init__(model_params, lr, betas, weight_decay, fp32_optimizer_states)


class FusedLamb(Lamb):
    """LAMB. Clipping and AMSGrad are not part of it: `max_grad_norm` and `amsgrad` must keep their defaults."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        """Raise ValueError for values out of range, `amsgrad` and `max_grad_norm`."""
        if amsgrad or max_grad_norm:
            raise ValueError("FusedLamb: amsgrad is not supported, and clipping is the config's gradient_clipping, not max_grad_norm")
        super().__init__(params, lr, bias_correction, betas, eps, eps_inside_sqrt, weight_decay, max_coeff, min_coeff)
