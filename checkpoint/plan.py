"""What each rank writes and at which byte, from layouts alone: integer arithmetic without tensors and without messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from ..zero.layout import Layout, Slice
from .boxes import box_at, box_edges

SEPARATOR = "::"  # between a parameter's name and that of one of its optimizer states


class Piece(NamedTuple):
    """Flat elements [start, stop) of the tensor `key` [shape], which one rank writes."""

    key: str
    shape: tuple[int, ...]
    start: int
    stop: int
    itemsize: int


class Item(NamedTuple):
    """A box of a tensor in a file: `numel` elements from flat element `start`; their first byte is byte `at` of the file."""

    key: str
    sizes: tuple[int, ...]
    start: int
    numel: int
    itemsize: int
    at: int

    @property
    def end(self) -> int:
        """First byte behind the data."""
        return self.at + self.numel * self.itemsize


class Framing(NamedTuple):
    """What the container puts around the data of an item, and where items may start."""

    header_bytes: Callable[[int], int]  # by number of axes
    trailer_bytes: int
    align: int
    limit_bytes: int

    def after(self, data_end: int) -> int:
        """Return where the item behind one whose data ends at `data_end` starts."""
        return -(-(data_end + self.trailer_bytes) // self.align) * self.align


def data_file(rank: int) -> str:
    """Return the name of the file that `rank` writes, as torch.distributed.checkpoint names them."""
    return f"__{rank}_0.distcp"


def state_key(name: str, state: str) -> str:
    """Return the key under which a parameter's optimizer state is stored."""
    return f"{name}{SEPARATOR}{state}"


def own_pieces(layout: Layout, rank: int, suffix: str, itemsize: int) -> Iterator[tuple[Slice, Piece]]:
    """Yield what `rank` writes of one state of a unit: its interval of each parameter.

    Args:
        suffix: what is added to the parameter's name; empty for the parameter itself.
        itemsize: bytes of an element.
    """
    for part in layout.slices(*layout.interval(rank)):
        extent = layout.extents[part.extent]
        yield part, Piece(extent.name + suffix, extent.shape, part.start, part.stop, itemsize)


def place(pieces: Sequence[Piece], framing: Framing) -> list[Item]:
    """Lay pieces out in a file one behind the other, each as the boxes it consists of."""
    numbers = {shape: number for number, shape in enumerate(dict.fromkeys(piece.shape for piece in pieces))}
    columns = Columns(
        np.zeros(len(pieces), dtype=np.int64),
        np.array([numbers[piece.shape] for piece in pieces], dtype=np.int64),
        *(np.array([piece[field] for piece in pieces], dtype=np.int64) for field in (2, 3, 4)),
    )
    placed = place_columns(columns, list(numbers), framing)
    rows = zip(placed.piece.tolist(), placed.start.tolist(), placed.numel.tolist(), placed.at.tolist(), strict=True)
    return [
        Item(pieces[of].key, box_at(pieces[of].shape, start, numel).sizes, start, numel, pieces[of].itemsize, at)
        for of, start, numel, at in rows
    ]


# ---- many at a time


@dataclass(frozen=True)
class Columns:
    """Pieces of many files as columns [m], ordered by file: number of the file and of the shape, and the piece's numbers."""

    file: np.ndarray
    shape: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    itemsize: np.ndarray


@dataclass(frozen=True)
class Placed:
    """Items as columns [k], in the order of their pieces: number of the piece, flat start, elements, byte of the data."""

    piece: np.ndarray
    start: np.ndarray
    numel: np.ndarray
    at: np.ndarray


