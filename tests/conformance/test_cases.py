"""Cases that users of such engines reported, each as the whole kind; the id is in the test's name."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from base import Base, Block, D, data
from case import OUT_OF_STEP
from catalogue import CASES
from oracle import adamw, assert_close, drive, engine_for, plain, sgd
from torch import nn
from torch.utils.checkpoint import checkpoint

HERE = Path(__file__).parent
STAGES = (0, 1, 2, 3)
OPTIMIZERS = {"sgd": sgd(0.1), "adamw": adamw(weight_decay=0.1)}


def micro_loss(model, step, micro, rank):
    return model(*data(10 * step + micro, rank), step=step)


def made(make):
    torch.manual_seed(5)
    return make()


def resting(engine):
    """Whether no unit is gathered, and a rank keeps no more than its shard of each."""
    return all(not unit.gathered and not unit.full.untyped_storage().nbytes() for unit in engine.sharded.units if unit.sharded)


def run_stages(make, loss_of, stages, optimizer, steps, **keys):
    """Return stage -> (run, whether all units rest at the end)."""
    found = {}
    for stage in stages:
        engine = engine_for(made(make), stage, OPTIMIZERS[optimizer], **keys)
        run = drive(engine, loss_of, steps)
        found[stage] = (run, resting(engine))
        engine.destroy()
    return found


# ---- C09, P04: ranks that do not run the same


class CalledByRank(nn.Module):
    """A block that is called once on rank 0 and three times on rank 1."""

    def __init__(self):
        super().__init__()
        self.trunk, self.out = nn.Linear(D, D), nn.Linear(D, D)
        self.b = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])

    def forward(self, x, y, times):
        h = torch.tanh(self.trunk(x))
        for _ in range(times):
            h = h + torch.tanh(self.b[0](h))
        return F.mse_loss(self.out(self.b[1](h)), y)


def called_by_rank(model, step, micro, rank):
    x, _, y = data(step, rank)
    return model(x, y, 3 if rank % 2 else 1)


def uneven_calls(optimizer):
    return run_stages(CalledByRank, called_by_rank, (0, 1, 2), optimizer, 3)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_c09_a_block_is_called_more_often_on_one_rank(pools, optimizer):
    """Stages 0 to 2 let ranks differ; stage 3 is the next test."""
    wanted = plain(made(CalledByRank), called_by_rank, 3, OPTIMIZERS[optimizer]).weights
    for found in pools(2).run(uneven_calls, optimizer):
        for stage, (run, _) in found.items():
            assert_close(run.weights, wanted, what=stage)


def end_of(name, stage, folder):
    """Run a case as two processes of their own; return exit status and standard error of each."""
    command = [sys.executable, str(HERE / "one_case.py"), name, str(stage), str(folder / "rendezvous")]
    ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    errors = [rank.communicate(timeout=100)[1] for rank in ranks]
    return [(rank.returncode, text) for rank, text in zip(ranks, errors, strict=True)]


ENDED = [name for name, case in CASES.items() if case.refused.get(3) == OUT_OF_STEP]


@pytest.mark.full  # the quick part has one such case in tests/parallel/test_watch.py
@pytest.mark.parametrize("name", ENDED)
def test_c09_p04_ranks_in_other_units_end_with_both_names(tmp_path, name):
    """Never a hang and never a wrong number: each rank ends within a minute and says which unit it and the other wait for."""
    began = time.monotonic()
    ends = end_of(name, 3, tmp_path)
    assert time.monotonic() - began < 90  # two processes have to start as well
    for status, errors in ends:
        (line,) = [line for line in errors.splitlines() if OUT_OF_STEP in line]
        assert status != 0
        assert "rank 0 waits in" in line and "rank 1 waits in" in line and line.count("for unit '") == 2
        assert "Let every rank run the same units" in line


class Branches(Base):
    """Branches that only some ranks take: within blocks, in the root, and around a recomputed block."""

    depth = 5

    class Forked(Block):
        def __init__(self):
            super().__init__()
            self.side = nn.Linear(D, D)

        def forward(self, x, aside):
            x = super().forward(x)
            return x + self.side(x) if aside else x

    block = Forked

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(D, D), nn.Linear(D, D)
        self.recomputed = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x, ids, y, taken):
        for number, block in enumerate(self.blocks):
            x = block(x, number % 3 in taken)
        for block in self.recomputed:
            x = checkpoint(block, x, use_reentrant=False) if 0 in taken else block(x)
        x = self.left(x) if 1 in taken else self.right(x)
        return F.mse_loss(self.out(x), y)


TAKEN = ((), (0,), (1, 2), (0, 1, 2), (2,))


def branch_loss(model, step, micro, rank):
    return model(*data(10 * step + micro, rank), TAKEN[(step + 2 * micro + 3 * rank) % len(TAKEN)])


def branches(optimizer, clip):
    return run_stages(Branches, branch_loss, STAGES, optimizer, 4, gradient_accumulation_steps=2, gradient_clipping=clip)


@pytest.mark.parametrize(("ranks", "optimizer", "clip"), [(2, "sgd", 0.0), (2, "adamw", 0.05), (3, "sgd", 0.05)])
def test_p04_a_branch_that_some_ranks_skip_gets_zeros_from_them(pools, ranks, optimizer, clip):
    """Parameters used on some ranks only, in some micro-batches only: the mean over all, at every stage, and no hang."""
    wanted = plain(made(Branches), branch_loss, 4, OPTIMIZERS[optimizer], gas=2, ranks=ranks, clip=clip)
    for found in pools(ranks).run(branches, optimizer, clip):
        for stage, (run, rests) in found.items():
            assert_close(run.weights, wanted.weights, what=stage)
            assert run.norms == pytest.approx(wanted.norms, rel=1e-5), stage
            assert rests


# ---- C10: frozen weights inside recomputed blocks


class Adapted(nn.Module):
    """A frozen scale, a frozen layer and a trainable adapter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(D) + 0.5, requires_grad=False)
        self.layer = nn.Linear(D, D).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, D) * 0.3), nn.Parameter(torch.zeros(D, 2))

    def forward(self, x):
        h = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        return x + torch.tanh(self.layer(h)) + h @ self.a.t() @ self.b.t()


