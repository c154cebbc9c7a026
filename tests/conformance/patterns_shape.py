"""Patterns of how modules are built: containers, outputs and inputs of odd kinds, routing, replaced forwards, recurrent layers."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from functools import partial
from typing import Any

import base
import torch
import torch.nn.functional as F
from base import B, Base, Block, D, T, data
from case import Call, Case, one_loss
from torch import nn

CASES: list[Case] = []
pattern = partial(base.pattern, CASES)


# ---- outputs and inputs


@pattern()
class DictOutput(Base):
    """Blocks that return nested dicts and tuples."""

    class Wraps(Block):
        def forward(self, x):
            return {"hidden": (super().forward(x),)}

    block = Wraps

    def trunk(self, x):
        for block in self.blocks:
            x = block(x)["hidden"][0]
        return x


Pair = namedtuple("Pair", "hidden aux")


@dataclasses.dataclass
class Result:
    hidden: torch.Tensor
    extra: Any = None


class Opaque:
    """An output that nobody can look into."""

    __slots__ = ("hidden",)

    def __init__(self, hidden):
        self.hidden = hidden


@pattern()
class OddOutputs(Base):
    """Blocks that return a namedtuple, a dataclass, a nested dict, a view and an object with slots."""

    def __init__(self):
        super().__init__()

        class Wrap(nn.Module):
            def __init__(self, kind):
                super().__init__()
                self.block, self.kind = Block(), kind

            def forward(self, x):
                h = self.block(x)
                return [Pair(h, h.sum()), Result(h, {"a": [h]}), {"deep": [{"h": (h, None)}]}, h.view(B * T, D), Opaque(h)][self.kind]

        self.blocks = nn.ModuleList(Wrap(k) for k in range(5))

    def trunk(self, x):
        x = self.blocks[0](x).hidden
        x = self.blocks[1](x).hidden
        x = self.blocks[2](x)["deep"][0]["h"][0]
        x = self.blocks[3](x).view(B, T, D)
        return self.blocks[4](x).hidden


@pattern()
class ListInputs(Base):
    """Inputs as keyword arguments, nested."""

    class Kw(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, *, state):
            return {"x": [self.block(state["x"][0])]}

    block = Kw

    def trunk(self, x):
        state = {"x": [x]}
        for block in self.blocks:
            state = block(state=state)
        return state["x"][0]


def as_dataclass(call: Call, step: int, rank: int) -> torch.Tensor:
    x, ids, y = data(step, rank)
    dtype = call.module.out.weight.dtype
    return call(Result(x.to(dtype), {"ids": ids, "y": [y.to(dtype)]}))


@pattern(phases=one_loss(as_dataclass))
class DataclassInput(Base):
    """One input: a dataclass with a nested dict."""

    def forward(self, batch):
        return F.mse_loss(self.out(self.trunk(batch.hidden)), batch.extra["y"][0])


@pattern()
class HandsThrough(Base):
    """Blocks hand a tensor through beside their own output, as relative positions travel in T5."""

    def __init__(self):
        super().__init__()
        self.start = nn.Linear(D, D)

    class Through(Block):
        def forward(self, x, bias):
            return super().forward(x + bias), bias

    block = Through

    def trunk(self, x):
        bias = self.start(x)
        for block in self.blocks:
            x, bias = block(x, bias)
        return x + bias


@pattern()
class NoInputs(Base):
    """Modules that take nothing and return a function of their weights."""

    def __init__(self):
        super().__init__()

        class Position(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Parameter(torch.randn(T, D) * 0.1)

            def forward(self):
                return self.table.cumsum(0)

        self.positions = nn.ModuleList(Position() for _ in range(2))

    def trunk(self, x):
        return super().trunk(x + self.positions[0]() + self.positions[1]())


# ---- structure


@pattern()
class SequentialOfSequentials(nn.Module):
    """Sequential in Sequential."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)) for _ in range(3)])

    def forward(self, x, ids, y, step=0):
        return F.mse_loss(self.net(x), y)


