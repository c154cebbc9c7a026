"""What a model or pattern of the conformance table is: how it is built, what one step of it does, and where it is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

OUT_OF_STEP = "ranks are out of step"  # such a refusal ends the processes
Backward = Callable[..., Any]
Way = Callable[..., torch.Tensor]  # (call, backward, step, rank) -> the loss that is compared
LossOf = Callable[..., torch.Tensor]  # (call, step, rank) -> scalar loss


class Call:
    """A model as a script calls it, plain or an engine: floating inputs take the compute dtype.

    Attributes:
        target: the module or the engine.
        module: the user's module.
    """

    def __init__(self, target: nn.Module, module: nn.Module, dtype: torch.dtype | None) -> None:
        self.target = target
        self.module = module
        self._dtype = dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.target(*self.cast(args), **self.cast(kwargs))

    def train(self, mode: bool = True) -> None:
        """Set training or evaluation mode, as a script does."""
        self.target.train(mode)

    def eval(self) -> None:
        self.train(False)

    def cast(self, tree: Any) -> Any:
        """Return the inputs as the model takes them."""
        if self._dtype is None:
            return tree
        return tree_map(lambda x: x.to(self._dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, tree)


@dataclass(frozen=True)
class Phase:
    """One update within a step: which part it trains, and what is run for it.

    `way` gets the call (of a model in parts: a dict of calls), a backward, the step and the rank, and returns the loss.
    """

    way: Way
    part: str = ""


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        build: makes the model; a dict of models for several engines at once.
        phases: the updates of one step.
        optimizer: a name of conform.OPTIMIZERS. SGD where Adam would turn the rounding noise of a zero gradient into a step.
        refused: stage -> what the error must say, for what is documented as refused.
        cast_first: why the script has to cast the model with .to(torch.bfloat16) itself before initialize(): buffers keep
            their dtype otherwise.
        no_bf16: why there is no bfloat16 run of it: plain PyTorch cannot either, or it fixes its own dtypes.
        follow: called after each step with the module (or dict of them) and a context that gives whole parameters to be
            written: moving averages, clipped weights.
    """

    name: str
    about: str
    build: Callable[[], Any]
    phases: tuple[Phase, ...]
    optimizer: str = "adamw"
    refused: Mapping[int, str] = field(default_factory=dict)
    cast_first: str = ""
    no_bf16: str = ""
    follow: Callable[[Any, Callable[[Any], AbstractContextManager[Any]]], None] | None = None

    def but(self, **changes: Any) -> Case:
        """Return this case with some attributes changed."""
        return replace(self, **changes)


def one_loss(loss_of: LossOf) -> tuple[Phase, ...]:
    """Return the usual step: one loss, one backward."""

    def way(call: Call, backward: Backward, step: int, rank: int) -> torch.Tensor:
        loss = loss_of(call, step, rank)
        backward(loss)
        return loss

    return (Phase(way),)


def generator(step: int, rank: int) -> torch.Generator:
    """Return the source of one micro-batch's numbers."""
    return torch.Generator().manual_seed(97 * step + rank + 1)


def everywhere(message: str) -> dict[int, str]:
    """Return a refusal that holds at every stage."""
    return dict.fromkeys(range(4), message)
