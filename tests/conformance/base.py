"""What the small patterns share: their data, a block, a trunk of blocks, and the decorator that makes a case of a class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from case import Call, Case, generator, one_loss
from torch import nn

D, V, T, B = 8, 11, 5, 3


def data(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (x [B, T, D], ids [B, T], y [B, T, D]) of one micro-batch."""
    g = generator(step, rank)
    return torch.randn(B, T, D, generator=g), torch.randint(V, (B, T), generator=g), torch.randn(B, T, D, generator=g)


def pattern(cases: list[Case], **options: Any) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Return a decorator that adds a class to `cases` under its name, with its docstring as what it is about."""

    def add(cls: type[nn.Module]) -> type[nn.Module]:
        phases = options.pop("phases", None) or one_loss(loss_of)
        cases.append(Case(cls.__name__, (cls.__doc__ or "").strip(), cls, phases, **options))
        return cls

    return add


def loss_of(call: Call, step: int, rank: int) -> torch.Tensor:
    return call(*data(step, rank), step=step)


class Block(nn.Module):
    """A residual block."""

    def __init__(self, d: int = D):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Base(nn.Module):
    """A trunk of blocks and the usual loss."""

    depth = 3
    block: Callable[[], nn.Module] = Block

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(self.depth))
        self.out = nn.Linear(D, D)

    def trunk(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x, ids, y, step: int = 0):
        return F.mse_loss(self.out(self.trunk(x)), y)
