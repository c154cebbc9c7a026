"""Patterns of who uses a parameter: tied, used again, read elsewhere, not used."""

from __future__ import annotations

from functools import partial

import base
import torch
import torch.nn.functional as F
from base import Base, Block, D, V
from case import Case
from torch import nn

CASES: list[Case] = []
pattern = partial(base.pattern, CASES)


@pattern()
class Plain(Base):
    """A trunk of residual blocks."""


# ---- tied and used again


@pattern()
class TiedWithinUnit(Base):
    """One weight for both layers of a block."""

    def block(self):
        block = Block()
        block.up = nn.Linear(D, D)
        block.down = nn.Linear(D, D)
        block.down.weight = block.up.weight
        return block


@pattern()
class TiedAcrossUnits(Base):
    """One weight in two blocks of the list."""

    def __init__(self):
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


@pattern()
class TiedEmbedding(Base):
    """Embedding and head share their weight."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x, ids, y, step=0):
        return F.cross_entropy(self.head(self.trunk(self.emb(ids))).flatten(0, 1), ids.flatten())


@pattern()
class CalledTwice(Base):
    """A block is called again after the others."""

    def forward(self, x, ids, y, step=0):
        x = self.blocks[1](self.blocks[0](x))
        return F.mse_loss(self.out(self.blocks[0](self.blocks[2](x))), y)


@pattern()
class CalledInALoop(Base):
    """A recurrent cell, called once for each position: back-propagation through time."""

    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList(nn.Sequential(nn.Linear(2 * D, D), nn.Tanh()) for _ in range(2))

    def trunk(self, x):
        h = torch.zeros_like(x[:, 0])
        states = []
        for t in range(x.shape[1]):
            for cell in self.cells:
                h = cell(torch.cat([x[:, t], h], -1))
            states.append(h)
        return super().trunk(torch.stack(states, 1))


@pattern()
class SharedBlock(Base):
    """The same module object stands twice in the list."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0], self.blocks[1], self.blocks[0]])


# ---- read outside the own forward


@pattern()
class ReadsOthersWeight(Base):
    """A functional call on parameters of other units."""

    def forward(self, x, ids, y, step=0):
        x = self.trunk(x)
        x = F.linear(x, self.blocks[0].up.weight) @ self.blocks[1].up.weight
        return F.mse_loss(self.out(x), y)


@pattern()
class EmbeddingAsHead(Base):
    """The embedding matrix of another module as output head."""

    def __init__(self):
        super().__init__()
        self.words = nn.ModuleList(nn.Embedding(V, D) for _ in range(2))

    def forward(self, x, ids, y, step=0):
        h = self.trunk(self.words[0](ids) + self.words[1](ids))
        return F.cross_entropy((h @ self.words[0].weight.t()).flatten(0, 1), ids.flatten())


@pattern()
class WeightAsPlainAttribute(Base):
    """A block keeps the weight of the one before it as a plain attribute, unknown to nn.Module."""

    def __init__(self):
        super().__init__()

        class Reads(Block):
            def forward(self, x):
                return super().forward(x) + F.linear(x, self.others[0]) @ self.others[0]

        self.blocks.append(Reads())
        self.blocks[-1].others = [self.blocks[1].up.weight]


@pattern()
class CallsAnotherBlock(Base):
    """A block calls a block of another unit, which it reaches through a list."""

    def __init__(self):
        super().__init__()

        class Calls(Block):
            def forward(self, x):
                return super().forward(self.others[0](x))

        self.blocks.append(Calls())
        self.blocks[-1].others = [self.blocks[1]]


@pattern()
class WeightAsPenalty(Base):
    """Weight decay written into the loss."""

    def forward(self, x, ids, y, step=0):
        loss = super().forward(x, ids, y)
        return loss + 1e-2 * sum((p**2).sum() for p in self.parameters())