class Recomputed(nn.Module):
    """Such blocks, recomputed one by one, all at once, within themselves, or as a mix."""

    def __init__(self, how, reentrant):
        super().__init__()
        self.how, self.reentrant = how, reentrant
        self.blocks = nn.ModuleList(Adapted() for _ in range(3))
        self.out = nn.Linear(D, D)

    def forward(self, x, ids, y, step=0):
        def again(function, x):
            return checkpoint(function, x, use_reentrant=self.reentrant)

        x = x.requires_grad_()
        if self.how == "each":
            for block in self.blocks:
                x = again(block, x)
        elif self.how == "together":
            x = again(lambda x: self.blocks[2](self.blocks[1](self.blocks[0](x))), x)
        elif self.how == "nested":
            x = again(lambda x: self.blocks[1](again(self.blocks[0], x)), x)
            x = self.blocks[2](x)
        else:  # one of them twice, once recomputed
            x = self.blocks[0](again(self.blocks[1], again(self.blocks[0], x)))
            x = self.blocks[2](x)
        return F.mse_loss(self.out(x), y)


def recomputed(how, reentrant, optimizer):
    return run_stages(lambda: Recomputed(how, reentrant), micro_loss, (0, 2, 3), optimizer, 3, gradient_accumulation_steps=2)


HOWS = [(how, reentrant, "sgd") for how in ("each", "together", "nested", "twice") for reentrant in (False, True)]


@pytest.mark.parametrize(("how", "reentrant", "optimizer"), [*HOWS, ("each", False, "adamw")])
def test_c10_frozen_weights_inside_recomputed_blocks(pools, how, reentrant, optimizer):
    start = made(lambda: Recomputed(how, reentrant))
    wanted = plain(made(lambda: Recomputed(how, reentrant)), micro_loss, 3, OPTIMIZERS[optimizer], gas=2).weights
    for found in pools(2).run(recomputed, how, reentrant, optimizer):
        for stage, (run, rests) in found.items():
            assert_close(run.weights, wanted, what=stage)
            for name, param in start.named_parameters():
                assert param.requires_grad or torch.equal(run.weights[name], param), (stage, name)
            assert rests


