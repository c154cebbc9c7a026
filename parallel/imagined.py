"""A world of ranks that exists in one process only: who watches it, and what its agreements answer.

The dry run prepares such a world around a script that knows nothing of it, so the world is found in a context variable and
not passed along. Outside a dry run there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .transport import Native, PointToPoint, Transport, Wait


class Watcher(Protocol):
    """Is told what an engine does in the imagined world."""

    def job(self, job: Any) -> None:
        """Take note of an engine that was built; `job` is the record that the engine hands to the ledger."""

    def phase(self, name: str) -> None:
        """Take note that a forward, a backward or an optimizer step has ended."""


class NotSaidError(BaseException):
    """What a rank needs to hear from another one, which has not been run so far; no Exception, so that scripts do not catch it."""


@dataclass
class World:
    """The imagined ranks.

    Attributes:
        backend: whose way of moving flat buffers is followed, "nccl" or "gloo": they need different working memory.
        said: what ranks tell each other beyond tensors. kept: what lives as long as the world. Both last while one rank after
            another is run.
        engine_calls: above 0 while a collective of an engine runs, as opposed to one of the script's own.
    """

    rank: int
    size: int
    watcher: Watcher
    backend: str = "nccl"
    said: dict[Any, Any] = field(default_factory=dict)
    kept: dict[Any, Any] = field(default_factory=dict)
    engine_calls: int = 0

    def keep(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what lives as long as this world, made when it is first asked for."""
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    def hear(self, key: Any) -> Any:
        """Return what another rank has said.

        Raises:
            NotSaidError: it was not run so far.
        """
        if key not in self.said:
            raise NotSaidError(f"rank {self.rank} waits for {key}")
        return self.said[key]

    @contextmanager
    def engine_call(self) -> Iterator[None]:
        """Mark what runs inside as an engine's own collective."""
        self.engine_calls += 1
        try:
            yield
        finally:
            self.engine_calls -= 1


_WORLD: ContextVar[World | None] = ContextVar("stateroom_imagined_world", default=None)


def imagined_world() -> World | None:
    """Return the imagined world that this code runs in, or None where ranks are real."""
    return _WORLD.get()


@contextmanager
def imagine(world: World) -> Iterator[World]:
    """Let code inside run in `world`."""
    token = _WORLD.set(world)
    try:
        yield world
    finally:
        _WORLD.reset(token)


class Imagined:
    """A transport whose messages reach nobody; it works in the same memory as the one it stands for."""

    def __init__(self, world: World, group: Any, rank: int, size: int) -> None:
        self._world = world
        self._inner: Transport = PointToPoint(group, rank, size) if world.backend == "gloo" else Native(group, rank, size)

    def all_gather(self, flat: torch.Tensor, bounds: Sequence[int], tag: int) -> Wait:
        """As the transport it stands for."""
        return self._marked(lambda: self._inner.all_gather(flat, bounds, tag))

    def reduce_scatter(self, flat: torch.Tensor, bounds: Sequence[int], wire: torch.dtype, tag: int) -> Wait:
        """As the transport it stands for."""
        return self._marked(lambda: self._inner.reduce_scatter(flat, bounds, wire, tag))

    def small_sum(self, tensor: torch.Tensor, tag: int) -> Wait:
        """As the transport it stands for."""
        return self._marked(lambda: self._inner.small_sum(tensor, tag))

    def broadcast(self, tensor: torch.Tensor, source: int, tag: int) -> Wait:
        """As the transport it stands for."""
        return self._marked(lambda: self._inner.broadcast(tensor, source, tag))

    def _marked(self, start: Callable[[], Wait]) -> Wait:
        with self._world.engine_call():
            wait = start()

        def finish() -> None:
            with self._world.engine_call():
                wait()

        return finish
