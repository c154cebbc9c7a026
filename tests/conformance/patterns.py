"""Things that real models do, each as the smallest model that does it: a class with `loss(step, rank)`."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

D, V, T, B = 8, 11, 5, 3
PATTERNS: dict[str, type[nn.Module]] = {}


def pattern(cls):
    """Register a model under its class name."""
    PATTERNS[cls.__name__] = cls
    return cls


def data(step: int, rank: int):
    """Return (x [B, T, D], ids [B, T], y [B, T, D]) of one micro-batch."""
    g = torch.Generator().manual_seed(97 * step + rank + 1)
    return torch.randn(B, T, D, generator=g), torch.randint(V, (B, T), generator=g), torch.randn(B, T, D, generator=g)


class Block(nn.Module):
    """A residual block."""

    def __init__(self, d=D):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Base(nn.Module):
    """A trunk of blocks and the usual loss."""

    depth = 3

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(self.depth))
        self.out = nn.Linear(D, D)

    def trunk(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x, ids, y, step: int = 0):
        return F.mse_loss(self.out(self.trunk(x)), y)


@pattern
class Plain(Base):
    pass


@pattern
class TiedAcrossUnits(Base):
    """One weight in two blocks of the list."""

    def __init__(self):
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


@pattern
class TiedEmbedding(Base):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x, ids, y, step=0):
        return F.cross_entropy(self.head(self.trunk(self.emb(ids))).flatten(0, 1), ids.flatten())


@pattern
class CalledTwice(Base):
    def forward(self, x, ids, y, step=0):
        x = self.blocks[1](self.blocks[0](x))
        return F.mse_loss(self.out(self.blocks[0](self.blocks[2](x))), y)


@pattern
class SharedBlock(Base):
    """The same module object stands twice in the list."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0], self.blocks[1], self.blocks[0]])


@pattern
class ReadsOthersWeight(Base):
    """A functional call on a parameter of another unit."""

    def forward(self, x, ids, y, step=0):
        x = self.trunk(x)
        x = F.linear(x, self.blocks[0].up.weight) @ self.blocks[1].up.weight
        return F.mse_loss(self.out(x), y)


@pattern
class WeightAsPenalty(Base):
    """Weight decay written into the loss."""

    def forward(self, x, ids, y, step=0):
        loss = super().forward(x, ids, y)
        return loss + 1e-2 * sum((p**2).sum() for p in self.parameters())


@pattern
class ParameterListModel(Base):
    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(D)) for _ in range(3))

    def forward(self, x, ids, y, step=0):
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = block(x) * scale
        return F.mse_loss(self.out(x), y)


@pattern
class Unused(Base):
    """A block and a layer that no forward uses."""

    def __init__(self):
        super().__init__()
        self.blocks.append(Block())
        self.extra = nn.Linear(D, D)

    def trunk(self, x):
        for block in self.blocks[:3]:
            x = block(x)
        return x


@pattern
class AlternatingHeads(Base):
    """Another head each step."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x, ids, y, step=0):
        return F.mse_loss(self.heads[step % 2](self.trunk(x)), y)


@pattern
class Frozen(Base):
    def __init__(self):
        super().__init__()
        for p in self.blocks[1].parameters():
            p.requires_grad_(False)


@pattern
class LoRA(Base):
    """Frozen weights with small trainable factors beside them."""

    def __init__(self):
        super().__init__()
        for p in self.parameters():
            p.requires_grad_(False)
        for block in self.blocks:
            block.a, block.b = nn.Parameter(torch.randn(2, D) * 0.1), nn.Parameter(torch.zeros(D, 2))

    def trunk(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x, ids, y, step=0):
        for block in self.blocks:
            x = block(x) + x @ block.a.t() @ block.b.t()
        return F.mse_loss(self.out(x), y)


@pattern
class LoRAInside(Base):
    """Adapters used inside their block's forward."""

    def __init__(self):
        super().__init__()

        class Adapted(Block):
            def __init__(self):
                super().__init__()
                for p in self.parameters():
                    p.requires_grad_(False)
                self.a, self.b = nn.Parameter(torch.randn(2, D) * 0.1), nn.Parameter(torch.zeros(D, 2))

            def forward(self, x):
                return super().forward(x) + x @ self.a.t() @ self.b.t()

        self.blocks = nn.ModuleList(Adapted() for _ in range(3))
        self.out.requires_grad_(False)


