"""What travels between stages: trees of tensors, taken apart into tensors and a description from which they are put together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Leaf:
    """A tensor in a payload: shape, dtype, and whether a gradient comes back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    wants_grad: bool


@dataclass(frozen=True)
class Spec:
    """A payload without its tensors: `tree` has numbers in their places, `leaves` says what they are."""

    tree: Any
    leaves: tuple[Leaf, ...]

    @property
    def wanting(self) -> list[Leaf]:
        """The tensors that get a gradient, in order."""
        return [leaf for leaf in self.leaves if leaf.wants_grad]


@dataclass(frozen=True)
class _Place:
    """Where tensor `index` stands in a tree."""

    index: int


def take_apart(payload: Any) -> tuple[Spec, list[torch.Tensor]]:
    """Return the description and the tensors of nested tuples, lists, named tuples and dicts; anything else is kept as a value."""
    tensors: list[torch.Tensor] = []

    def place(tensor: torch.Tensor) -> _Place:
        tensors.append(tensor)
        return _Place(len(tensors) - 1)

    tree = _mapped(payload, torch.Tensor, place)
    leaves = tuple(Leaf(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
    return Spec(tree, leaves), tensors


def put_together(spec: Spec, tensors: list[torch.Tensor]) -> Any:
    """Return the payload that `take_apart` was given, made of these tensors."""
    return _mapped(spec.tree, _Place, lambda place: tensors[place.index])


def tensors_of(payload: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a payload, in order."""
    yield from take_apart(payload)[1]


def _mapped(tree: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_mapped(item, kind, change) for item in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(_mapped(item, kind, change) for item in tree)
    if isinstance(tree, Mapping):
        items = {key: _mapped(value, kind, change) for key, value in tree.items()}
        return items if type(tree) is dict else type(tree)(items)  # type: ignore[call-arg]
    return tree
