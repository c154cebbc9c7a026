"""Patterns of what happens in autograd: recompute, hooks, functions of the user's own, higher derivatives, torch.func, compile."""

from __future__ import annotations

from functools import partial

import base
import torch
import torch.nn.functional as F
from base import Base, Block, D
from case import Case
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

CASES: list[Case] = []
pattern = partial(base.pattern, CASES)


# ---- recompute


@pattern()
class Checkpointed(Base):
    """Each block is recomputed."""

    def trunk(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pattern()
class CheckpointedReentrant(Base):
    """Each block is recomputed in the older mode."""

    def trunk(self, x):
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


@pattern()
class CheckpointedNested(Base):
    """A recomputed function within a recomputed function."""

    def trunk(self, x):
        def inner(x):
            return checkpoint(self.blocks[1], self.blocks[0](x), use_reentrant=False)

        return self.blocks[2](checkpoint(inner, x, use_reentrant=False))


@pattern()
class CheckpointedInside(Base):
    """Blocks recompute a part of themselves, one in each mode."""

    class Inside(Block):
        def forward(self, x):
            h = checkpoint(self.up, self.norm(x), use_reentrant=False)
            return x + checkpoint(self.down, F.gelu(h), use_reentrant=True)

    block = Inside


@pattern()
class CheckpointedSegments(Base):
    """checkpoint_sequential over a Sequential, with dropout whose random state is restored."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(Block(), nn.Dropout(0.2)) for _ in range(4)))

    def trunk(self, x):
        return checkpoint_sequential(self.net, 2, super().trunk(x), use_reentrant=False)


@pattern()
class CheckpointedFrozen(Base):
    """Recomputed blocks with frozen layers."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.up.requires_grad_(False)
            block.norm.requires_grad_(False)

    def trunk(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pattern()
class CheckpointedTwice(Base):
    """A recomputed block is called again, in the other mode."""

    def trunk(self, x):
        x = checkpoint(self.blocks[0], x.requires_grad_(), use_reentrant=True)
        x = self.blocks[2](checkpoint(self.blocks[1], x, use_reentrant=False))
        return checkpoint(self.blocks[0], x, use_reentrant=False)


# ---- functions of the user's own


class Scale(torch.autograd.Function):
    """A linear layer that saves its weight."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.flatten(0, 1).t() @ x.flatten(0, 1)


@pattern()
class CustomFunction(Base):
    """An autograd function that saves a parameter."""

    class Own(Block):
        def forward(self, x):
            return super().forward(x) + Scale.apply(Scale.apply(x, self.up.weight), self.down.weight)

    block = Own

    def forward(self, x, ids, y, step=0):
        return F.mse_loss(Scale.apply(self.trunk(x), self.out.weight), y)


class Reverse(torch.autograd.Function):
    """Two coupled blocks that keep only their output and recompute their inputs from it."""

    @staticmethod
    def forward(ctx, x, f, g):
        ctx.f, ctx.g = f, g
        with torch.no_grad():
            a, b = x.chunk(2, -1)
            a = a + f(b)
            b = b + g(a)
        out = torch.cat([a, b], -1)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        a, b = out.chunk(2, -1)
        grad_a, grad_b = grad.chunk(2, -1)
        with torch.enable_grad():
            a = a.detach().requires_grad_()
            shift = ctx.g(a)
            torch.autograd.backward(shift, grad_b)
        b, grad_a = (b - shift).detach().requires_grad_(), grad_a + a.grad
        with torch.enable_grad():
            torch.autograd.backward(ctx.f(b), grad_a)
        return torch.cat([grad_a, grad_b + b.grad], -1), None, None


@pattern()
class Reversible(Base):
    """Reversible blocks: an autograd function that runs modules, and their backward, in its own backward."""

    def __init__(self):
        super().__init__()
        self.pairs = nn.ModuleList(nn.ModuleList(Block(D // 2) for _ in range(2)) for _ in range(2))

    def trunk(self, x):
        for f, g in self.pairs:
            x = Reverse.apply(x.requires_grad_(), f, g)
        return super().trunk(x)


# ---- hooks


@pattern()
class ForwardHooks(Base):
    """The user's own forward hooks, and a gradient hook on a parameter."""

    def __init__(self):
        super().__init__()
        self.blocks[0].register_forward_hook(lambda module, args, out: out * 1.5)
        self.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))
        self.blocks[2].register_forward_hook(lambda module, args, kwargs, out: out + args[0], with_kwargs=True)
        self.out.weight.register_hook(lambda grad: grad * 0.5)
        self.blocks[1].up.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))


@pattern()
class BackwardHooks(Base):
    """Full backward hooks and pre-hooks that change gradients, and a hook on a tensor."""

    def __init__(self):
        super().__init__()
        self.blocks[0].register_full_backward_hook(lambda module, given, got: tuple(None if g is None else 0.5 * g for g in given))
        self.blocks[1].register_full_backward_pre_hook(lambda module, got: tuple(2.0 * g for g in got))
        self.blocks[2].up.register_full_backward_hook(lambda module, given, got: None)

    def trunk(self, x):
        x = self.blocks[1](self.blocks[0](x.requires_grad_()))
        x.register_hook(lambda grad: grad * 0.7)
        return self.blocks[2](x)


