"""Which slice of which parameter lives on which rank: integer arithmetic that everything which must agree asks."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from ..errors import LayoutError

_ALIGN = 8  # elements; 16 bytes in the narrowest training dtype


@dataclass(frozen=True)
class Extent:
    """One parameter in a unit's flat space: elements [offset, offset + numel)."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @cached_property
    def numel(self) -> int:
        """Number of elements (1 for a scalar parameter)."""
        return prod(self.shape)

    @property
    def end(self) -> int:
        """First element behind this parameter."""
        return self.offset + self.numel


@dataclass(frozen=True)
class Slice:
    """The part of one parameter that lies in an interval of the flat space.

    Elements [start, stop) of the flattened parameter lie at [at, at + stop - start) counted from the interval's start.
    """

    extent: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class Layout:
    """A unit's parameters laid end to end, and the bounds at which ranks cut them.

    Attributes:
        extents: the parameters in flat order.
        bounds: W+1 ascending element offsets; rank r owns [bounds[r], bounds[r+1]).
    """

    extents: tuple[Extent, ...]
    bounds: tuple[int, ...]

    @classmethod
    def even(cls, shapes: Sequence[tuple[str, tuple[int, ...]]], world: int) -> Layout:
        """Cut into `world` equal intervals, padded once at the end."""
        extents = _lay_out(shapes)
        numel = extents[-1].end if extents else 0
        share = -(-numel // world)
        return cls(extents, tuple(rank * share for rank in range(world + 1)))

    @classmethod
    def whole(cls, shapes: Sequence[tuple[str, tuple[int, ...]]], world: int) -> Layout:
        """Cut only between parameters (ragged), so that the largest interval is as small as it can be."""
        extents = _lay_out(shapes)
        return cls(extents, _cut_between(extents, world))

    def __post_init__(self) -> None:
        if list(self.bounds) != sorted(self.bounds) or len(self.bounds) < 2 or self.bounds[0] != 0:
            raise LayoutError(f"bounds must ascend from 0, got {self.bounds}")
        if self.bounds[-1] < self.numel:
            raise LayoutError(f"bounds end at {self.bounds[-1]}, before the last of {self.numel} elements")

    @property
    def world(self) -> int:
        """Number of ranks that share this unit."""
        return len(self.bounds) - 1

    @property
    def numel(self) -> int:
        """Elements of the parameters, without padding."""
        return self.extents[-1].end if self.extents else 0

    @property
    def padded(self) -> int:
        """Elements of the full flat buffer."""
        return self.bounds[-1]

    def interval(self, rank: int) -> tuple[int, int]:
        """Return the elements [start, stop) that `rank` owns, padding included."""
        return self.bounds[rank], self.bounds[rank + 1]

    def slices(self, start: int, stop: int) -> list[Slice]:
        """Return the parameter parts inside [start, stop), in flat order, without padding; empty parameters are left out."""
        found = []
        first = bisect.bisect_right(self._ends, start)
        for index in range(first, len(self.extents)):
            extent = self.extents[index]
            if extent.offset >= stop:
                break
            low, high = max(start, extent.offset), min(stop, extent.end)
            if low < high:
                found.append(Slice(index, low - extent.offset, high - extent.offset, low - start))
        return found

    @cached_property
    def _ends(self) -> list[int]:
        return [extent.end for extent in self.extents]


def flat_order(numels: Sequence[int], groups: Sequence[int]) -> list[int]:
    """Return the order in which a unit lays out its parameters.

    Sizes that keep 16-byte alignment come first, so that odd ones do not push matrices off it; within each kind the
    parameters of one optimizer group lie together, so that a shard is few intervals.
    """
    return sorted(range(len(numels)), key=lambda i: (numels[i] % _ALIGN != 0, groups[i], i))


def _lay_out(shapes: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[Extent, ...]:
    extents, offset = [], 0
    for name, shape in shapes:
        extents.append(Extent(name, tuple(shape), offset))
        offset += prod(shape)
    return tuple(extents)


def _cut_between(extents: Sequence[Extent], world: int) -> tuple[int, ...]:
    """Return bounds at parameter edges with the smallest possible largest interval (binary search over its size)."""
    numels = [extent.numel for extent in extents]
    total = sum(numels)
    low, high = max([*numels, -(-total // world)]), max(total, 1)
    while low < high:
        middle = (low + high) // 2
        if _pieces(numels, middle) <= world:
            high = middle
        else:
            low = middle + 1
    bounds, filled = [0], 0
    for extent in extents:
        if filled + extent.numel > low:
            bounds.append(extent.offset)
            filled = 0
        filled += extent.numel
    bounds += [total] * (world + 1 - len(bounds))
    return tuple(bounds)


def _pieces(numels: Sequence[int], limit: int) -> int:
    count, filled = 1, 0
    for numel in numels:
        if filled + numel > limit:
            count, filled = count + 1, 0
        filled += numel
    return count