def place_columns(columns: Columns, shapes: Sequence[tuple[int, ...]], framing: Framing) -> Placed:
    """Lay pieces out in their files one behind the other, each as the boxes it consists of."""
    piece, start, stop = _cut_long(columns, shapes, framing.limit_bytes)
    piece, start, stop = _cut_to_boxes(columns.shape[piece], shapes, piece, start, stop)
    lead = np.array([framing.header_bytes(len(shape)) for shape in shapes], dtype=np.int64)[columns.shape[piece]]
    num_bytes = (stop - start) * columns.itemsize[piece]
    whole = -(-(lead + num_bytes + framing.trailer_bytes) // framing.align) * framing.align
    ends = np.cumsum(whole)
    file = columns.file[piece]
    first = np.searchsorted(file, file)  # the first item of the same file
    return Placed(piece, start, stop - start, ends - whole - (ends - whole)[first] + lead)


def _cut_long(columns: Columns, shapes: Sequence[tuple[int, ...]], limit_bytes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut pieces that are longer than an item may be, between rows where rows are short enough."""
    limits = limit_bytes // columns.itemsize
    long = np.flatnonzero(columns.stop - columns.start > limits)
    edges = {
        int(number): _edges(shapes[columns.shape[number]], columns.start[number], columns.stop[number], limits[number]) for number in long
    }
    if not edges:
        return np.arange(len(columns.start)), columns.start, columns.stop
    parts = np.ones(len(columns.start), dtype=np.int64)
    parts[long] = [len(edges[number]) - 1 for number in long.tolist()]
    piece = np.repeat(np.arange(len(parts)), parts)
    start, stop = columns.start[piece], columns.stop[piece]
    firsts = np.cumsum(parts) - parts
    for number, cuts in edges.items():
        at = slice(firsts[number], firsts[number] + parts[number])
        start[at], stop[at] = cuts[:-1], cuts[1:]
    return piece, start, stop


def _edges(shape: tuple[int, ...], start: int, stop: int, limit: int) -> list[int]:
    rows = [prod(shape[axis:]) for axis in range(1, len(shape) + 1)]
    row = next(row for row in rows if row <= limit)
    step = limit // row * row
    first = -(-start // step) * step
    return [start, *range(first + (step if first == start else 0), stop, step), stop]


def _cut_to_boxes(
    shape_of: np.ndarray, shapes: Sequence[tuple[int, ...]], piece: np.ndarray, start: np.ndarray, stop: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut pieces where they must be cut to be boxes; the order stays."""
    width = 2 * max((len(shape) for shape in shapes), default=1)
    edges = np.repeat(stop[:, None], max(width, 2), axis=1)  # what is not needed is an empty part at the end
    edges[:, 0] = start
    for number, shape in enumerate(shapes):
        rows = np.flatnonzero(shape_of == number)
        found = box_edges(shape, start[rows], stop[rows])
        edges[rows, : found.shape[1]] = found
    filled = edges[:, :-1] < edges[:, 1:]
    return np.repeat(piece, filled.sum(axis=1)), edges[:, :-1][filled], edges[:, 1:][filled]


def every_slice(layout: Layout) -> Iterator[tuple[int, int, int, int]]:
    """Yield (rank, number of the parameter, start, stop) of what each rank writes of a unit, in one sweep over all ranks."""
    bounds, rank = layout.bounds, 0
    for number, extent in enumerate(layout.extents):
        low, offset, end = extent.offset, extent.offset, extent.end
        while low < end:
            while bounds[rank + 1] <= low:
                rank += 1
            high = min(end, bounds[rank + 1])
            yield rank, number, low - offset, high - offset
            low = high


def place_all(layouts: Sequence[Layout], itemsizes: Sequence[int], framing: Framing) -> tuple[Columns, Placed]:
    """Return what every rank writes where, when each parameter has as many states as there are `itemsizes`.

    What `place` gives for each rank alone, for all of them at once: for tests and predictions. No rank needs it to save.
    """
    shapes: dict[tuple[int, ...], int] = {}
    rows = []
    for layout in layouts:
        numbers = [shapes.setdefault(extent.shape, len(shapes)) for extent in layout.extents]
        rows += [(rank, numbers[number], start, stop) for rank, number, start, stop in every_slice(layout)]
    table = np.array(rows, dtype=np.int64).reshape(-1, 4)
    table = table[np.argsort(table[:, 0], kind="stable")]
    counts = np.bincount(table[:, 0], minlength=layouts[0].world)
    firsts = np.cumsum(counts) - counts
    order = np.concatenate([np.tile(np.arange(first, first + count), len(itemsizes)) for first, count in zip(firsts, counts, strict=True)])
    sizes = np.concatenate([np.repeat(np.array(itemsizes, dtype=np.int64), count) for count in counts])
    file, shape, start, stop = table[order].T
    columns = Columns(file, shape, start, stop, sizes)
    return columns, place_columns(columns, list(shapes), framing)
