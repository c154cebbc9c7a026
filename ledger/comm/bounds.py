"""From which batch or sequence on communication hides behind compute: the rooflines of published scaling analyses."""

from __future__ import annotations

import math


def minimum_block_tokens(flops_s: float, bytes_s: float) -> float:
    """Return tokens a device must hold so that ring attention hides its key and value blocks: F / B (arXiv:2310.01889)."""
    return flops_s / bytes_s


def minimum_sequence_tokens(flops_s: float, bytes_s: float, blocks: int = 6) -> float:
    """Return the least tokens a device: `blocks` blocks are in memory at once, 6 F / B (arXiv:2310.01889, table 2)."""
    return blocks * minimum_block_tokens(flops_s, bytes_s)


def intensity(flops_s: float, bytes_s: float) -> float:
    """Return FLOPs a device does while its links move one byte: alpha of the rooflines below."""
    return flops_s / bytes_s


def data_parallel_minimum_batch(alpha: float, axes: int = 1) -> float:
    """Return tokens a device from which pure data parallelism or FSDP is bound by compute: alpha / axes."""
    return alpha / axes


def tensor_parallel_limit(alpha: float, ffn: float, axes: int = 1) -> float:
    """Return tensor-parallel ranks beyond which the links bind: axes F / alpha."""
    return axes * ffn / alpha


def mixed_minimum_batch(alpha: float, ffn: float, axes_x: float = 2, axes_y: float = 1) -> float:
    """Return tokens a device below which even the best mix of FSDP and tensor parallelism is bound by the links.

    4 alpha² / (F Mx My), with Mx mesh axes given to FSDP and My to tensor parallelism.
    """
    return 4 * alpha**2 / (ffn * axes_x * axes_y)


def largest_fsdp(batch_tokens: float, devices: float, ffn: float, alpha: float, axes_x: float = 2, axes_y: float = 1) -> float:
    """Return the largest FSDP degree X (the rest is tensor parallel) at which the links still keep up with compute.

    The larger root of alpha F My X² - B F Mx My X + alpha B N Mx = 0; below `mixed_minimum_batch` there is none, and the
    degree where both kinds of traffic are equal is returned.
    """
    inside = (batch_tokens * ffn * axes_x * axes_y) ** 2 - 4 * alpha**2 * ffn * axes_x * axes_y * batch_tokens * devices
    return batch_tokens * axes_x / (2 * alpha) + math.sqrt(max(0.0, inside)) / (2 * alpha * ffn * axes_y)


def optimal_fsdp(batch_tokens: float, devices: float, ffn: float, axes_x: float = 2, axes_y: float = 1) -> float:
    """Return the FSDP degree at which gathering weights and moving activations cost the same: sqrt(B N Mx / (F My))."""
    return math.sqrt(batch_tokens / ffn * axes_x / axes_y * devices)
