"""Reads parts of Stateroom's data files, in large pieces and several threads, and believes no byte whose checksum is wrong."""

from __future__ import annotations

import bisect
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..zero.tiers.disk import SECTOR_BYTES, Input, round_up, view_of
from .boxes import box_at
from .container import FRAMING, item_frame
from .crc import crc32
from .flow import LANES, Buffers, in_turn, side_by_side
from .image import BLOCK_BYTES, joined_crc, segments
from .manifest import DamagedError, index_file, read_checked, unpack_bounds

_READ_BYTES = 2 * BLOCK_BYTES
BUFFER_BYTES = _READ_BYTES + 4 * SECTOR_BYTES  # a single part may be a block with header and trailer, and edges are rounded
_GAP_BYTES = 64 << 10  # read over what lies between two pieces rather than ask twice


class Stored(NamedTuple):
    """An item as the index has it: `numel` elements from flat element `start`, at byte `at` of `file`."""

    file: str
    start: int
    numel: int
    at: int
    crcs: list[int]


@dataclass(frozen=True)
class Request:
    """Flat elements [start, start + out.numel()) of the tensor `key`, to be written into `out` [n], cast to its dtype."""

    key: str
    start: int
    out: torch.Tensor


@dataclass
class Segment:
    """A part of an item's data inside one block of a file: read whole and compared before anything of it is used.

    The first part of an item brings the header in front of it along, the last one the trailer behind it.
    """

    key: str
    low: int
    high: int
    crc: int
    dtype: torch.dtype
    header: bytes = b""
    trailer: bytes = b""
    copies: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # byte of the file, destination

    @property
    def begin(self) -> int:
        """First byte that is read."""
        return self.low - len(self.header)

    @property
    def end(self) -> int:
        """First byte behind what is read."""
        return self.high + len(self.trailer)

    def wrong(self, view: memoryview, base: int) -> tuple[int, int, str] | None:
        """Return the first byte range that is not what was written, and whose it is, given the file's bytes from `base` on."""
        if view[self.begin - base : self.low - base] != self.header:
            return self.begin, self.low, f"the header of {self.key!r}"
        if crc32(view[self.low - base : self.high - base]) != self.crc:
            return self.low, self.high, f"data of {self.key!r}"
        if view[self.high - base : self.end - base] != self.trailer:
            return self.high, self.end, f"the trailer of {self.key!r}"
        return None


def segments_of(key: str, shape: Sequence[int], dtype: torch.dtype, item: Stored) -> Iterator[Segment]:
    """Yield the parts of an item, with the bytes that must stand around its data."""
    frame = item_frame(box_at(shape, item.start, item.numel).sizes, dtype)
    stop = item.at + item.numel * dtype.itemsize
    trailer = frame.trailer(joined_crc(item.at, stop, item.crcs)).ljust(FRAMING.after(stop) - stop, b"\0")
    for crc, (low, high) in zip(item.crcs, segments(item.at, stop), strict=True):
        yield Segment(key, low, high, crc, dtype, frame.header if low == item.at else b"", trailer if high == stop else b"")


