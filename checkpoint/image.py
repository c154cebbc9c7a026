"""The content of a rank's data file, made piece by piece from the tensors and summed on the way to the disk."""

from __future__ import annotations

import bisect
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from ..zero.tiers.disk import Output, aligned_buffer, round_up, view_of
from ..zero.tiers.home import Stored
from .container import FRAMING, ItemFrame, item_frame
from .crc import combine, crc32
from .plan import Item
from .workers import Workers

BLOCK_BYTES = 4 << 20  # data has a checksum for each aligned block of its file, so that parts can be read and verified
CHUNK_BYTES = 2 * BLOCK_BYTES  # of one write


def segments(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cut a byte range of a file at the edges of its blocks."""
    while start < stop:
        end = min(stop, (start // BLOCK_BYTES + 1) * BLOCK_BYTES)
        yield start, end
        start = end


class Image:
    """A data file to be: where each item lies, and which tensor it is.

    Args:
        items: as `plan.place` laid them out.
        tensors: for each item its elements, flat and contiguous, on any device, or what reads them from a drive.
    """

    def __init__(self, items: Sequence[Item], tensors: Sequence[torch.Tensor | Stored]) -> None:
        self.items = items
        self._tensors = [_as_bytes(tensor) for tensor in tensors]
        self.on_drive = any(isinstance(tensor, Stored) for tensor in tensors)  # copying all of it away would fill the memory
        self._dtypes = [tensor.dtype for tensor in tensors]
        self.device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
        # what is queued on the device until now belongs to the state; copies wait for it and for nothing that comes later
        self._ready = None if self.device is None else torch.accelerator.current_stream(self.device).record_event()
        self._starts = [item.at - FRAMING.header_bytes(len(item.sizes)) for item in items]
        self.num_bytes = FRAMING.after(items[-1].end) if items else 0
        # per item the CRC-32 of each part of its data that lies in one block of the file
        self.checksums = [[0] * len(list(segments(item.at, item.end))) for item in items]

    def frame(self, index: int) -> ItemFrame:
        """Return what stands around the data of an item."""
        return item_frame(self.items[index].sizes, self._dtypes[index])

    @contextmanager
    def copying(self) -> Iterator[None]:
        """A context in which `fill` copies from an accelerator beside what the training thread computes."""
        if self._ready is None:
            yield
            return
        stream = torch.Stream(self.device)
        stream.wait_event(self._ready)
        with stream:
            yield

    def wait_for_copies(self) -> None:
        """Return when what `fill` copied inside `copying` has arrived."""
        if self.device is not None:
            torch.accelerator.current_stream(self.device).synchronize()

    def overlapping(self, low: int, high: int) -> range:
        """Return the numbers of the items that have bytes in [low, high) of the file."""
        return range(max(bisect.bisect_right(self._starts, low) - 1, 0), bisect.bisect_left(self._starts, high))

    def fill(self, low: int, buffer: torch.Tensor) -> None:
        """Write bytes [low, low + len(buffer)) of the file into a host buffer, checksums still missing."""
        high = low + buffer.numel()
        edge = low  # written so far
        for index in self.overlapping(low, high):
            item, start = self.items[index], self._starts[index]
            _put(buffer, low, self.frame(index).header, start)
            first, last = max(item.at, low), min(item.end, high)
            if first < last:
                source = self._tensors[index]
                if isinstance(source, Stored):
                    part = source.bytes_at(first - item.at, last - item.at)
                else:
                    part = source[first - item.at : last - item.at]
                buffer[first - low : last - low].copy_(part, non_blocking=True)
            after = min(FRAMING.after(item.end), high)
            edge = max(edge, after)
            if max(item.end, low) < after:
                buffer[max(item.end, low) - low : after - low] = 0
        buffer[max(edge, low) - low :] = 0

    def seal(self, low: int, buffer: torch.Tensor, summed: Sequence[threading.Event], chunk_bytes: int) -> None:
        """Sum the data in a filled buffer and complete the trailers in it.

        Args:
            summed: per chunk of the file, set when its data has been summed; this one's is set here.
        """
        high = low + buffer.numel()
        view = view_of(buffer)
        chunk = low // chunk_bytes
        found = self.overlapping(low, high)
        try:
            for index in found:
                item = self.items[index]
                for number, (first, last) in enumerate(segments(item.at, item.end)):
                    if low <= first < high:
                        self.checksums[index][number] = crc32(view[first - low : last - low])
        finally:
            summed[chunk].set()
        for index in found:
            item = self.items[index]
            if item.end < high and FRAMING.after(item.end) > low:
                for earlier in range(item.at // chunk_bytes, chunk):
                    summed[earlier].wait()
                _put(buffer, low, self.frame(index).trailer(self._crc_of(index)), item.end)

    def _crc_of(self, index: int) -> int:
        return joined_crc(self.items[index].at, self.items[index].end, self.checksums[index])


def _as_bytes(tensor: torch.Tensor | Stored) -> torch.Tensor | Stored:
    if isinstance(tensor, Stored):
        return tensor
    return tensor.detach().view(torch.uint8) if tensor.numel() else tensor.new_empty(0)


def joined_crc(at: int, end: int, parts: Sequence[int]) -> int:
    """Return the CRC-32 of bytes [at, end) of a file from those of its parts."""
    crc = 0
    for part, (first, last) in zip(parts, segments(at, end), strict=True):
        crc = combine(crc, part, last - first)
    return crc


def _put(buffer: torch.Tensor, low: int, content: bytes, at: int) -> None:
    """Write what of `content`, which starts at byte `at` of the file, falls into the buffer that starts at byte `low`."""
    first, last = max(at, low), min(at + len(content), low + buffer.numel())
    if first < last:
        view_of(buffer)[first - low : last - low] = content[first - at : last - at]


class ImageWriter:
    """Brings an image to the disk: one thread fills aligned buffers, others sum and write them.

    Args:
        threads: that sum and write.
        pinned: use page-locked memory, which an accelerator copies to faster.
    """

    def __init__(self, threads: int = 2, pinned: bool = False) -> None:
        self._threads = threads
        self._pinned = pinned
        self._ring: list[torch.Tensor] = []
        self._staged = torch.empty(0, dtype=torch.uint8)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of host memory held for buffers."""
        return sum(buffer.nbytes for buffer in self._ring) + self._staged.nbytes

    def stage(self, image: Image) -> torch.Tensor:
        """Copy the tensors into host memory that the next call uses again; afterwards they may change."""
        if self._staged.numel() < round_up(image.num_bytes):
            self._staged = torch.empty(0, dtype=torch.uint8)  # let go of the old one first
            self._staged = aligned_buffer(round_up(image.num_bytes), self._pinned)
        staged = self._staged[: round_up(image.num_bytes)]
        with image.copying():
            for low in range(0, image.num_bytes, CHUNK_BYTES):
                image.fill(low, staged[low : low + CHUNK_BYTES])
            image.wait_for_copies()
        return staged

    def write(self, image: Image, path: Path, staged: torch.Tensor | None = None) -> None:
        """Write the file and return when it is on the disk; `staged` is what `stage` returned, if it was called.

        Raises:
            OSError: the file cannot be written.
        """
        starts = range(0, image.num_bytes, CHUNK_BYTES)
        summed = [threading.Event() for _ in starts]
        free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        if staged is None:
            while len(self._ring) < min(self._threads + 1, len(starts)):
                self._ring.append(aligned_buffer(CHUNK_BYTES, self._pinned))
            for buffer in self._ring:
                free.put(buffer)

        def finish(low: int, part: torch.Tensor, whole: torch.Tensor) -> None:
            try:
                if not workers.failed:
                    image.seal(low, part, summed, CHUNK_BYTES)
                    output.write(part, low)
            finally:
                summed[low // CHUNK_BYTES].set()  # nobody may wait for what is left out
                free.put(whole)

        with Output(path, image.num_bytes) as output:
            with image.copying(), Workers(self._threads, "write") as workers:
                for low in starts:
                    length = min(CHUNK_BYTES, round_up(image.num_bytes - low))
                    whole = free.get() if staged is None else staged[low : low + length]
                    if workers.failed:
                        break  # the disk is full, or worse: the rest need not be tried
                    if staged is None:
                        image.fill(low, whole[:length])
                        image.wait_for_copies()
                    workers.submit(partial(finish, low, whole[:length], whole))
            output.finish()
