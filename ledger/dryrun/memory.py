"""Follows the storages that live on fake tensors: how many bytes there are, whose they are, and when they are most."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

REST = "activations and temporaries"
Tensors = Mapping[str, Iterable[torch.Tensor]]


@dataclass(frozen=True)
class Instant:
    """Bytes by state at one instant. `operation` is the torch operation after which it was taken, "" between operations."""

    name: str
    states: Mapping[str, int]
    operation: str = ""

    @property
    def total(self) -> int:
        """Bytes of all states."""
        return sum(self.states.values())


class StorageWatch:
    """Knows every storage that an operation has made and that is not freed yet.

    Storages of gathered parameters shrink and grow between operations, so their sizes are read when they are asked for;
    all others are counted once.
    """

    def __init__(self) -> None:
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._fixed_bytes = 0
        self._moving: dict[int, torch.UntypedStorage] = {}
        self._tensors: Callable[[], Tensors] | None = None
        self._peak: Instant | None = None
        self._peak_bytes = -1

    def take_in(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor once, until it is freed."""
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._alive or key in self._moving:
            return
        size = storage.nbytes()
        self._alive[key] = (weakref.ref(storage, partial(self._forget, key)), size)
        self._fixed_bytes += size

    def _forget(self, key: int, _: object) -> None:
        self._freed(key)

    def _freed(self, key: int) -> None:
        known = self._alive.pop(key, None)
        if known is not None:
            self._fixed_bytes -= known[1]

    def attribute(self, tensors: Callable[[], Tensors]) -> None:
        """Say by what function the tensors of each state are found from now on."""
        self._tensors = tensors

    def follow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Read the sizes of these tensors' storages anew each time: they are resized without an operation."""
        self._moving = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._freed(id(storage))
            self._moving[id(storage)] = storage

    def recount(self) -> None:
        """Read the sizes of all storages anew: one that is not followed may have been resized too."""
        for key, (reference, size) in list(self._alive.items()):
            storage = reference()
            if storage is not None and storage.nbytes() != size:
                self._fixed_bytes += storage.nbytes() - size
                self._alive[key] = (reference, storage.nbytes())

    @property
    def total(self) -> int:
        """Bytes of all storages now."""
        return self._fixed_bytes + sum(storage.nbytes() for storage in self._moving.values())

    def sample(self, operation: str) -> None:
        """Remember this instant if it has more bytes than any since the last `take_peak`."""
        total = self.total
        if total > self._peak_bytes:
            self._peak_bytes = total
            self._peak = self.now("peak", operation)

    def take_peak(self, name: str) -> Instant:
        """Return the fullest instant since the last call, and start anew."""
        self.recount()
        self.sample("")
        found, self._peak, self._peak_bytes = self._peak, None, -1
        assert found is not None
        return Instant(name, found.states, found.operation)

    def now(self, name: str, operation: str = "") -> Instant:
        """Return the bytes of each state as they are; what no state owns is an activation or a temporary."""
        states: dict[str, int] = {}
        seen: set[int] = set()
        for state, tensors in ({} if self._tensors is None else self._tensors()).items():
            size = 0
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if id(storage) not in seen and (id(storage) in self._alive or id(storage) in self._moving):
                    seen.add(id(storage))
                    size += storage.nbytes()
            states[state] = size
        states[REST] = self.total - sum(states.values())
        return Instant(name, states, operation)
