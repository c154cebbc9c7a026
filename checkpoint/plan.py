"""What each rank writes and at which byte, from layouts alone: integer arithmetic without tensors and without messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import NamedTuple

from ..zero.layout import Layout, Slice
from .boxes import boxes

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


def place(pieces: Iterable[Piece], framing: Framing) -> list[Item]:
    """Lay pieces out in a file one behind the other, each as the boxes it consists of."""
    items: list[Item] = []
    at = 0
    for key, shape, start, stop, itemsize in pieces:
        lead = framing.header_bytes(len(shape))
        for _, sizes in boxes(shape, start, stop, framing.limit_bytes // itemsize):
            numel = prod(sizes)
            items.append(Item(key, sizes, start, numel, itemsize, at + lead))
            start += numel
            at = framing.after(at + lead + numel * itemsize)
    return items
