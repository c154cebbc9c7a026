"""What DeepSpeed's estimators print, so that its figures and the ledger's can be set side by side."""

from __future__ import annotations

from dataclasses import dataclass

_FULL = 4  # a model is first built in fp32
_BUFFER = 1.5


@dataclass(frozen=True)
class Estimate:
    """Bytes on one accelerator and on one host."""

    device: float
    host: float


def deepspeed_zero2(
    params: float, gpus_per_node: int, nodes: int = 1, *, cpu_offload: bool, buffer: float = _BUFFER, as_documented: bool = False
) -> Estimate:
    """Return stage 2's estimate: 2 P on a device with offload, 2 P + 18 P / n without.

    Args:
        as_documented: without offload the text of DeepSpeed's page says 4 P + 16 P / n, which its code no longer computes.
    """
    devices = gpus_per_node * nodes
    if cpu_offload:
        return Estimate(2.0 * params, params * max(_FULL * devices, 16) * buffer)
    whole, cut = (4.0, 16.0) if as_documented else (2.0, 18.0)
    return Estimate(whole * params + int(cut * params / devices), params * _FULL * gpus_per_node * buffer)


def deepspeed_zero3(
    params: float,
    largest_layer: float,
    gpus_per_node: int,
    nodes: int = 1,
    *,
    offload_param: bool,
    offload_optimizer: bool,
    zero_init: bool = True,
    buffer: float = _BUFFER,
) -> Estimate:
    """Return stage 3's estimate: the largest layer whole (4 bytes each), and 18 P / n, 2 P / n or nothing beside it."""
    devices, share = gpus_per_node * nodes, 1 / nodes
    layer = _FULL * largest_layer
    if not offload_optimizer:
        device = layer + int(18 * params / devices)
        started = largest_layer if zero_init else params
        return Estimate(device, started * _FULL * gpus_per_node * buffer)
    per_param = 18 if offload_param else 16
    device = layer if offload_param else layer + int(2 * params / devices)
    held = per_param * share if zero_init else max(_FULL * gpus_per_node, per_param * share)
    return Estimate(device, params * held * buffer)
