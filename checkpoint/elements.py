"""Where the elements of one state lie: intervals of stored tensors, chained, joined or averaged; read piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from . import archive
from .pickles import Stored


class Elements(Protocol):
    """A flat, row-major sequence of elements in files. Small and immutable; several threads may fill from one at a time."""

    @property
    def numel(self) -> int:
        """Number of elements."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which they are stored."""

    def fill(self, out: torch.Tensor, start: int) -> None:
        """Write the elements from `start` on into `out`: 1-D, contiguous, on the CPU, of this dtype."""

    def places(self) -> Iterator[tuple[str, int]]:
        """Yield (file, number of elements in it) in order."""


def read(elements: Elements, start: int = 0, stop: int | None = None) -> torch.Tensor:
    """Return elements [start, stop), 1-D on the CPU; nothing else is allocated on the way, as long as intervals suffice."""
    out = torch.empty((elements.numel if stop is None else stop) - start, dtype=elements.dtype)
    if out.numel():
        elements.fill(out, start)
    return out


@dataclass(frozen=True)
class Whole:
    """All elements of one stored tensor."""

    stored: Stored

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stored.numel

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which they are stored."""
        return self.stored.dtype

    def fill(self, out: torch.Tensor, start: int) -> None:
        """Write the elements from `start` on into `out`."""
        archive.fill(out, self.stored, start)

    def places(self) -> Iterator[tuple[str, int]]:
        """Yield (file, number of elements in it)."""
        yield self.stored.storage.file, self.numel


@dataclass(frozen=True)
class Link:
    """Elements [start, start + numel) of something."""

    of: Elements
    start: int
    numel: int


@dataclass(frozen=True)
class Chain:
    """Intervals, one after another."""

    links: tuple[Link, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(link.numel for link in self.links)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first interval."""
        return self.links[0].of.dtype

    def fill(self, out: torch.Tensor, start: int) -> None:
        """Write the elements from `start` on into `out`; only the intervals that overlap are read."""
        at, stop = 0, start + out.numel()
        for link in self.links:
            first, last = max(start - at, 0), min(stop - at, link.numel)
            if first < last:
                _fill_as(link.of, out[at + first - start : at + last - start], link.start + first)
            at += link.numel

    def places(self) -> Iterator[tuple[str, int]]:
        """Yield (file, number of elements in it) in order."""
        for link in self.links:
            for file, _ in link.of.places():
                yield file, link.numel


@dataclass(frozen=True)
class Joined:
    """Slices that ranks hold of one tensor, joined along a dimension that is not the first.

    `widths[k][r]` is how many positions along `dim` rank r holds of sub-tensor k: a fused tensor has several sub-tensors,
    each cut over all ranks, so that the ranks' slices interleave.
    """

    parts: tuple[Elements, ...]
    shapes: tuple[tuple[int, ...], ...]
    dim: int
    widths: tuple[tuple[int, ...], ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(part.numel for part in self.parts)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first slice."""
        return self.parts[0].dtype

    def fill(self, out: torch.Tensor, start: int) -> None:
        """Write the elements from `start` on into `out`; only the rows of the leading dimensions that hold them are read."""
        inner, stop = _product(self.shapes[0][self.dim + 1 :]), start + out.numel()
        row = inner * sum(map(sum, self.widths))
        first, last = start // row, -(-stop // row)
        slices = []
        for part, shape in zip(self.parts, self.shapes, strict=True):
            step = shape[self.dim] * inner
            slices.append(read(part, first * step, last * step).view(last - first, shape[self.dim], inner))
        offsets, pieces = [0] * len(slices), []
        for widths in self.widths:
            for rank, width in enumerate(widths):
                pieces.append(slices[rank].narrow(1, offsets[rank], width))
                offsets[rank] += width
        out.copy_(torch.cat(pieces, dim=1).flatten()[start - first * row : stop - first * row])

    def places(self) -> Iterator[tuple[str, int]]:
        """Yield (file, number of elements in it) in order of ranks."""
        for part in self.parts:
            yield from part.places()


@dataclass(frozen=True)
class Averaged:
    """Copies that ranks hold of one tensor and that may have drifted apart: their mean."""

    parts: tuple[Elements, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.parts[0].numel

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first copy."""
        return self.parts[0].dtype

    def fill(self, out: torch.Tensor, start: int) -> None:
        """Write the elements from `start` on into `out`."""
        stop = start + out.numel()
        total = read(self.parts[0], start, stop)
        for part in self.parts[1:]:
            total += read(part, start, stop)
        out.copy_(total / len(self.parts))

    def places(self) -> Iterator[tuple[str, int]]:
        """Yield (file, number of elements in it) of each copy."""
        for part in self.parts:
            yield from part.places()


def chained(links: Sequence[Link]) -> Elements:
    """Return one sequence made of intervals; what is only one whole thing is returned as it is."""
    links = [link for link in links if link.numel] or list(links[:1])
    if len(links) == 1 and links[0].start == 0 and links[0].numel == links[0].of.numel:
        return links[0].of
    return Chain(tuple(links))


def joined(parts: Sequence[Elements], shapes: Sequence[tuple[int, ...]], dim: int, widths: Sequence[Sequence[int]]) -> Elements:
    """Return the tensor whose slices along `dim` the ranks hold; see `Joined` for `widths`."""
    if dim:
        return Joined(tuple(parts), tuple(shapes), dim, tuple(map(tuple, widths)))
    inner = _product(shapes[0][1:])
    links, offsets = [], [0] * len(parts)
    for sub in widths:
        for rank, width in enumerate(sub):
            links.append(Link(parts[rank], offsets[rank] * inner, width * inner))
            offsets[rank] += width
    return chained(links)


def _fill_as(elements: Elements, out: torch.Tensor, start: int) -> None:
    """Fill `out`, which may be of another dtype than the elements are stored in."""
    if elements.dtype == out.dtype:
        elements.fill(out, start)
    else:
        out.copy_(read(elements, start, start + out.numel()))


def _product(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