class Needed:
    """The parts of files that requests need; what several of them need is read once."""

    def __init__(self, folder: Path, buffers: Buffers) -> None:
        self._folder = folder
        self._buffers = buffers
        self._files: dict[str, dict[int, Segment]] = {}

    def add(self, request: Request, items: Iterable[Stored], shape: Sequence[int], dtype: torch.dtype) -> None:
        """Find the parts of a request's items that it needs."""
        size = dtype.itemsize
        stop = request.start + request.out.numel()
        for item in items:
            low, high = max(item.start, request.start), min(item.start + item.numel, stop)
            first, last = (item.at + (edge - item.start) * size for edge in (low, high))
            for part in segments_of(request.key, shape, dtype, item):
                if part.low < last and part.high > first:
                    part = self._files.setdefault(item.file, {}).setdefault(part.low, part)
                    a, b = max(first, part.low), min(last, part.high)
                    at = low - request.start + (a - first) // size
                    part.copies.append((a, request.out[at : at + (b - a) // size]))

    def read(self, lanes: int = 0) -> int:
        """Read all of it into the requests' tensors; return the bytes read.

        Args:
            lanes: pairs of threads that do it; 0 for this thread alone.

        Raises:
            DamagedError: a file is missing or shorter than it was, or its bytes are not those that were written; names
                file, tensor and byte range.
        """
        reads = [(file, batch) for file, parts in sorted(self._files.items()) for batch in batches(sorted(parts.values(), key=_low))]
        with ExitStack() as stack:
            inputs = {file: stack.enter_context(_open(self._folder / file)) for file in self._files}

            def read(one: tuple[str, list[Segment]], buffer: torch.Tensor) -> int:
                return _read_batch(inputs[one[0]], one[1], buffer)

            def use(one: tuple[str, list[Segment]], buffer: torch.Tensor, got: int) -> None:
                _use_batch(inputs[one[0]].path, one[1], buffer, got)

            if lanes and len(reads) > 1:
                side_by_side(reads, read, use, self._buffers, lanes)
            elif reads:
                in_turn(reads, read, use, self._buffers)
        return sum(part.end - part.begin for _, batch in reads for part in batch)


class Reader:
    """The data of one checkpoint directory, found by its manifest."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.buffers = Buffers(BUFFER_BYTES)
        self._indexes: dict[int, dict[str, list[Stored]]] = {}
        self._lock = threading.Lock()

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype in which a tensor is stored."""
        return getattr(torch, self.manifest["tensors"][key]["dtype"])

    # ---- where things are

    @cached_property
    def _places(self) -> dict[str, tuple[tuple[int, ...], int, Sequence[int]]]:
        """Parameter -> (bounds of its unit, its own offset there, the ranks of the unit's intervals)."""
        found = {}
        shapes = self.manifest["parameters"]
        for unit in self.manifest["units"]:
            ranks = unit.get("ranks") or range(self.manifest["world"])
            bounds, offset = unpack_bounds(unit["bounds"], len(ranks)), 0
            for name in unit["names"]:
                found[name] = (bounds, offset, ranks)
                offset += torch.Size(shapes[name]["shape"]).numel()
        return found

    def ranks_with(self, key: str, start: int, stop: int) -> Iterable[int]:
        """Return the ranks whose files hold elements of [start, stop), from the layout alone."""
        home = self.manifest["homes"].get(key)
        if home is not None:
            return [home]
        bounds, offset, ranks = self._places[key if key in self._places else key.rpartition("::")[0]]
        return ranks[bisect.bisect_right(bounds, start + offset) - 1 : bisect.bisect_left(bounds, stop + offset)]

    def index(self, rank: int) -> dict[str, list[Stored]]:
        """Return what `rank` wrote: key -> items in flat order.

        Raises:
            DamagedError: its index is missing or damaged.
        """
        with self._lock:
            if rank not in self._indexes:
                name = index_file(rank)
                content = json.loads(read_checked(self.folder / name, self.manifest["files"][name]["sha256"]))
                self._indexes[rank] = {
                    key: [Stored(content["file"], *item) for item in items] for key, (_, _, items) in content["tensors"].items()
                }
            return self._indexes[rank]

    def stored(self, key: str, start: int, stop: int) -> Iterator[Stored]:
        """Yield the items that hold elements [start, stop) of a tensor, in flat order.

        Raises:
            DamagedError: some of them are in no file.
        """
        at = start
        for rank in self.ranks_with(key, start, stop):
            items = self.index(rank).get(key, ())
            for item in items[max(bisect.bisect_right(items, at, key=lambda item: item.start) - 1, 0) :]:
                if item.start >= stop:
                    break
                if item.start <= at < item.start + item.numel:
                    yield item
                    at = item.start + item.numel
        if at < stop:
            raise DamagedError(f"{self.folder}: elements [{at}, {stop}) of {key!r} are in no file of the checkpoint")

    def fill(self, requests: Iterable[Request]) -> int:
        """Read all requests; return the bytes read.

        Raises:
            DamagedError: something is missing, or not what was written; names file, tensor and byte range.
        """
        needed = Needed(self.folder, self.buffers)
        for request in requests:
            shape = self.manifest["tensors"][request.key]["shape"]
            items = self.stored(request.key, request.start, request.start + request.out.numel())
            needed.add(request, items, shape, self.dtype(request.key))
        return needed.read(LANES)


def _open(path: Path) -> Input:
    try:
        return Input(path)
    except OSError as error:
        raise DamagedError(f"{path} cannot be opened: {error.strerror}; load another tag") from error


def base_of(batch: Sequence[Segment]) -> int:
    """Return the byte of the file at which a batch is read from: the sector that its first part begins in."""
    return batch[0].begin // SECTOR_BYTES * SECTOR_BYTES


def _read_batch(source: Input, batch: Sequence[Segment], buffer: torch.Tensor) -> int:
    base = base_of(batch)
    try:
        return source.read(buffer[: round_up(batch[-1].end - base)], base)
    except OSError as error:
        raise DamagedError(f"{source.path} cannot be read at byte {base}: {error.strerror}; load another tag") from error


def _use_batch(path: Path, batch: Sequence[Segment], buffer: torch.Tensor, got: int) -> None:
    base = base_of(batch)
    view = view_of(buffer)
    for part in batch:
        if base + got < part.end:
            raise DamagedError(f"{path} ends at byte {base + got}, before {part.key!r} at bytes [{part.begin}, {part.end})")
        wrong = part.wrong(view, base)
        if wrong is not None:
            low, high, what = wrong
            raise DamagedError(f"{path} is damaged: bytes [{low}, {high}), {what}, are not what was written; load another tag")
        for at, out in part.copies:
            first = at - base
            out.copy_(buffer[first : first + out.numel() * part.dtype.itemsize].view(part.dtype))


def _low(part: Segment) -> int:
    return part.low


def batches(parts: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Group ascending segments of one file into reads."""
    batch: list[Segment] = []
    for part in parts:
        if batch and (part.end - batch[0].begin > _READ_BYTES or part.begin - batch[-1].end > _GAP_BYTES):
            yield batch
            batch = []
        batch.append(part)
    if batch:
        yield batch