@pattern
class DictOutput(Base):
    def trunk(self, x):
        for block in self.blocks:
            x = {"hidden": (block(x),)}["hidden"][0]
        return x


Pair = namedtuple("Pair", "hidden aux")


@dataclasses.dataclass
class Result:
    hidden: torch.Tensor
    extra: Any = None


@pattern
class OddOutputs(Base):
    """Blocks that return a namedtuple, a dataclass, a nested dict and a view."""

    def __init__(self):
        super().__init__()

        class Wrap(nn.Module):
            def __init__(self, kind):
                super().__init__()
                self.block, self.kind = Block(), kind

            def forward(self, x):
                h = self.block(x)
                return [Pair(h, h.sum()), Result(h, {"a": [h]}), {"deep": [{"h": (h, None)}]}, h.view(B * T, D)][self.kind]

        self.blocks = nn.ModuleList(Wrap(k) for k in range(4))

    def trunk(self, x):
        x = self.blocks[0](x).hidden
        x = self.blocks[1](x).hidden
        x = self.blocks[2](x)["deep"][0]["h"][0]
        return self.blocks[3](x).view(B, T, D)


@pattern
class Checkpointed(Base):
    def trunk(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pattern
class CheckpointedReentrant(Base):
    def trunk(self, x):
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


@pattern
class CheckpointedNested(Base):
    def trunk(self, x):
        def inner(x):
            return checkpoint(self.blocks[1], self.blocks[0](x), use_reentrant=False)

        return self.blocks[2](checkpoint(inner, x, use_reentrant=False))


@pattern
class CheckpointedFrozen(Base):
    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.up.requires_grad_(False)
            block.norm.requires_grad_(False)

    def trunk(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pattern
class CustomFunction(Base):
    """An autograd function that saves a parameter."""

    def trunk(self, x):
        for block in self.blocks:
            x = _Scale.apply(x, block.norm.weight) if False else block(x)
        return x

    def forward(self, x, ids, y, step=0):
        x = self.trunk(x)
        return F.mse_loss(_Scale.apply(x, self.out.weight), y)


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.flatten(0, 1).t() @ x.flatten(0, 1)


@pattern
class EmptyAndScalar(Base):
    """Parameters with no element and with one."""

    def __init__(self):
        super().__init__()
        self.empty = nn.Linear(D, 0, bias=False)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x, ids, y, step=0):
        return F.mse_loss(self.out(self.trunk(x)) * self.gain + self.empty(x).sum(), y)


@pattern
class SparseEmbedding(Base):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, D, sparse=True)

    def forward(self, x, ids, y, step=0):
        return F.mse_loss(self.out(self.trunk(self.emb(ids))), y)


@pattern
class MixedDtypes(Base):
    """A double-precision head in a single-precision model."""

    def __init__(self):
        super().__init__()
        self.out = self.out.double()

    def forward(self, x, ids, y, step=0):
        return F.mse_loss(self.out(self.trunk(x).double()).float(), y)


@pattern
class BatchNorm(Base):
    """Running statistics are a buffer: compared on equal data for every rank."""

    same_data = True

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(D)

    def forward(self, x, ids, y, step=0):
        return F.mse_loss(self.out(self.bn(self.trunk(x).transpose(1, 2)).transpose(1, 2)), y)


@pattern
class LSTM(Base):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(D, D, 2, batch_first=True)

    def forward(self, x, ids, y, step=0):
        return F.mse_loss(self.out(self.rnn(self.trunk(x))[0]), y)


