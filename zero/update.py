"""How the optimizer's update runs over its pieces: all at once where everything is on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from .runs import Run


class Update(Protocol):
    """Updates runs from the reduced gradients of their units.

    Attributes:
        publishes: brings the new master weights to the parameters itself.
    """

    publishes: bool

    def __call__(self, used: Sequence[Run], factor: float) -> None:
        """Multiply the gradients of `used` by `factor` and step them; other runs stay as they are."""

    def register_pre_hook(self, hook: Callable[..., Any]) -> Any:
        """Run `hook(inner optimizer, args, kwargs)` before each update."""

    def register_post_hook(self, hook: Callable[..., Any]) -> Any:
        """Run `hook(inner optimizer, args, kwargs)` after each update."""


class AtOnce:
    """One step of the inner optimizer over all its tensors."""

    publishes = False

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner = inner

    def __call__(self, used: Sequence[Run], factor: float) -> None:
        """Scale all owned gradients in one pass and step."""
        scale(used, factor)
        for run in used:
            run.tensor.grad = run.gradient()
        self._inner.step()
        for run in used:
            run.tensor.grad = None

    def register_pre_hook(self, hook: Callable[..., Any]) -> Any:
        """Let torch call it."""
        return self._inner.register_step_pre_hook(hook)

    def register_post_hook(self, hook: Callable[..., Any]) -> Any:
        """Let torch call it."""
        return self._inner.register_step_post_hook(hook)


def scale(runs: Sequence[Run], factor: float) -> None:
    """Multiply the gradients of the units of `runs` that are in memory by `factor`."""
    if factor == 1.0:
        return
    units = {id(run.unit): run.unit for run in runs}.values()
    kinds: dict[torch.device, list[torch.Tensor]] = {}
    for unit in units:
        owned = unit.gradients.owned  # type: ignore[union-attr]
        if owned is not None and owned.numel():
            kinds.setdefault(owned.device, []).append(owned)
    for tensors in kinds.values():
        torch._foreach_mul_(tensors, factor)
