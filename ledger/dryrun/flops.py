"""FLOPs of one torch operation, as torch's own counter gives them, and of the CPU's fused attention, which it leaves out."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

_ATEN = torch.ops.aten
_CPU_ATTENTION = _ATEN._scaled_dot_product_flash_attention_for_cpu
_CPU_ATTENTION_BACKWARD = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward


def flops_of(func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> int:
    """Return the FLOPs of a matrix product, convolution or attention, 0 for everything else.

    Attention counts all s² pairs, and twice that in backward: that its kernel computes the scores again is not counted, here
    as in the rest of the ledger.
    """
    packet = func._overloadpacket
    if packet is _CPU_ATTENTION:
        return int(sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape))
    if packet is _CPU_ATTENTION_BACKWARD:
        return 2 * int(sdpa_flop_count(args[1].shape, args[2].shape, args[3].shape))
    count = flop_registry.get(packet)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))