@pattern()
class ParameterFree(Base):
    """Modules without parameters between the blocks, in the list and as the list's every other child."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Identity(), Block(), nn.Flatten(0, 1), nn.Unflatten(0, (B, T)), Block(), nn.ModuleList(), nn.Tanh()]
        )

    def trunk(self, x):
        for block in self.blocks:
            x = x if isinstance(block, nn.ModuleList) else block(x)
        return x


@pattern()
class ContainerWithForward(Base):
    """A ModuleList with a forward of its own, and a ModuleDict that is an expert layer."""

    def __init__(self):
        super().__init__()

        class Stack(nn.ModuleList):
            def forward(self, x):
                for block in self:
                    x = block(x)
                return x

        class Choice(nn.ModuleDict):
            def forward(self, x, names):
                return sum(self[name](x) for name in names)

        self.blocks = Stack(Block() for _ in range(3))
        self.choice = Choice({name: Block() for name in "abc"})

    def forward(self, x, ids, y, step=0):
        return F.mse_loss(self.out(self.choice(self.blocks(x), "ab" if step % 2 else "bc")), y)


@pattern()
class ContainerWithWeights(Base):
    """A module with parameters of its own that is also the list of its blocks."""

    def __init__(self):
        super().__init__()

        class Stack(nn.ModuleList):
            def __init__(self, blocks):
                super().__init__(blocks)
                self.gain = nn.Parameter(torch.ones(D))

            def forward(self, x):
                for block in self:
                    x = block(x) * self.gain
                return x

        self.blocks = Stack(Block() for _ in range(3))

    def trunk(self, x):
        return self.blocks(x)


@pattern()
class ModuleDictRouting(Base):
    """A ModuleDict whose entry is chosen by name in each step."""

    def __init__(self):
        super().__init__()
        self.tasks = nn.ModuleDict({name: Block() for name in ("parse", "tag", "translate")})

    def forward(self, x, ids, y, step=0):
        return F.mse_loss(self.out(self.tasks[("parse", "tag", "translate")[step % 3]](self.trunk(x))), y)


@pattern()
class ForwardOnInstance(Base):
    """`forward` replaced on the instances, as wrappers and patches do it."""

    def __init__(self):
        super().__init__()
        for block in self.blocks[:2]:
            block.forward = partial(self.doubled, block.forward)

    @staticmethod
    def doubled(forward, x):
        return forward(x) * 2 - x


@pattern()
class NotByCall(Base):
    """Blocks are used through another method than forward, so no hook on the module runs."""

    class Other(Block):
        def encode(self, x):
            return x + self.down(F.gelu(self.up(self.norm(x))))

    block = Other

    def trunk(self, x):
        for block in self.blocks:
            x = block.encode(x)
        return x


@pattern()
class Rows(nn.Module):
    """Layers that are lists of their parts: `for attention, mlp in self.layers`."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.GRU(D, D, batch_first=True), Block()]) for _ in range(2))

    def forward(self, x, ids, y, step=0):
        for mix, block in self.layers:
            x = block(x + mix(x)[0])
        return F.mse_loss(x, y)


@pattern()
class DeepNesting(nn.Module):
    """Lists of lists of blocks under modules without parameters of their own."""

    def __init__(self):
        super().__init__()
        self.levels = nn.ModuleList(
            nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(2)), "out": nn.Linear(D, D)}) for _ in range(2)
        )

    def forward(self, x, ids, y, step=0):
        for level in self.levels:
            for block in level["blocks"]:
                x = block(x)
            x = level["out"](x)
        return F.mse_loss(x, y)


@pattern()
class SkipConnections(Base):
    """A U: outputs of the first blocks are used again by the last."""

    depth = 4

    def trunk(self, x):
        down = []
        for block in self.blocks[:2]:
            x = block(x)
            down.append(x)
        for block in self.blocks[2:]:
            x = block(x) + down.pop()
        return x


# ---- recurrent and convolutional layers


@pattern()
class LSTM(Base):
    """nn.LSTM: weights that the library wants in one piece of memory."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(D, D, 2, batch_first=True)

    def forward(self, x, ids, y, step=0):
        return F.mse_loss(self.out(self.rnn(self.trunk(x))[0]), y)


@pattern()
class GRUs(Base):
    """Bidirectional GRUs as repeated units, on packed sequences of other lengths."""

    def __init__(self):
        super().__init__()
        self.rnns = nn.ModuleList(nn.GRU(D, D // 2, batch_first=True, bidirectional=True) for _ in range(2))

    def forward(self, x, ids, y, step=0):
        for rnn in self.rnns:
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([T, T - 1, T - 2]), batch_first=True)
            x, _ = nn.utils.rnn.pad_packed_sequence(rnn(packed)[0], batch_first=True, total_length=T)
        return F.mse_loss(self.out(self.trunk(x)), y)


@pattern()
class ConvNet(nn.Module):
    """Convolutions in named stages of Sequential, as ResNets have them."""

    def __init__(self):
        super().__init__()

        class Basic(nn.Module):
            def __init__(self):
                super().__init__()
                self.c1, self.c2 = nn.Conv1d(D, D, 3, padding=1), nn.Conv1d(D, D, 3, padding=1)

            def forward(self, x):
                return x + self.c2(F.relu(self.c1(x)))

        self.stem = nn.Conv1d(D, D, 3, padding=1)
        self.layer1, self.layer2 = nn.Sequential(Basic(), Basic()), nn.Sequential(Basic(), Basic())

    def forward(self, x, ids, y, step=0):
        return F.mse_loss(self.layer2(self.layer1(self.stem(x.transpose(1, 2)))).transpose(1, 2), y)
