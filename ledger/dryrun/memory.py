"""Follows the storages that live on fake tensors: how many bytes there are, whose they are, and when they are most."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch

REST = "activations and temporaries"
DEVICE, HOST, DRIVE = "device", "cpu", "nvme"
Tensors = Mapping[str, Iterable[torch.Tensor]]


@dataclass(frozen=True)
class Instant:
    """Bytes by state at one instant, on the device and in host memory.

    Attributes:
        operation: the torch operation after which it was taken, "" between operations.
        is_one: the device is the host, whose memory both share.
    """

    name: str
    states: Mapping[str, int]
    operation: str = ""
    host: Mapping[str, int] = field(default_factory=dict)
    is_one: bool = False

    @property
    def total(self) -> int:
        """Bytes of all states on the device; where it is the host, in memory."""
        return sum(self.states.values()) + (self.host_total if self.is_one else 0)

    @property
    def host_total(self) -> int:
        """Bytes in host memory."""
        return sum(self.host.values())


class _Memory:
    """The storages of one kind of memory; each is counted with the size it had when it was last looked at."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._alive

    def __bool__(self) -> bool:
        return bool(self._alive)

    def add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        self._alive[key] = (weakref.ref(storage, partial(self._forget, key)), size)
        self.num_bytes += size

    def _forget(self, key: int, _: object) -> None:
        self.remove(key)

    def remove(self, key: int) -> None:
        known = self._alive.pop(key, None)
        if known is not None:
            self.num_bytes -= known[1]

    def recount(self) -> None:
        for key, (reference, size) in list(self._alive.items()):
            storage = reference()
            if storage is not None and storage.nbytes() != size:
                self.num_bytes += storage.nbytes() - size
                self._alive[key] = (reference, storage.nbytes())


class StorageWatch:
    """Knows every storage that an operation has made and that is not freed yet.

    Storages of gathered parameters shrink and grow between operations, so their sizes are read when they are asked for;
    all others are counted once. In host memory is what the engine says rests there, and what operations make of that alone.

    Args:
        is_one: the device is the host.
    """

    def __init__(self, *, is_one: bool = False) -> None:
        self._device, self._host = _Memory(), _Memory()
        self._moving: dict[int, torch.UntypedStorage] = {}
        self._tensors: Callable[[], Tensors] | None = None
        self._in_host: Callable[[], Tensors] | None = None
        self._peak: Instant | None = None
        self._peak_bytes = -1
        self._is_one = is_one

    def take_in(self, results: Iterable[torch.Tensor], inputs: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Count the storages of an operation's results once, until they are freed."""
        for tensor in results:
            if tensor.layout is not torch.strided or tensor.device.type == "meta":
                continue
            storage = tensor.untyped_storage()
            key = id(storage)
            if key not in self._device and key not in self._moving and key not in self._host:
                memory = self._host if self._host and self._rest_in_host(inputs()) else self._device
                memory.add(storage)

    def _rest_in_host(self, inputs: Iterable[torch.Tensor]) -> bool:
        keys = [id(tensor.untyped_storage()) for tensor in inputs if tensor.layout is torch.strided and tensor.numel() > 1]
        return bool(keys) and all(key in self._host for key in keys)

    def attribute(self, tensors: Callable[[], Tensors], in_host: Callable[[], Tensors]) -> None:
        """Say by what functions the tensors of each state are found from now on."""
        self._tensors, self._in_host = tensors, in_host

    def follow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Read the sizes of these tensors' storages anew each time: they are resized without an operation."""
        self._moving = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._device.remove(id(storage))
            self._moving[id(storage)] = storage

    def recount(self) -> None:
        """Read the sizes of all storages anew: one that is not followed may have been resized too."""
        self._device.recount()
        self._host.recount()

    @property
    def total(self) -> int:
        """Bytes of all storages on the device now; where it is the host, in memory."""
        own = self._device.num_bytes + sum(storage.nbytes() for storage in self._moving.values())
        return own + (self._host.num_bytes if self._is_one else 0)

    def sample(self, operation: str) -> None:
        """Remember this instant if it has more bytes than any since the last `take_peak`."""
        if self.total > self._peak_bytes:
            self._settle()
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
        return replace(found, name=name)

    def now(self, name: str, operation: str = "") -> Instant:
        """Return the bytes of each state as they are; what no state owns is an activation or a temporary."""
        self._settle()
        seen: set[int] = set()
        host = self._sizes(self._in_host, seen, self._host.__contains__)
        states = self._sizes(self._tensors, seen, lambda key: key in self._device or key in self._moving)
        rest = self._host.num_bytes - sum(host.values())
        if rest:
            host[REST] = rest
        states[REST] = self.total - sum(states.values()) - (sum(host.values()) if self._is_one else 0)
        return Instant(name, states, operation, host, self._is_one)

    def _sizes(self, tensors: Callable[[], Tensors] | None, seen: set[int], counts: Callable[[int], bool]) -> dict[str, int]:
        states: dict[str, int] = {}
        for state, group in ({} if tensors is None else tensors()).items():
            states[state] = 0
            for tensor in group:
                storage = tensor.untyped_storage()
                if id(storage) not in seen and counts(id(storage)):
                    seen.add(id(storage))
                    states[state] += storage.nbytes()
        return states

    def _settle(self) -> None:
        """Take what the engine says rests in host memory to where it belongs: it was made there, by an operation that does not say so."""
        for group in ({} if self._in_host is None else self._in_host()).values():
            for tensor in group:
                storage = tensor.untyped_storage()
                key = id(storage)
                if key not in self._host and (key in self._device or key in self._moving):
                    self._device.remove(key)
                    self._moving.pop(key, None)
                    self._host.add(storage)
