"""Where each element of a rank's states lies in its swap files, and which elements are updated together: integers only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

ALIGN = 4096  # elements; a multiple of a drive's sectors in every dtype
GRAIN = 64  # elements; torch's fused CPU kernels round pieces of such lengths as they round the whole (seen on 2.13)


@dataclass(frozen=True)
class Span:
    """Elements [start, stop) of a unit that one optimizer tensor may be cut in; `whole` ones may not be cut."""

    start: int
    stop: int
    whole: bool = False


@dataclass(frozen=True)
class Tile:
    """Elements [start, stop) of a unit's flat space, which lie from element `base` on in every file of the rank."""

    unit: int
    start: int
    stop: int
    base: int

    @property
    def end(self) -> int:
        """First element behind the tile and its padding, in the files."""
        return self.base + padded(self.stop - self.start)

    def at(self, element: int) -> int:
        """Return where an element of the unit lies in the files."""
        return self.base + element - self.start


@dataclass(frozen=True)
class SubGroup:
    """Tiles that lie side by side in the files and are read, updated and written together."""

    tiles: tuple[Tile, ...]

    @property
    def base(self) -> int:
        """First element in the files."""
        return self.tiles[0].base

    @property
    def numel(self) -> int:
        """Elements in the files, padding included."""
        return self.tiles[-1].end - self.base


def padded(numel: int) -> int:
    """Return the next multiple of ALIGN."""
    return -(-numel // ALIGN) * ALIGN


def cut_points(start: int, stop: int, spans: Sequence[Span], limit: int) -> list[int]:
    """Return where to cut [start, stop) so that no piece has more than `limit` elements, if whole spans allow it.

    Cuts inside a span lie a multiple of GRAIN elements from its start.
    """
    points, at = [start], start
    while stop - at > limit:
        wanted = at + limit
        for span in spans:
            if span.start < wanted < span.stop:
                if span.whole:
                    wanted = span.start if span.start > at else span.stop
                else:
                    inside = span.start + (wanted - span.start) // GRAIN * GRAIN
                    wanted = inside if inside > at else min(span.stop, inside + GRAIN)
        if wanted >= stop:
            break
        points.append(wanted)
        at = wanted
    return [*points, stop]


@dataclass
class Space:
    """Lays units into the files of one rank, one behind the other, each cut into tiles of at most `limit` elements.

    A unit's place is final: what is laid later comes behind it.
    """

    limit: int
    tiles: dict[int, tuple[Tile, ...]] = field(default_factory=dict)
    numel: int = 0

    def add(self, unit: int, start: int, stop: int, spans: Sequence[Span] = ()) -> tuple[Tile, ...]:
        """Give elements [start, stop) of a unit their place."""
        points = cut_points(start, stop, sorted(spans, key=lambda span: span.start), self.limit)
        found = []
        for low, high in itertools.pairwise(points):
            if high > low:
                found.append(Tile(unit, low, high, self.numel))
                self.numel = found[-1].end
        self.tiles[unit] = tuple(found)
        return self.tiles[unit]


def sub_groups(tiles: Sequence[Tile], limit: int) -> list[SubGroup]:
    """Put tiles that lie side by side together, up to `limit` elements; a tile that is larger stands alone."""
    groups: list[list[Tile]] = []
    for tile in sorted(tiles, key=lambda tile: tile.base):
        joins = bool(groups) and groups[-1][-1].end == tile.base and tile.end - groups[-1][0].base <= limit
        if joins:
            groups[-1].append(tile)
        else:
            groups.append([tile])
    return [SubGroup(tuple(group)) for group in groups]