@pattern
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


@pattern
class Experts(Base):
    """A mixture whose ranks take different experts: blocks chosen by the data."""

    def __init__(self):
        super().__init__()
        self.experts = nn.Module()
        self.experts.a, self.experts.b = Block(), Block()

    def forward(self, x, ids, y, step=0):
        h = self.trunk(x)
        h = self.experts.a(h) if bool(x.sum() > 0) else self.experts.b(h)
        return F.mse_loss(self.out(h), y)


@pattern
class ListInputs(Base):
    """Inputs as keyword arguments, nested."""

    def __init__(self):
        super().__init__()

        class Kw(nn.Module):
            def __init__(self):
                super().__init__()
                self.block = Block()

            def forward(self, *, state):
                return {"x": [self.block(state["x"][0])]}

        self.blocks = nn.ModuleList(Kw() for _ in range(3))

    def trunk(self, x):
        state = {"x": [x]}
        for block in self.blocks:
            state = block(state=state)
        return state["x"][0]


@pattern
class InputGradient(Base):
    """A penalty on the gradient with respect to an input (double backward)."""

    def forward(self, x, ids, y, step=0):
        x = x.clone().requires_grad_()
        h = self.out(self.trunk(x))
        (g,) = torch.autograd.grad(h.square().mean(), x, create_graph=True)
        return F.mse_loss(h, y) + g.square().sum()


@pattern
class FunctionalCall(Base):
    """torch.func.functional_call with the model's own parameters."""

    def forward(self, x, ids, y, step=0):
        h = self.trunk(x)
        return F.mse_loss(torch.func.functional_call(self.out, dict(self.out.named_parameters()), (h,)), y)


@pattern
class DeepAndTiny(nn.Module):
    """Many tiny parameters."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.full((D,), 1.0 + 0.001 * i)) for i in range(200))

    def forward(self, x, ids, y, step=0):
        for scale in self.scales:
            x = x * scale
        return F.mse_loss(x, y)


@pattern
class HugeLayer(nn.Module):
    """One layer is nearly all of the model."""

    def __init__(self):
        super().__init__()
        self.emb, self.out = nn.Embedding(4096, D), nn.Linear(D, D)

    def forward(self, x, ids, y, step=0):
        return F.mse_loss(self.out(self.emb(ids * 300)), y)


@pattern
class SequentialOfSequentials(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)) for _ in range(3)])

    def forward(self, x, ids, y, step=0):
        return F.mse_loss(self.net(x), y)


@pattern
class InPlaceOutputs(Base):
    """Outputs of a unit are changed in place afterwards."""

    def trunk(self, x):
        for block in self.blocks:
            h = block(x)
            h += 0.5 * x
            x = h.mul_(0.9) if False else h * 0.9
        return x


@pattern
class HooksOfTheUser(Base):
    """The user's own hooks on modules and on a parameter."""

    def __init__(self):
        super().__init__()
        self.blocks[0].register_forward_hook(lambda m, a, out: out * 1.5)
        self.blocks[1].register_forward_pre_hook(lambda m, a: (a[0] + 0.1,))
        self.out.weight.register_hook(lambda g: g * 0.5)


@pattern
class DetachedBranch(Base):
    """A block runs, and nothing of it reaches the loss."""

    def forward(self, x, ids, y, step=0):
        h = self.blocks[1](self.blocks[0](x))
        with torch.no_grad():
            self.blocks[2](h)
        return F.mse_loss(self.out(h), y) + 0.0 * self.blocks[2](h).detach().sum()


@pattern
class ViewsOfWeights(Base):
    """A fused weight is split and used in parts."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)

    def forward(self, x, ids, y, step=0):
        q, k, v = (F.linear(x, w, b) for w, b in zip(self.qkv.weight.chunk(3), self.qkv.bias.chunk(3), strict=True))
        return F.mse_loss(self.out(self.trunk(F.scaled_dot_product_attention(q, k, v))), y)
