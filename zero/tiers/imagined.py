"""A drive of an imagined world: its files take room in a count alone, and its requests have ended when they are made."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from .drive import Drive


class ImaginedDrive(Drive):
    """A `Drive` without files or threads: the folder need not exist, and buffers hold shapes only."""

    def __post_init__(self) -> None:
        self._reserved: dict[tuple[str, torch.dtype], int] = {}

    def check(self, num_bytes: int, ranks: int = 1) -> str | None:
        """Every drive is large enough."""
        return None

    def file(self, state: str, dtype: torch.dtype) -> Any:
        """There is none; what is given to `transfer` does not matter."""
        self._reserved.setdefault((state, dtype), 0)

    def reserve(self, state: str, dtype: torch.dtype, base: int, numel: int) -> None:
        """Count the room of elements [base, base + numel)."""
        key = (state, dtype)
        self._reserved[key] = self._reserved.get(key, 0) + numel * dtype.itemsize

    def submit(self, task: Callable[[], None]) -> Future[None]:
        """Run a task here: other threads know nothing of tensors that have no values."""
        future: Future[None] = Future()
        task()
        future.set_result(None)
        return future

    def transfer(self, direction: str, file: Any, at: int, buffer: torch.Tensor) -> None:
        """Nothing moves."""

    def place(self, out: torch.Tensor, staged: torch.Tensor) -> None:
        """There are no bytes."""

    def held_bytes(self, state: str) -> int:
        """Bytes that a state would take."""
        return sum(size for (name, _), size in self._reserved.items() if name == state)

    @property
    def states(self) -> list[str]:
        """Names of the states that would have a file."""
        return list(dict.fromkeys(name for name, _ in self._reserved))

    def close(self) -> None:
        """Nothing to give back."""