@pattern()
class ActivationsByHook(Base):
    """A forward hook keeps the blocks' outputs, and the loss uses them (feature distillation, probes)."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.register_forward_hook(self.keep)

    def keep(self, module, args, out):
        self.seen.append(out)

    def forward(self, x, ids, y, step=0):
        self.seen = []
        loss = super().forward(x, ids, y)
        return loss + 0.01 * sum(h.square().mean() for h in self.seen)


# ---- higher derivatives


@pattern()
class InputGradient(Base):
    """A penalty on the gradient with respect to an input."""

    def forward(self, x, ids, y, step=0):
        x = x.clone().requires_grad_()
        h = self.out(self.trunk(x))
        (g,) = torch.autograd.grad(h.square().mean(), x, create_graph=True)
        return F.mse_loss(h, y) + g.square().sum()


@pattern()
class WeightGradient(Base):
    """A penalty on the gradient with respect to weights, inside the forward."""

    def forward(self, x, ids, y, step=0):
        loss = super().forward(x, ids, y)
        grads = torch.autograd.grad(loss, [block.up.weight for block in self.blocks], create_graph=True)
        return loss + sum(g.square().sum() for g in grads)


@pattern()
class InnerLoop(Base):
    """A step of gradient descent inside the forward, differentiated through (MAML)."""

    def forward(self, x, ids, y, step=0):
        names, fast = zip(*self.blocks.named_parameters(), strict=True)
        inner = F.mse_loss(self.trunk(x), y)
        grads = torch.autograd.grad(inner, fast, create_graph=True)
        fast = {name: p - 0.1 * g for name, p, g in zip(names, fast, grads, strict=True)}
        h = x
        for index, block in enumerate(self.blocks):
            mine = {name.split(".", 1)[1]: p for name, p in fast.items() if name.startswith(f"{index}.")}
            h = torch.func.functional_call(block, mine, (h,))
        return F.mse_loss(self.out(h), y)


# ---- torch.func


@pattern()
class FunctionalCall(Base):
    """torch.func.functional_call with the model's own parameters."""

    def forward(self, x, ids, y, step=0):
        h = self.trunk(x)
        h = torch.func.functional_call(self.blocks[1], dict(self.blocks[1].named_parameters()), (h,))
        return F.mse_loss(torch.func.functional_call(self.out, dict(self.out.named_parameters()), (h,)), y)


@pattern()
class FuncGrad(Base):
    """torch.func.grad and vmap over samples: a per-sample gradient of the input in the loss."""

    def forward(self, x, ids, y, step=0):
        h = self.trunk(x)
        per_sample = torch.func.vmap(torch.func.grad(lambda s: torch.tanh(self.out(s)).sum()))(h)
        return F.mse_loss(self.out(h), y) + per_sample.square().mean()


@pattern(no_bf16="forward-mode derivatives of the block's layers are not there for bfloat16 on CPU")
class FuncJvp(Base):
    """torch.func.jvp through a block: a directional derivative in the loss."""

    def forward(self, x, ids, y, step=0):
        h, along = torch.func.jvp(lambda s: torch.tanh(self.out(s)), (self.trunk(x),), (torch.ones_like(x),))
        return F.mse_loss(h, y) + along.square().mean()


@pattern()
class Ensemble(Base):
    """vmap over stacked copies of the weights of equal heads."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(D, D) for _ in range(3))

    def forward(self, x, ids, y, step=0):
        h = self.trunk(x)
        weight, bias = (torch.stack([getattr(head, name) for head in self.heads]) for name in ("weight", "bias"))
        outs = torch.func.vmap(lambda w, b: F.linear(h, w, b))(weight, bias)
        return F.mse_loss(outs.mean(0), y) + 0.1 * outs.var(0).mean()


# ---- saved tensors, compile, in place


@pattern()
class SavedOnHost(Base):
    """save_on_cpu around a part of the forward: saved weights are copied, not viewed."""

    def trunk(self, x):
        with torch.autograd.graph.save_on_cpu():
            return super().trunk(x)


@pattern()
class CompiledInside(Base):
    """A block that the user's model itself has compiled, and a compiled function."""

    def __init__(self):
        super().__init__()
        self.blocks[1] = torch.compile(self.blocks[1], backend="eager")
        self.act = torch.compile(lambda x: F.gelu(x) * 1.1, backend="eager")

    def forward(self, x, ids, y, step=0):
        return F.mse_loss(self.out(self.act(self.trunk(x))), y)


@pattern()
class Scripted(Base):
    """Blocks that were compiled to TorchScript, which takes no hooks."""

    def __init__(self):
        super().__init__()
        self.scripted = nn.ModuleList(torch.jit.script(nn.Sequential(nn.Linear(D, D), nn.Tanh())) for _ in range(2))

    def trunk(self, x):
        for block in self.scripted:
            x = block(x)
        return super().trunk(x)


@pattern()
class InPlaceOutputs(Base):
    """Outputs of a unit are changed in place afterwards."""

    def trunk(self, x):
        for block in self.blocks:
            h = block(x)
            h += 0.5 * x
            x = h.mul_(0.9)
        return x


@pattern()
class InPlaceInputs(Base):
    """Blocks change their input in place."""

    class Adds(Block):
        def forward(self, x):
            x += self.down(F.gelu(self.up(self.norm(x.clone()))))
            return x

    block = Adds

    def trunk(self, x):
        return super().trunk(x * 1.0)


@pattern()
class Dropout(Base):
    """Dropout: every rank draws its own numbers, and the engine draws none."""

    def block(self):
        return nn.Sequential(Block(), nn.Dropout(0.3))


@pattern()
class Autocast(Base):
    """A region of the forward that the user runs under autocast."""

    def trunk(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().trunk(x).to(x.dtype)
