"""Ask torch which optimizers have a fused kernel for a device."""

from __future__ import annotations

from collections.abc import Iterable

import torch

# Optimizer class name -> the operator behind its fused=True.
_OPERATORS = {
    "Adam": "aten::_fused_adam_",
    "AdamW": "aten::_fused_adamw_",
    "SGD": "aten::_fused_sgd_",
    "Adagrad": "aten::_fused_adagrad_",
}
_DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS", "hpu": "HPU"}


def has_fused_kernel(class_name: str, device: torch.device) -> bool:
    """Tell whether `torch.optim.<class_name>` has a fused kernel for the device in this build of torch.

    Reads torch's dispatcher (a private call, seen to work on torch 2.11 to 2.13), since the classes only say so by failing.
    """
    operator, key = _OPERATORS.get(class_name), _DISPATCH_KEYS.get(device.type)
    return operator is not None and key is not None and torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)


def can_fuse(class_name: str, tensors: Iterable[torch.Tensor]) -> bool:
    """Tell whether all the tensors are real floating-point ones on devices with a fused kernel for the class."""
    return all(t.is_floating_point() and has_fused_kernel(class_name, t.device) for t in tensors)
