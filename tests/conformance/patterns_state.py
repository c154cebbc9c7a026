"""Patterns of what a parameter or buffer is: frozen, of another dtype or size, quantized, reparametrized, normalised."""

from __future__ import annotations

from functools import partial

import base
import torch
import torch.nn.functional as F
from base import Base, Block, D, V, data
from case import Call, Case, everywhere, one_loss
from torch import nn
from torch.nn.utils import parametrizations

CASES: list[Case] = []
pattern = partial(base.pattern, CASES)


# ---- frozen


@pattern()
class Frozen(Base):
    """A block in the middle is frozen."""

    def __init__(self):
        super().__init__()
        self.blocks[1].requires_grad_(False)


@pattern()
class LoRA(Base):
    """Frozen weights with small trainable factors beside them, used by the loop around the blocks."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.a, block.b = nn.Parameter(torch.randn(2, D) * 0.1), nn.Parameter(torch.zeros(D, 2))

    def forward(self, x, ids, y, step=0):
        for block in self.blocks:
            x = block(x) + x @ block.a.t() @ block.b.t()
        return F.mse_loss(self.out(x), y)


@pattern()
class LoRAInside(Base):
    """Adapters used inside their block's forward; the head is frozen too."""

    def __init__(self):
        super().__init__()
        self.out.requires_grad_(False)

    class Adapted(Block):
        def __init__(self):
            super().__init__()
            self.requires_grad_(False)
            self.a, self.b = nn.Parameter(torch.randn(2, D) * 0.1), nn.Parameter(torch.zeros(D, 2))

        def forward(self, x):
            return super().forward(x) + x @ self.a.t() @ self.b.t()

    block = Adapted


def freezes_in_flight(call: Call, step: int, rank: int) -> torch.Tensor:
    for block in call.module.blocks:
        for layer in (block.norm, block.up):
            layer.requires_grad_(step % 6 < 3)
    return call(*data(step, rank))


@pattern(phases=one_loss(freezes_in_flight))
class FrozenInFlight(Base):
    """Layers of every block are frozen for three steps and trained for three."""


# ---- dtype, size, kind


@pattern(no_bf16="its head is made for double precision")
class MixedDtypes(Base):
    """A double-precision head in a single-precision model."""

    def __init__(self):
        super().__init__()
        self.out = self.out.double()

    def forward(self, x, ids, y, step=0):
        return F.mse_loss(self.out(self.trunk(x).double()).float(), y)


@pattern(no_bf16="it fixes its own dtypes")
class NormsInFp32(Base):
    """A bfloat16 model that keeps its norms in fp32 (without a precision block in the config)."""

    def __init__(self):
        super().__init__()
        self.to(torch.bfloat16)
        for block in self.blocks:
            block.norm.float()

    class Mixed(Block):
        def forward(self, x):
            return x + self.down(F.gelu(self.up(self.norm(x.float()).to(x.dtype))))

    block = Mixed

    def forward(self, x, ids, y, step=0):
        return F.mse_loss(self.out(self.trunk(x.to(torch.bfloat16))).float(), y)


@pattern()
class EmptyAndScalar(Base):
    """Parameters with no element, with one, and with none at all (register_parameter(None))."""

    def __init__(self):
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, D))
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.register_parameter("bias", None)

    def block(self):
        block = Block()
        block.empty = nn.Parameter(torch.empty(D, 0))
        block.register_parameter("bias", None)
        return block

    def forward(self, x, ids, y, step=0):
        rest = F.linear(x, self.empty).sum() + sum((x @ block.empty).sum() for block in self.blocks)
        return F.mse_loss(self.out(self.trunk(x)) * self.gain + rest, y)


@pattern()
class DeepAndTiny(nn.Module):
    """Many tiny parameters."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.full((D,), 1.0 + 0.001 * (i % 7 - 3))) for i in range(200))

    def forward(self, x, ids, y, step=0):
        for scale in self.scales:
            x = x * scale
        return F.mse_loss(x, y)


@pattern()
class HugeLayer(nn.Module):
    """One layer is nearly all of the model."""

    def __init__(self):
        super().__init__()
        self.emb, self.out = nn.Embedding(4096, D), nn.Linear(D, D)

    def forward(self, x, ids, y, step=0):
        return F.mse_loss(self.out(self.emb(ids * 300)), y)


@pattern()
class SparseEmbedding(Base):
    """Embeddings with sparse gradients, in the root and in a unit."""

    def __init__(self):
        super().__init__()
        self.emb = nn.ModuleList(nn.Embedding(V, D, sparse=True) for _ in range(2))

    def forward(self, x, ids, y, step=0):
        return F.mse_loss(self.out(self.trunk(self.emb[0](ids) + self.emb[1](ids.flip(1)))), y)


class Scaled(nn.Parameter):
    """A parameter class of the user's own, with an attribute."""

    def __new__(cls, value, unit="m"):
        made = super().__new__(cls, value)
        made.unit = unit
        return made


@pattern()
class ParameterSubclass(Base):
    """A Parameter class of the user's own, whose attribute the forward reads."""

    class Own(Block):
        def __init__(self):
            super().__init__()
            self.gain = Scaled(torch.ones(D), unit="km")

        def forward(self, x):
            assert isinstance(self.gain, Scaled)
            return super().forward(x) * self.gain * {"m": 1.0, "km": 0.5}[self.gain.unit]

    block = Own


