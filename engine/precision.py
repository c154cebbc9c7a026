"""From the config's precision blocks to dtypes of states, a loss scale, and the context of the forward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..zero.model import Precision
from .loss_scale import DynamicLossScale, LossScale, StaticLossScale

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def dtype_named(name: str | None, default: torch.dtype) -> torch.dtype:
    """Return the dtype that a config names."""
    return default if name is None else DTYPES[name]


def state_dtypes(config: Any) -> Precision:
    """Return the dtype of each state.

    Low-precision weights have fp32 masters, fp32 accumulation and fp32 reduction unless the config says otherwise, so
    that many small gradients are not lost.
    """
    compute = torch.float16 if config.fp16.enabled else torch.bfloat16 if config.bf16.enabled else None
    pure = config.fp16.fp16_master_weights_and_grads if config.fp16.enabled else config.bf16.bf16_master_weights_and_grads
    if compute is None:
        pure = False
    accumulate = dtype_named(config.data_types.grad_accum_dtype, compute if pure and compute is not None else torch.float32)
    wire = dtype_named(config.communication_data_type, accumulate)
    return Precision(compute=compute, master=None if pure else torch.float32, accumulate=accumulate, wire=wire)


def scales_loss(config: Any) -> bool:
    """Return whether gradients are fp16 somewhere on their way, so that the loss needs a scale."""
    return config.fp16.enabled or (config.torch_autocast.enabled and config.torch_autocast.dtype == "fp16")


def loss_scale(config: Any) -> LossScale:
    """Return the loss scale: dynamic or fixed for fp16, 1 otherwise."""
    if not scales_loss(config):
        return StaticLossScale(1.0)
    fp16 = config.fp16
    if fp16.loss_scale:
        return StaticLossScale(fp16.loss_scale)
    return DynamicLossScale(
        initial_scale_power=fp16.initial_scale_power,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        min_scale=fp16.min_loss_scale or 1,
    )


def forward_context(config: Any, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context that the forward runs in."""
    if not config.torch_autocast.enabled:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype_named(config.torch_autocast.dtype, torch.bfloat16))
