"""Checkpoints on storage: their size and how long they take to write or read."""

from __future__ import annotations

from ..memory.states import StateSizes


def checkpoint_bytes(params: float, bytes_per_param: float = 14.0) -> float:
    """Return bytes of a checkpoint: 12 a parameter for fp32 weights and Adam's moments, 14 with 16-bit weights beside them."""
    return params * bytes_per_param


def checkpoint_bytes_of(params: float, sizes: StateSizes) -> float:
    """Return bytes of weights, master weights and moments in their own dtypes; gradients are not saved."""
    return params * (sizes.param + sizes.master + sizes.first + sizes.second)


def transfer_seconds(size: float, bytes_s: float) -> float:
    """Return the time that `size` bytes take at `bytes_s`."""
    return size / bytes_s
