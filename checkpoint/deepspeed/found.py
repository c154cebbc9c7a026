"""What was found of the states under one model-parallel rank: the common currency of the readers in this folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import archive
from ..elements import Elements, Whole
from ..pickles import Stored
from ..source import MASTER, Scalar


@dataclass
class Found:
    """Trainable parameters with their shapes, and where their states lie."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    where: dict[str, dict[str, Elements]] = field(default_factory=dict)
    own_shapes: dict[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)
    numbers: dict[str, dict[str, Scalar]] = field(default_factory=dict)
    gaps: dict[tuple[str, str], str] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)  # options, and names under "params"
    notes: list[str] = field(default_factory=list)
    lost: str = ""  # why there may be trainable parameters of which nothing was found

    def put(self, name: str, state: str, elements: Elements) -> None:
        """Note where a state lies."""
        self.where.setdefault(name, {})[state] = elements

    def add(self, other: Found) -> None:
        """Take in what another part of the checkpoint holds; what is known already stays."""
        for name, shape in other.shapes.items():
            if name not in self.shapes:
                self.shapes[name] = shape
                self.where[name] = other.where.get(name, {})
                self.numbers[name] = other.numbers.get(name, {})
        self.own_shapes.update({key: shape for key, shape in other.own_shapes.items() if key not in self.own_shapes})
        self.gaps.update({key: why for key, why in other.gaps.items() if key[1] not in self.where.get(key[0], {})})
        for index, group in enumerate(other.groups):
            if index == len(self.groups):
                self.groups.append({**group, "params": []})
            known = self.groups[index]["params"]
            known.extend(name for name in group["params"] if name not in known)
        self.notes.extend(note for note in other.notes if note not in self.notes)
        self.lost = self.lost or other.lost


def scalar(value: Any) -> Scalar | None:
    """Return a single number as it was kept: a number, or a tensor without dimensions; None for anything else."""
    if isinstance(value, Stored):
        return archive.read_whole(value).view(()) if value.numel == 1 and not value.shape else None
    return value if isinstance(value, (bool, int, float)) else None


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group's options without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def shape_of(value: Any) -> tuple[int, ...]:
    """Return a shape that was stored as torch.Size, tuple or list."""
    return tuple(int(size) for size in value)


def numel_of(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a shape."""
    return torch.Size(shape).numel()


def split_states(states: Mapping[str, Any]) -> Iterator[tuple[str, Stored | None, Scalar | None]]:
    """Yield (name, tensor with a dimension or None, number or None) for each state of one optimizer parameter."""
    for key, value in states.items():
        number = scalar(value)
        if number is not None:
            yield key, None, number
        elif isinstance(value, Stored):
            yield key, value, None


def whole(stored: Stored) -> Elements:
    """Return all elements of a stored tensor."""
    return Whole(stored)


__all__ = ["MASTER", "Found", "numel_of", "options_of", "scalar", "shape_of", "split_states", "whole"]