# ---- P10: the norm


NORMED = ("TiedAcrossUnits", "TiedEmbedding", "CalledTwice", "Frozen", "LoRAInside", "EmptyAndScalar", "AlternatingHeads", "HugeLayer")


def norms(name, clip):
    return run_stages(CASES[name].build, micro_loss, STAGES, "adamw", 2, gradient_accumulation_steps=2, gradient_clipping=clip)


@pytest.mark.parametrize(
    ("name", "ranks", "clip"),
    [*((name, 2, 0.05) for name in NORMED), ("EmptyAndScalar", 3, 0.05), ("TiedAcrossUnits", 3, 0.0), ("Frozen", 2, 0.0)],
)
def test_p10_the_norm_is_the_true_one_at_every_stage(pools, name, ranks, clip):
    """A float, the same on every rank and stage: tied and reused weights once, frozen and padding never, unused as zero."""
    wanted = plain(made(CASES[name].build), micro_loss, 2, OPTIMIZERS["adamw"], gas=2, ranks=ranks, clip=clip)
    everywhere = pools(ranks).run(norms, name, clip)
    for found in everywhere:
        for stage, (run, _) in found.items():
            assert all(type(norm) is float for norm in run.norms)
            assert run.norms == everywhere[0][stage][0].norms
            assert run.norms == pytest.approx(wanted.norms, rel=1e-5), stage
            assert_close(run.weights, wanted.weights, what=stage)


# ---- P19: weights of other modules


READS = {
    "linear": lambda x, other: F.linear(x, other.up.weight) @ other.down.weight.t(),
    "transposed": lambda x, other: x @ other.up.weight.t() @ other.up.weight,
    "slices": lambda x, other: x @ other.up.weight[:D].t() + other.down.bias,
    "norm": lambda x, other: F.layer_norm(x, (D,), other.norm.weight, other.norm.bias),
    "detached": lambda x, other: F.linear(x, other.up.weight[:D].detach()),
    "through data": lambda x, other: F.linear(x, other.up.weight.data[:D]),
    "without gradient": lambda x, other: x + torch.no_grad()(lambda: other.up.weight.square().mean())(),
    "recomputed": lambda x, other: checkpoint(lambda x: F.linear(x, other.up.weight[:D]), x, use_reentrant=False),
    "as a call of its layer": lambda x, other: other.down(torch.tanh(other.up(x))),
}


class Reader(nn.Module):
    """Blocks that read the block before them (released by then) and the one after (not gathered yet), in odd steps only."""

    def __init__(self, how):
        super().__init__()

        class Reads(Block):
            def forward(self, x, read):
                x = super().forward(x)
                for other in self.others if read else ():
                    x = x + 0.3 * READS[how](x, other)
                return x

        self.stack = nn.Module()
        self.stack.blocks = nn.ModuleList(Reads() for _ in range(4))
        self.out = nn.Linear(D, D)
        for number, block in enumerate(self.stack.blocks):
            block.others = [self.stack.blocks[at] for at in (number - 1, number + 1) if 0 <= at < 4]  # a list: not a submodule

    def forward(self, x, ids, y, step=0):
        for block in self.stack.blocks:
            x = block(x, step % 2 == 1)
        return F.mse_loss(self.out(x), y)


def reading_loss(model, step, micro, rank):
    with torch.no_grad():
        model(*data(step + 70, rank), step=step + 1)
    return model(*data(step, rank), step=step)


def reading(how):
    return run_stages(lambda: Reader(how), reading_loss, (1, 3), "adamw", 5)


@pytest.mark.parametrize("how", READS)
def test_p19_a_module_reads_the_weights_of_another(pools, how):
    wanted = plain(made(lambda: Reader(how)), reading_loss, 5, OPTIMIZERS["adamw"]).weights
    for found in pools(2).run(reading, how):
        for stage, (run, rests) in found.items():
            assert_close(run.weights, wanted, what=stage)
            assert rests