@pattern()
class NotContiguous(Base):
    """Parameters whose memory is transposed, or channels last."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(2 * D, D).t())
        self.conv = nn.Conv2d(D, D, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x, ids, y, step=0):
        x = self.conv(x.transpose(1, 2).unsqueeze(-1)).squeeze(-1).transpose(1, 2)
        return F.mse_loss(self.out(self.trunk(x @ self.mix @ self.mix.t() * 0.1)), y)


# ---- quantized and frozen


class Packed(nn.Parameter):
    """Two 4-bit values a byte, with the state that makes them numbers again beside them."""

    def __new__(cls, data, quant_state=None):
        made = torch.Tensor._make_subclass(cls, data, False)
        made.quant_state = quant_state
        return made


class PackedLinear(nn.Module):
    """A frozen 4-bit layer and a trainable low-rank adapter."""

    def __init__(self):
        super().__init__()
        low, high = torch.randint(16, (2, D * D // 2), dtype=torch.uint8)
        self.weight = Packed(low | (high << 4), quant_state={"scale": torch.rand(D, 1) * 0.1, "shape": (D, D)})
        self.a, self.b = nn.Parameter(torch.randn(2, D) * 0.3), nn.Parameter(torch.zeros(D, 2))

    def forward(self, x):
        state, packed = self.weight.quant_state, self.weight
        whole = torch.stack([packed & 15, packed >> 4]).to(x.dtype).view(state["shape"]) - 8
        return x + F.linear(x, whole * state["scale"].to(x.dtype)) + x @ self.a.t() @ self.b.t()


@pattern()
class QuantizedParameter(Base):
    """Packed uint8 parameters with a quantization state as attribute, adapters beside them."""

    def block(self):
        return nn.Sequential(PackedLinear(), nn.LayerNorm(D))


@pattern()
class QuantizedBuffer(Base):
    """int8 weights and their scales as buffers, and an int8 parameter that needs no gradient."""

    class Int8(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.randint(-127, 128, (D, D), dtype=torch.int8))
            self.register_buffer("scale", torch.rand(D, 1) * 0.01)
            self.zero = nn.Parameter(torch.randint(-3, 4, (D, 1), dtype=torch.int8), requires_grad=False)
            self.norm = nn.LayerNorm(D)

        def forward(self, x):
            whole = (self.weight.to(x.dtype) - self.zero.to(x.dtype)) * self.scale.to(x.dtype)
            return x + F.linear(self.norm(x), whole)

    block = Int8


# ---- buffers


@pattern()
class BatchNorm(Base):
    """Batch statistics and running statistics are a rank's own, as in plain data parallelism."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(D)

    def forward(self, x, ids, y, step=0):
        return F.mse_loss(self.out(self.bn(self.trunk(x).transpose(1, 2)).transpose(1, 2)), y)


@pattern()
class Buffers(Base):
    """A running mean that the forward uses, a counter, and a table that is not saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(D))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.linspace(0, 1, T_MAX := 16).unsqueeze(1).expand(T_MAX, D).clone(), persistent=False)

    def forward(self, x, ids, y, step=0):
        self.count += 1
        self.mean.lerp_(x.detach().float().mean((0, 1)), 0.1)
        x = x - self.mean.to(x.dtype) + self.table[: x.shape[1]].to(x.dtype)
        return super().forward(x, ids, y)


# ---- parametrizations


@pattern()
class WeightNorm(Base):
    """torch.nn.utils.parametrizations.weight_norm on a layer of each block."""

    def block(self):
        block = Block()
        parametrizations.weight_norm(block.up)
        return block


@pattern()
class OldWeightNorm(Base):
    """The older weight_norm, which sets the weight as a plain attribute in a forward pre-hook."""

    def block(self):
        block = Block()
        old = nn.utils.weight_norm  # deprecated, and still what many speech models have
        block.up = old(block.up)
        return block


@pattern(cast_first="the power iteration multiplies the weight with buffers")
class SpectralNorm(Base):
    """Spectral norm: a power iteration on buffers in each forward."""

    def block(self):
        block = Block()
        parametrizations.spectral_norm(block.up)
        return block


@pattern(no_bf16="matrix exponentials and QR are not there for bfloat16")
class Orthogonal(Base):
    """An orthogonal parametrization of a square weight."""

    def __init__(self):
        super().__init__()
        self.turn = parametrizations.orthogonal(nn.Linear(D, D))

    def trunk(self, x):
        return super().trunk(self.turn(x))


# ---- weights written between steps


def clip_weights(module, whole):
    for param in module.parameters():
        with whole([param]), torch.no_grad():
            param.clamp_(-0.3, 0.3)


@pattern(follow=clip_weights)
class ClippedWeights(Base):
    """Weights are clipped to an interval after every update."""


# ---- refused


@pattern(refused=everywhere("is complex"))
class ComplexParameter(Base):
    """A complex parameter."""

    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.ones(D, dtype=torch.complex64))


@pattern(refused=everywhere("a lazy module"))
class LazyModule(Base):
    """A layer that takes its shape from the first input."""

    def __init__(self):
        super().__init__()
        self.out = nn.LazyLinear(D)


@pattern(refused=everywhere("has max_norm"))
class MaxNorm(Base):
    """An embedding whose forward changes its weight in place, by the tokens of one rank."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, D, max_norm=1.0)
