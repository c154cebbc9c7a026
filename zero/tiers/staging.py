"""A bounded number of aligned host buffers that bytes pass through on their way between a drive and where they are used."""

from __future__ import annotations

import queue

import torch

from .disk import aligned_buffer, round_up


class Staging:
    """`count` buffers of one size, made when the first is needed.

    Whoever takes one waits until one is free; the threads of the drive give them back, so nobody waits for himself.

    Attributes:
        buffers: all of them, once they are made.
    """

    def __init__(self, count: int, num_bytes: int, pinned: bool) -> None:
        self.count, self.num_bytes, self._pinned = count, round_up(num_bytes), pinned
        self.buffers: list[torch.Tensor] = []
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()

    def take(self) -> torch.Tensor:
        """Return a free buffer, uint8 [num_bytes]."""
        if not self.buffers:
            together = aligned_buffer(self.count * self.num_bytes, self._pinned)
            self.buffers = list(together.split(max(self.num_bytes, 1)))
            for buffer in self.buffers:
                self._free.put(buffer)
        return self._free.get()

    def give(self, buffer: torch.Tensor) -> None:
        """Give a buffer back."""
        self._free.put(buffer)

    @property
    def most_bytes(self) -> int:
        """Bytes of host memory, once buffers are in use."""
        return self.count * self.num_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of host memory in use."""
        return self.most_bytes if self.buffers else 0
