"""States that ranks share out evenly: which elements of which rank's flat tensor are a parameter's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..elements import Elements
from ..pickles import Stored
from ..source import Scalar
from .found import MASTER, Found, split_states, whole


@dataclass(frozen=True)
class Spread:
    """Elements [skip, skip + numel) of a sequence of which part r holds [r * share, (r + 1) * share), from its own element `at` on.

    One object describes a parameter over any number of ranks, and all parameters of a group have the parts in common.
    """

    parts: tuple[Elements, ...]
    share: int
    at: int
    skip: int
    numel: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which they are stored."""
        return self.parts[0].dtype

    def fill(self, out: torch.Tensor, start: int) -> None:
        """Write the elements from `start` on into `out`; only the parts that hold them are opened."""
        done = 0
        for part, begin, count in self._cuts(self.skip + start, self.skip + start + out.numel()):
            part.fill(out[done : done + count], begin)
            done += count

    def places(self) -> Iterator[tuple[str, int]]:
        """Yield (file, number of elements in it) in order."""
        for part, _, count in self._cuts(self.skip, self.skip + self.numel):
            for file, _ in part.places():
                yield file, count

    def _cuts(self, start: int, stop: int) -> Iterator[tuple[Elements, int, int]]:
        while start < stop:
            index, within = divmod(start, self.share)
            count = min(self.share - within, stop - start)
            yield self.parts[index], self.at + within, count
            start += count


class Shared:
    """All states of one flat group, on the ranks that share it."""

    def __init__(self, masters: Sequence[Any], states: Sequence[Mapping[str, Any]], length: int, ranks: Sequence[int], group: str) -> None:
        """Take the ranks' flat tensors and states, in the order of their shares; `length` is what each has with its padding."""
        self.length, self.ranks, self.group = length, ranks, group
        self.numbers: dict[str, Scalar] = {key: number for key, _, number in split_states(states[0]) if number is not None}
        self._tensors: dict[str, list[Any]] = {MASTER: list(masters)}
        for key in {key: None for held in states for key, value in held.items() if isinstance(value, Stored) and value.shape}:
            self._tensors[key] = [held.get(key) for held in states]
        lengths = [tensor.numel if isinstance(tensor, Stored) else -1 for tensor in masters]
        self._parts = {key: tuple(self._part(tensor) for tensor in tensors) for key, tensors in self._tensors.items()}
        self._odd = {
            key: {index for index, tensor in enumerate(tensors) if not isinstance(tensor, Stored) or tensor.numel != length}
            for key, tensors in self._tensors.items()
        }
        self._lean = lengths

    def _part(self, tensor: Any) -> Elements:
        return whole(tensor if isinstance(tensor, Stored) else self._tensors[MASTER][0])

    def put(self, found: Found, name: str, share: int, at: int, skip: int, numel: int) -> None:
        """Note where a parameter's states lie, or why they do not; the numbers are those of `Spread`."""
        found.numbers[name] = self.numbers
        for key, parts in self._parts.items():
            why = self._trouble(key, share, at, skip, numel) if self._odd[key] and numel else ""
            if why:
                found.gaps[name, key] = why
            else:
                found.put(name, key, Spread(parts, max(share, 1), at, skip, numel))

    def _trouble(self, key: str, share: int, at: int, skip: int, numel: int) -> str:
        """Return what is wrong with the parts that a parameter needs of a state."""
        for index in range(skip // share, (skip + numel - 1) // share + 1):
            if index not in self._odd[key]:
                continue
            tensor, rank = self._tensors[key][index], self.ranks[index]
            if not isinstance(tensor, Stored):
                return f"the optimizer file of data-parallel rank {rank} has none for {self.group}"
            if tensor.numel != self._lean[index]:  # padding may be cut off, as it is of the master
                return f"it has shape {tuple(tensor.shape)} for {self.length} elements of {self.group}: no parameter has a part of it"
            last = min(skip + numel, (index + 1) * share) - index * share
            if at + last > tensor.numel:
                return f"data-parallel rank {rank} holds {tensor.numel} elements of {self.group}, {at + last} are needed"
        return ""
