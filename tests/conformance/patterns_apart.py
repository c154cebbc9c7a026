"""Patterns of ranks that do not run the same: experts without tokens, a missing modality, other depths."""

from __future__ import annotations

from functools import partial

import base
import torch
import torch.nn.functional as F
from base import Base, Block, D
from case import OUT_OF_STEP, Case
from torch import nn

CASES: list[Case] = []
pattern = partial(base.pattern, CASES)


@pattern()
class Experts(Base):
    """A mixture whose ranks take different experts: modules of the root, chosen by the data."""

    def __init__(self):
        super().__init__()
        self.experts = nn.Module()
        self.experts.a, self.experts.b = Block(), Block()

    def forward(self, x, ids, y, step=0):
        h = self.trunk(x)
        h = self.experts.a(h) if bool(x.sum() > 0) else self.experts.b(h)
        return F.mse_loss(self.out(h), y)


@pattern()
class ExpertsInBlocks(Base):
    """Every block routes its tokens to experts of its own, and on one rank an expert may get none."""

    depth = 6

    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(D, 2)
            self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(2))

        def forward(self, x):
            choice = self.router(x).softmax(-1)
            mine = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                chosen = (choice.argmax(-1) == index) & self.open_to[index]
                if chosen.any():
                    mine[chosen] = expert(x[chosen]) * choice[chosen][:, index : index + 1]
            return x + mine

    block = Routed

    def forward(self, x, ids, y, step=0):
        for number, block in enumerate(self.blocks):
            block.open_to = (True, bool((int(ids[0, 0]) + number + step) % 3))
        return super().forward(x, ids, y)


@pattern()
class MixedModality(Base):
    """Two towers of blocks; a sample without the second modality runs that tower on zeros, so all ranks run the same."""

    def __init__(self):
        super().__init__()
        self.tower = nn.ModuleList(Block() for _ in range(2))

    def trunk(self, x):
        has_image = bool(x[0, 0, 0] > 0)
        image = x.flip(1) if has_image else torch.zeros_like(x)
        for block in self.tower:
            image = block(image)
        return super().trunk(x) + image * float(has_image)


@pattern(refused={3: OUT_OF_STEP})
class MixedModalityApart(MixedModality):
    """The same, but a rank without the second modality skips the tower's units."""

    def trunk(self, x):
        h = Base.trunk(self, x)
        if bool(x[0, 0, 0] > 0):
            for block in self.tower:
                x = block(x)
            h = h + x
        return h


class FewTokens(Base):
    """An expert layer outside the blocks; on one rank an expert gets nothing."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(3))

    def trunk(self, x):
        x = super().trunk(x)
        for index, expert in enumerate(self.experts):
            chosen = x[..., 0] * (index - 1) > 0.2 * x[0, 0, 0].sign()
            if index != 1 and chosen.any():
                x = x.masked_scatter(chosen.unsqueeze(-1), expert(x[chosen]))
        return self.experts[1](x) if bool(x[0, 0, 1] > 0) else x


@pattern(refused={3: OUT_OF_STEP})
class ExpertsAsUnits(FewTokens):
    """Experts that are units of their own, because they are the repeated children of a list."""


@pattern()
class ExpertsMarkedAsLeaf(FewTokens):
    """The same with the list marked by set_z3_leaf_module: its experts are one unit."""

    def __init__(self):
        from stateroom.utils import set_z3_leaf_module

        super().__init__()
        set_z3_leaf_module(self.experts, True)


@pattern(refused={3: OUT_OF_STEP})
class DifferentDepths(Base):
    """A block is called more often on one rank than on the other."""

    def trunk(self, x):
        for _ in range(1 + int(x[0, 0, 0] > 0)):
            x = torch.tanh(self.blocks[1](x))
        return x
