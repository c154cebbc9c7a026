"""Small gradients, moved into the flat buffer many at a time: one by one, each costs a launch or two that weigh more than its bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .parameter import Slot

SMALL_NUMEL = 4096  # a larger gradient costs its bytes, and goes into the buffer as soon as it is there
WAITING_NUMEL = 1 << 16  # elements that wait at most, so that what waits is never a second copy of a large unit


class SmallGradients:
    """What autograd left on small parameters of one unit, until it is moved: sums are those of moving each by itself.

    Args:
        slots: the unit's parameters, in flat order and without gaps.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._takes = bytes(0 < slot.numel <= SMALL_NUMEL for slot in slots)
        self._grads: dict[int, torch.Tensor] = {}
        self._numel = 0

    def __bool__(self) -> bool:
        return bool(self._grads)

    def __contains__(self, index: int) -> bool:
        return index in self._grads

    def take(self, index: int, grad: torch.Tensor) -> bool:
        """Let the gradient of parameter `index` wait, if it is a small dense one and none of that parameter waits already."""
        if not self._takes[index] or index in self._grads or type(grad) is not torch.Tensor or grad.layout is not torch.strided:
            return False
        self._grads[index] = grad
        self._numel += self._slots[index].numel
        return True

    @property
    def are_many(self) -> bool:
        """Whether as much waits as may."""
        return self._numel >= WAITING_NUMEL

    def forget(self) -> None:
        """Drop what waits."""
        self._grads, self._numel = {}, 0

    def move(self, full: torch.Tensor, filled: bytearray, factor: float) -> None:
        """Write what waits, times `factor`, into the unit's buffer `full`, or add it where `filled` says that there is a value; mark it."""
        for indexes in _stretches(sorted(self._grads), filled):
            grads = [self._grads[index] for index in indexes]
            first, last = self._slots[indexes[0]], self._slots[indexes[-1]]
            here = full[first.offset : last.offset + last.numel]
            flat = grads[0].reshape(-1) if len(grads) == 1 else torch._utils._flatten_dense_tensors(grads)
            put(here, flat, factor, adds=bool(filled[indexes[0]]))
            filled[indexes[0] : indexes[-1] + 1] = b"\1" * len(indexes)
        self.forget()


def put(view: torch.Tensor, grad: torch.Tensor, factor: float, *, adds: bool) -> None:
    """Write `grad` times `factor` into `view` in one pass over memory where the dtypes allow it, or add it to what is there."""
    if adds:
        view.add_(grad, alpha=factor)
    elif factor == 1.0 or grad.dtype != view.dtype:
        view.copy_(grad)
        if factor != 1.0:
            view.mul_(factor)
    else:
        torch.mul(grad, factor, out=view)


def _stretches(indexes: Sequence[int], filled: Sequence[int]) -> Iterator[list[int]]:
    """Cut ascending numbers into those that follow each other and are all filled or all not."""
    open_: list[int] = []
    for index in indexes:
        if open_ and (index != open_[-1] + 1 or filled[index] != filled[open_[-1]]):
            yield open_
            open_ = []
        open_.append(index)
    if open_:
        yield open_
