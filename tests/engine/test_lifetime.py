"""Engines come and go: memory returns, several live side by side, copies of a model are their own."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from models import DIM, batch, build
from oracle import error_of
from torch import nn
from training import cast, config_for


def step(engine, number, precision="fp32"):
    loss = engine(*cast(batch("gpt", number, 0, engine.global_rank), precision))
    engine.backward(loss)
    engine.step()
    return loss.item()


def come_and_go(stage, destroy):
    """Return whether engine, model and a unit are gone after the engine is dropped, with or without destroy()."""
    import stateroom

    def life():
        model = build("gpt")
        engine, *_ = stateroom.initialize(model, config=config_for(stage, "bf16", 1))
        for number in range(3):
            step(engine, number, "bf16")
        watched = [weakref.ref(x) for x in (engine, model, engine.sharded.units[0], engine.optimizer)]
        if destroy:
            engine.destroy()
        return watched

    watched = life()
    gc.collect()
    return [ref() is None for ref in watched]


@pytest.mark.parametrize("destroy", [True, False])
@pytest.mark.parametrize("stage", [0, 3])
def test_nothing_stays_behind(pools, stage, destroy):
    for gone in pools(2).run(come_and_go, stage, destroy):
        assert all(gone)


def many_steps(stage):
    """Return the number of live objects and of tensors' bytes after 40 and after 140 steps."""
    import stateroom

    engine, *_ = stateroom.initialize(build("gpt"), config=config_for(stage, "fp32", 1))
    seen = []
    for number in range(141):
        step(engine, number % 7)
        if number in (40, 140):
            gc.collect()
            seen.append(len(gc.get_objects()))
    engine.destroy()
    return seen


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])
def test_a_long_run_keeps_no_more_objects(pools, stage):
    for early, late in pools(2).run(many_steps, stage):
        assert late - early < 30  # a leak of one object a step would be 100


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))

    def forward(self, z):
        return self.net(z)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, 1))

    def forward(self, x):
        return self.net(x)


def gan_data(number, rank):
    g = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(4, DIM, generator=g), torch.randn(4, DIM, generator=g)


def critic_loss(critic, real, fake):
    return F.softplus(critic(fake)).float().mean() + F.softplus(-critic(real)).float().mean()


def gan(stage, precision):
    """Two engines; the generator's loss runs backward through the critic."""
    import stateroom

    torch.manual_seed(1)
    config = config_for(stage, precision, 1, gradient_clipping=0, optimizer={"type": "SGD", "params": {"lr": 0.05}})
    gen, *_ = stateroom.initialize(Generator(), config=config)
    critic, *_ = stateroom.initialize(Critic(), config=config)
    dtype = {"fp32": torch.float32, "fp16": torch.float16}[precision]
    losses = []
    for number in range(5):
        z, real = (t.to(dtype) for t in gan_data(number, gen.global_rank))
        loss = critic_loss(critic, real, gen(z).detach())
        critic.backward(loss)
        critic.step()
        gen_loss = F.softplus(-critic(gen(z))).float().mean()
        gen.backward(gen_loss)
        gen.step()
        critic.zero_grad()
        losses.append([x.item() for x in gen.comm.gather_rows(torch.stack([loss, gen_loss]).detach()).mean(0)])
    for engine in (gen, critic):
        engine.destroy()
    return losses


def test_two_engines_train_against_each_other(pools):
    torch.manual_seed(1)
    gen, critic = Generator(), Critic()
    gen_opt, critic_opt = (torch.optim.SGD(m.parameters(), lr=0.05) for m in (gen, critic))
    wanted = []
    for number in range(5):
        totals = [0.0, 0.0]
        critic_opt.zero_grad()
        for rank in range(2):
            z, real = gan_data(number, rank)
            loss = critic_loss(critic, real, gen(z).detach()) / 2
            loss.backward()
            totals[0] += loss.item()
        critic_opt.step()
        gen_opt.zero_grad()
        for rank in range(2):
            loss = F.softplus(-critic(gen(gan_data(number, rank)[0]))).mean() / 2
            loss.backward()
            totals[1] += loss.item()
        gen_opt.step()
        wanted.append(totals)
    for stage in range(4):
        assert torch.allclose(torch.tensor(pools(2).run(gan, stage, "fp32")[0]), torch.tensor(wanted), rtol=1e-5)
    assert torch.allclose(torch.tensor(pools(2).run(gan, 3, "fp16")[0]), torch.tensor(wanted), rtol=5e-3)


