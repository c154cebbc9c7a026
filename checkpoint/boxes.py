"""An interval of a flattened tensor as boxes: the form in which readers of distributed checkpoints know parts of tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Box(NamedTuple):
    """Elements [offsets, offsets + sizes) of a tensor; contiguous in its flattened order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def box_edges(shape: Sequence[int], starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Return [m, k]: where the flat intervals [starts, stops) [m] of tensors of one shape must be cut so that each part is a box.

    The parts ascend, and many are empty: an interval of a tensor with n axes has 2n - 1 at most. From either end it is cut
    at the next edge of a row, then of a matrix, and so on, while the edges from both ends do not cross.
    """
    lows, highs = [starts], [stops]
    row = 1
    for size in reversed(shape[1:]):
        row *= size
        if row == 0:
            break
        low, high = -(-lows[-1] // row) * row, highs[-1] // row * row
        meet = low <= high  # once they cross, the interval lies inside one row of this level, and of every higher one
        lows.append(np.where(meet, low, lows[-1]))
        highs.append(np.where(meet, high, highs[-1]))
    return np.stack([*lows, *reversed(highs)], axis=1)


def box_at(shape: Sequence[int], start: int, numel: int) -> Box:
    """Return the box that is elements [start, start + numel) of a flattened tensor, which must be one."""
    offsets, sizes = [], []
    for size in reversed(shape):
        start, offset = divmod(start, size) if size else (0, 0)
        offsets.append(offset)
        sizes.append(min(numel, size))
        numel = numel // size if size and numel >= size else 1
    return Box(tuple(reversed(offsets)), tuple(reversed(sizes)))


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return the boxes that cover elements [start, stop) of a flattened tensor, in flat order."""
    edges = box_edges(shape, np.array([start]), np.array([stop]))[0].tolist()
    return [box_at(shape, low, high - low) for low, high in itertools.pairwise(edges) if low < high]
