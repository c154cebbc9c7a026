"""Homes: where the flat state of one unit rests on a drive, how it comes from there and goes back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from .disk import SECTOR_BYTES, aligned_buffer, round_up
from .drive import Drive, Transfer, wait_for_all
from .space import Tile
from .staging import Staging


class DiskHome:
    """One state of one unit in a swap file: elements [start, stop) of the unit's flat space, tile by tile."""

    tier = "nvme"

    def __init__(self, drive: Drive, staging: Staging, state: str, dtype: torch.dtype, tiles: Sequence[Tile]) -> None:
        self.drive, self.staging, self.state, self.dtype = drive, staging, state, dtype
        self.tiles = tuple(tiles)  # none where this rank owns nothing of the unit
        self.start, self.stop = (tiles[0].start, tiles[-1].stop) if tiles else (0, 0)
        self._writing: list[Transfer] = []
        for tile in tiles:
            drive.reserve(state, dtype, tile.base, tile.end - tile.base)

    @property
    def numel(self) -> int:
        """Elements at home here."""
        return self.stop - self.start

    def load(self, out: torch.Tensor) -> Transfer:
        """Start filling `out` [numel], on any device; it must stay where it is until wait()."""
        self.flush()
        arrived = _Arrival(out, self.drive)
        file = self.drive.file(self.state, self.dtype)
        futures = []
        for at, count, base in self._pieces():
            buffer = self.staging.take()
            self.drive.count("read", self.state, 1, round_up(count * self.dtype.itemsize))
            futures.append(self.drive.submit(partial(self._fetch, file, base, buffer, out[at : at + count], arrived)))
        return self.drive.transfer_of(futures)

    def store(self, values: torch.Tensor) -> None:
        """Take over `values` [numel], from any device; they may change when this returns, the write may still be on its way."""
        self.flush()
        file = self.drive.file(self.state, self.dtype)
        futures = []
        for at, count, base in self._pieces():
            buffer = self.staging.take()
            part = values[at : at + count]
            buffer[: count * self.dtype.itemsize].view(self.dtype).copy_(part, non_blocking=True)
            self.drive.count("written", self.state, 1, round_up(count * self.dtype.itemsize))
            ready = None if values.device.type == "cpu" else torch.accelerator.current_stream(values.device).record_event()
            futures.append(self.drive.submit(partial(self._put, file, base, buffer, round_up(count * self.dtype.itemsize), ready)))
        self._writing.append(self.drive.transfer_of(futures))

    def flush(self) -> None:
        """Return when what was stored has been written.

        Raises:
            EngineError: the drive failed.
        """
        wait_for_all(self.take_writing())

    def take_writing(self) -> list[Transfer]:
        """Return the writes that may still be on their way; whoever takes them waits for them."""
        writing, self._writing = self._writing, []
        return writing

    def read_bytes(self, low: int, high: int) -> torch.Tensor:
        """Return bytes [low, high) of the flat state as uint8 in host memory; may be called from any thread."""
        size = self.dtype.itemsize
        out = torch.empty(high - low, dtype=torch.uint8)
        file = self.drive.file(self.state, self.dtype)
        for tile in self.tiles:
            first, last = max(low, (tile.start - self.start) * size), min(high, (tile.stop - self.start) * size)
            if first < last:
                at = tile.base * size + first - (tile.start - self.start) * size
                skip = at % SECTOR_BYTES
                buffer = aligned_buffer(round_up(skip + last - first))
                self.drive.transfer("read", file, at - skip, buffer)
                out[first - low : last - low] = buffer[skip : skip + last - first]
        return out

    def _pieces(self) -> list[tuple[int, int, int]]:
        """Return (offset in the flat state, elements, element in the file) of pieces that fit a staging buffer."""
        step = self.staging.num_bytes // self.dtype.itemsize
        return [
            (tile.start - self.start + at, min(step, tile.stop - tile.start - at), tile.base + at)
            for tile in self.tiles
            for at in range(0, tile.stop - tile.start, step)
        ]

    def _fetch(self, file: Any, base: int, buffer: torch.Tensor, out: torch.Tensor, arrived: _Arrival) -> None:
        num_bytes = out.numel() * self.dtype.itemsize
        try:
            part = buffer[: round_up(num_bytes)]
            self.drive.transfer("read", file, base * self.dtype.itemsize, part)
            arrived.copy(out, buffer[:num_bytes].view(self.dtype))
        finally:
            self.staging.give(buffer)

    def _put(self, file: Any, base: int, buffer: torch.Tensor, num_bytes: int, ready: Any) -> None:
        try:
            if ready is not None:
                ready.synchronize()
            self.drive.transfer("written", file, base * self.dtype.itemsize, buffer[:num_bytes])
        finally:
            self.staging.give(buffer)


class _Arrival:
    """Copies from staging to where bytes are wanted, from a thread of the drive."""

    def __init__(self, out: torch.Tensor, drive: Drive) -> None:
        self._device, self._drive = out.device, drive
        # what the training thread still does with this memory comes first
        self._before = None if out.device.type == "cpu" else torch.accelerator.current_stream(out.device).record_event()

    def copy(self, out: torch.Tensor, staged: torch.Tensor) -> None:
        """Return when `out` has been filled and `staged` may be used again."""
        if self._before is None:
            self._drive.place(out, staged)
            return
        stream = torch.Stream(self._device)
        stream.wait_event(self._before)
        with stream:
            out.copy_(staged, non_blocking=True)
        stream.synchronize()


class Stored:
    """A slice of a state that rests on a drive, read when a checkpoint wants its bytes; stands where a flat tensor would."""

    device = torch.device("cpu")

    def __init__(self, home: DiskHome, start: int, stop: int) -> None:
        self._home, self._start, self._stop = home, start, stop
        self.dtype = home.dtype

    def numel(self) -> int:
        """Elements in the slice."""
        return self._stop - self._start

    def element_size(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def __getitem__(self, part: slice) -> Stored:
        start, stop, _ = part.indices(self.numel())
        return Stored(self._home, self._start + start, self._start + stop)

    def bytes_at(self, low: int, high: int) -> torch.Tensor:
        """Return bytes [low, high) of the slice."""
        at = self._start * self.dtype.itemsize
        return self._home.read_bytes(at + low, at + high)