def copies(stage, held):
    """Copy the model; train on; return what the copy computes alone on rank 0, and its state."""
    import stateroom
    from stateroom.zero import GatheredParameters

    wrapped = {} if held else {"activation_checkpointing": {"policy": "full"}, "compile": {"enabled": True, "backend": "eager"}}
    engine, *_ = stateroom.initialize(build("gpt"), config=config_for(stage, "fp32", 1, **wrapped))
    step(engine, 0)
    with GatheredParameters(engine.module, enabled=held):
        ema = copy.deepcopy(engine.module)
    at_rest = stage < 3 or held or sum(unit.gathered for unit in engine.sharded.units) <= 1
    before = {name: value.clone() for name, value in engine.module_state_dict().items()}
    step(engine, 1)
    after = engine.module_state_dict()
    moved = any(not torch.equal(before[name], after[name]) for name in before)
    same = all(torch.equal(before[name], value) for name, value in ema.state_dict().items())
    alone = ema(*batch("gpt", 5, 0, 0)).item() if engine.global_rank == 0 else None  # no collective: one rank only
    ema.load_state_dict(after)
    loaded = all(torch.equal(after[name], value) for name, value in ema.state_dict().items())
    plain = build("gpt")
    plain.load_state_dict(before)
    wanted = plain(*batch("gpt", 5, 0, 0)).item()
    engine.destroy()
    return moved, same and at_rest, loaded, alone, wanted


@pytest.mark.parametrize("held", [True, False], ids=["gathered", "plainly"])
@pytest.mark.parametrize("stage", range(4))
def test_a_deep_copy_is_independent(pools, stage, held):
    for moved, same, loaded, alone, wanted in pools(2).run(copies, stage, held):
        assert moved and same and loaded
        assert alone is None or alone == pytest.approx(wanted, rel=1e-6)


def copy_on_one_rank():
    import stateroom

    engine, *_ = stateroom.initialize(build("gpt"), config=config_for(3, "fp32", 1))
    meet = engine.comm.meet
    engine.comm.meet = lambda what, timeout_s=0.5: meet(what, timeout_s)
    message = error_of(lambda: copy.deepcopy(engine.module))[1] if engine.global_rank == 0 else ""
    step(engine, 0)  # nothing hangs afterwards
    engine.destroy()
    return message


def test_a_deep_copy_on_one_rank_names_the_others(pools):
    message, _ = pools(2).run(copy_on_one_rank)
    assert "copy.deepcopy() of a ZeRO-3 model" in message and "rank(s) [1] of 2" in message


def freezing(stage):
    """Freeze a block for two steps, let it go on, then unfreeze one that was frozen from the start."""
    import stateroom
    from stateroom.errors import EngineError

    model = build("gpt")
    for p in model.blocks[2].parameters():
        p.requires_grad_(False)
    engine, *_ = stateroom.initialize(model, config=config_for(stage, "fp32", 1))
    states = [engine.module_state_dict()["blocks.1.up.weight"].clone()]
    for number in range(4):
        for p in model.blocks[1].parameters():
            p.requires_grad_(number >= 2)
        step(engine, number)
        states.append(engine.module_state_dict()["blocks.1.up.weight"].clone())
    rested = torch.equal(states[0], states[2])
    moved = not torch.equal(states[2], states[3]) and not torch.equal(states[3], states[4])
    for p in model.blocks[2].parameters():
        p.requires_grad_(True)
    message = ""
    try:
        step(engine, 9)
    except EngineError as error:
        message = str(error)
    engine.destroy()
    return rested, moved, message


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_freezing_in_flight(pools, stage):
    for rested, moved, message in pools(2).run(freezing, stage):
        assert rested and moved
        assert "'blocks.2." in message and "frozen when initialize()" in message and "in no group" in message
