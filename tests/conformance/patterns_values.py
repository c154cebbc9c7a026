"""Patterns of what travels between modules: complex, sparse and nested tensors, distributions, generators, closures, parameters."""

from __future__ import annotations

from functools import partial

import base
import torch
import torch.nn.functional as F
from base import B, Base, Block, D, T
from case import Case
from torch import nn
from torch.nn.utils import prune

CASES: list[Case] = []
pattern = partial(base.pattern, CASES)


@pattern(no_bf16="complex numbers have no bfloat16")
class Spectral(Base):
    """Blocks whose outputs are complex."""

    class Fourier(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(D, D)
            self.filter = nn.Parameter(torch.randn(D, 2))

        def forward(self, x):
            return torch.fft.fft(self.layer(x), dim=-1) * torch.view_as_complex(self.filter)

    block = Fourier

    def trunk(self, x):
        for block in self.blocks:
            x = torch.fft.ifft(block(x), dim=-1).real
        return x


@pattern(no_bf16="sparse products have no bfloat16 on CPU")
class SparseTensors(Base):
    """Blocks that take and return a sparse matrix beside their activations."""

    class Neighbours(Block):
        def forward(self, x, edges):
            return super().forward(torch.sparse.mm(edges, x)), edges

    block = Neighbours

    def trunk(self, x):
        edges = (torch.eye(B * T) + torch.diag(torch.full((B * T - 1,), 0.5), 1)).to_sparse()
        h = x.flatten(0, 1)
        for block in self.blocks:
            h, edges = block(h, edges)
        return h.view(B, T, D)


@pattern()
class NestedTensors(Base):
    """Sequences of other lengths as one jagged tensor."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(D, D)

        def forward(self, x):
            return torch.tanh(self.layer(x))

    block = Layer

    def trunk(self, x):
        nested = torch.nested.nested_tensor([x[0, :2], x[1, :4], x[2]], layout=torch.jagged)
        return torch.nested.to_padded_tensor(super().trunk(nested), 0.0)


@pattern()
class Distributions(Base):
    """Blocks that return a torch.distributions object, of which the caller draws."""

    class Normal(Block):
        def forward(self, x):
            return torch.distributions.Normal(super().forward(x), F.softplus(self.up(x)[..., :D]) + 0.1)

    block = Normal

    def trunk(self, x):
        for block in self.blocks:
            x = block(x).rsample()
        return x


@pattern()
class Generators(Base):
    """Forwards that are generators: their bodies run when the caller asks, after the call."""

    class Yields(Block):
        def forward(self, x):
            yield super().forward(x)
            yield self.up(x)

    block = Yields

    def trunk(self, x):
        for block in self.blocks:
            h, wide = block(x)
            x = h + wide.mean()
        return x


@pattern()
class Closures(Base):
    """Blocks that return a function, which uses their weights later."""

    class Makes(Block):
        def forward(self, x):
            return lambda y: Block.forward(self, y) + x

    block = Makes

    def trunk(self, x):
        for block in self.blocks:
            x = block(x)(x)
        return x


@pattern()
class ReturnsItsParameter(Base):
    """Modules that return a parameter itself, to be used after other blocks have run."""

    class Book(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(D, D, bias=False)

        def forward(self):
            return self.layer.weight

    def __init__(self):
        super().__init__()
        self.books = nn.ModuleList(self.Book() for _ in range(2))

    def trunk(self, x):
        first, second = (book() for book in self.books)
        return super().trunk(x) @ first @ second


@pattern()
class ManyOutputs(Base):
    """Blocks that return their output, a function of the input without a weight, and the input itself."""

    class Three(Block):
        def forward(self, x):
            return super().forward(x), x * 2.0, x

    block = Three

    def trunk(self, x):
        total = 0.0
        for block in self.blocks:
            x, double, same = block(x)
            total = total + double + same
        return x + total


@pattern()
class Pruned(Base):
    """torch.nn.utils.prune: the weight is made anew from a mask in a forward pre-hook."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            prune.l1_unstructured(block.up, "weight", amount=0.3)


@pattern()
class AccumulationHooks(Base):
    """The user's own hooks on gradients that have been accumulated."""

    def __init__(self):
        super().__init__()
        for param in self.blocks.parameters():
            param.register_post_accumulate_grad_hook(self.halve)

    @staticmethod
    def halve(param):
        param.grad.mul_(0.5)