@pattern()
class ParameterListModel(Base):
    """A ParameterList that the root indexes while blocks run."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(D)) for _ in range(3))

    def forward(self, x, ids, y, step=0):
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = block(x) * scale
        return F.mse_loss(self.out(x), y)


@pattern()
class ParameterListReadElsewhere(Base):
    """A block owns a ParameterList and a ParameterDict, and the other blocks' loop reads them."""

    def __init__(self):
        super().__init__()
        self.blocks[0].scales = nn.ParameterList(nn.Parameter(torch.ones(D)) for _ in range(3))
        self.blocks[1].shifts = nn.ParameterDict({"a": nn.Parameter(torch.zeros(D)), "b": nn.Parameter(torch.zeros(D))})

    def trunk(self, x):
        for block, scale in zip(self.blocks, self.blocks[0].scales, strict=True):
            x = block(x) * scale + self.blocks[1].shifts["a"]
        return x + self.blocks[1].shifts["b"]


@pattern()
class HyperNetwork(Base):
    """One module makes the weights that another applies."""

    def __init__(self):
        super().__init__()
        self.code = nn.Parameter(torch.randn(4))
        self.makers = nn.ModuleList(nn.Sequential(nn.Linear(4, D * D), nn.Tanh()) for _ in range(2))

    def trunk(self, x):
        for maker in self.makers:
            x = x + F.linear(x, maker(self.code).view(D, D))
        return super().trunk(x)


@pattern()
class ViewsOfWeights(Base):
    """A fused weight is split and used in parts."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)

    def forward(self, x, ids, y, step=0):
        q, k, v = (F.linear(x, w, b) for w, b in zip(self.qkv.weight.chunk(3), self.qkv.bias.chunk(3), strict=True))
        return F.mse_loss(self.out(self.trunk(F.scaled_dot_product_attention(q, k, v))), y)


@pattern()
class WeightLeavesItsBlock(Base):
    """A block returns a view of its own weight, and the root uses it later."""

    def __init__(self):
        super().__init__()

        class Shows(Block):
            def forward(self, x):
                return super().forward(x), self.down.weight.t()

        self.shows = nn.ModuleList(Shows() for _ in range(2))

    def trunk(self, x):
        seen = []
        for block in self.shows:
            x, weight = block(x)
            seen.append(weight)
        return super().trunk(x) + sum(x @ weight.t() @ weight for weight in seen) * 0.1


# ---- unused


@pattern()
class Unused(Base):
    """A block and a layer that no forward ever uses."""

    def __init__(self):
        super().__init__()
        self.blocks.append(Block())
        self.extra = nn.Linear(D, D)

    def trunk(self, x):
        for block in self.blocks[:3]:
            x = block(x)
        return x


@pattern()
class UnusedInsideBlocks(Base):
    """Each block has a layer that it does not use, or not in every step."""

    def block(self):
        block = Block()
        block.never, block.sometimes = nn.Linear(D, D), nn.Linear(D, D)
        return block

    def forward(self, x, ids, y, step=0):
        for block in self.blocks:
            x = block(x)
            x = block.sometimes(x) if step % 3 == 1 else x
        return F.mse_loss(self.out(x), y)


@pattern()
class AlternatingHeads(Base):
    """Another head each step."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x, ids, y, step=0):
        return F.mse_loss(self.heads[step % 2](self.trunk(x)), y)


@pattern()
class DetachedBranch(Base):
    """A block runs, and nothing of it reaches the loss."""

    def forward(self, x, ids, y, step=0):
        h = self.blocks[1](self.blocks[0](x))
        with torch.no_grad():
            self.blocks[2](h)
        return F.mse_loss(self.out(h), y) + 0.0 * self.blocks[2](h).detach().sum()


@pattern()
class DetachedWeight(Base):
    """A weight is used again without its gradient: the backward needs it after its gradient is there."""

    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(D, D)

        def forward(self, x):
            return torch.tanh(self.layer(torch.tanh(F.linear(x, self.layer.weight.detach()))))

    block = Again
