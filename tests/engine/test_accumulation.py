"""Gradients of one update may come from several losses, micro-batches and ways of calling backward; the sum is plain PyTorch's."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from models import batch, build
from oracle import adamw, assert_close, assert_equal, drive, engine_for, error_of, plain, sgd, weights_of
from torch import nn

STAGES = (0, 1, 2, 3)


class TwoHeads(nn.Module):
    """A shared trunk of two blocks and two heads with a loss each."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.heads = nn.ModuleDict({"a": nn.Linear(6, 3), "b": nn.Linear(6, 5)})

    def forward(self, x, only=None):
        for layer in self.trunk:
            x = torch.tanh(layer(x))
        losses = {name: head(x).pow(2).mean() for name, head in self.heads.items() if only in (None, name)}
        return losses if only is None else losses[only]


def two_heads():
    torch.manual_seed(11)
    return TwoHeads()


def inputs(step, micro, rank):
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(31 * step + 7 * micro + rank))


def both_losses(model, step, micro, rank):
    losses = model(inputs(step, micro, rank))
    return losses["a"] + losses["b"]


def two_backwards(gas):
    """Three ways to do two backwards before one step; final weights by stage and way."""
    found = {}
    for stage in STAGES:
        for way in ("engine, one graph", "engine, two forwards", "plain, one graph", "plain, two forwards", "mixed"):
            engine = engine_for(two_heads(), stage, sgd(0.5), gradient_accumulation_steps=gas)
            for step in range(2):
                for micro in range(gas):
                    x = inputs(step, micro, engine.global_rank)
                    if "two forwards" in way:
                        losses = [partial(engine, x, only=only) for only in ("a", "b")]
                    else:
                        both = engine(x)
                        losses = [partial(both.get, name) for name in ("a", "b")]
                    for index, loss in enumerate(losses):
                        retain = index == 0 and "two forwards" not in way
                        if way.startswith("engine") or (way == "mixed" and index == 1):
                            engine.backward(loss(), retain_graph=retain)
                        else:
                            loss().backward(retain_graph=retain)
                    engine.step()
            found[stage, way] = (weights_of(engine), engine.get_global_grad_norm(), engine.global_steps)
            engine.destroy()
    return found


@pytest.mark.parametrize("gas", [1, 3])
def test_two_losses_with_a_backward_each(pools, gas):
    """Each of two heads has its own backward through the shared trunk: gradients are the sum, none lost, none twice (P06)."""
    wanted = plain(two_heads(), both_losses, 2, sgd(0.5), gas=gas)
    for found in pools(2).run(two_backwards, gas):
        for case, (weights, norm, steps) in found.items():
            assert_close(weights, wanted.weights, 1e-6, case)
            assert norm == pytest.approx(wanted.norms[-1], rel=1e-5), case
            assert steps == 2


def gpt_loss(model, step, micro, rank):
    return model(*batch("gpt", step, micro, rank))


def without_sync(stage):
    gas, steps = 3, 2
    found = {}
    for way in ("off", "step outside", "step inside", "plain backward", "one step a window"):
        engine = engine_for(build("gpt"), stage, sgd(0.5), gradient_accumulation_steps=1 if way == "one step a window" else gas)
        quiet = []
        for step in range(steps):
            for micro in range(gas):
                last = micro == gas - 1
                if way == "off" or last:
                    loss = gpt_loss(engine, step, micro, engine.global_rank)
                    if way == "one step a window":
                        engine.backward(loss / gas, scale_wrt_gas=False)
                    else:
                        engine.backward(loss)
                    engine.step()
                    continue
                before = gradient_bytes(engine)
                with engine.no_sync():
                    loss = gpt_loss(engine, step, micro, engine.global_rank)
                    if way == "plain backward":
                        loss.backward()
                    elif way == "one step a window":
                        engine.backward(loss / gas, scale_wrt_gas=False)
                    else:
                        engine.backward(loss)
                    if way == "step inside":
                        engine.step()
                quiet.append(gradient_bytes(engine) == before)
                if way in ("step outside", "plain backward"):
                    engine.step()
        found[way] = (weights_of(engine), quiet, engine.global_steps)
        engine.destroy()
    return found


def gradient_bytes(engine):
    return sum(traffic.sent_bytes for (_, state), traffic in engine.comm.snapshot().items() if state == "gradients")


@pytest.mark.parametrize("stage", STAGES)
def test_no_sync_accumulates_here_and_changes_nothing_else(pools, stage):
    """Inside no_sync() no gradient travels, at any stage, and the result is that without it (P07)."""
    wanted = plain(build("gpt"), gpt_loss, 2, sgd(0.5), gas=3).weights
    for found in pools(2).run(without_sync, stage):
        for way, (weights, quiet, steps) in found.items():
            assert_close(weights, wanted, 5e-6, way)
            assert all(quiet) and (way == "off" or len(quiet) == 4), way
            assert steps == 2


def no_sync_misuse():
    engine = engine_for(two_heads(), 2, sgd())
    with engine.no_sync():
        again = error_of(lambda: engine.no_sync().__enter__())
        engine.backward(both_losses(engine, 0, 0, 0))
        inside = error_of(engine.step)
    engine.step()
    engine.destroy()
    return again, inside


def test_no_sync_refuses_what_would_be_wrong(pools):
    for again, inside in pools(2).run(no_sync_misuse):
        assert again[0] == "EngineError" and "entered already" in again[1]
        assert inside[0] == "EngineError" and "no_sync" in inside[1]


def by_hand(stage, managed):
    """As accelerate does: say whether this micro-batch ends the window, and call step() only when it does."""
    engine = engine_for(
        two_heads(), stage, sgd(0.5), gradient_accumulation_steps=3 if managed else 2, managed_gradient_accumulation=managed
    )
    applied = []
    for step in range(2):
        for micro in range(3):
            engine.set_gradient_accumulation_boundary(micro == 2)
            loss = both_losses(engine, step, micro, engine.global_rank)
            engine.backward(loss if managed else loss / 3)
            assert engine.is_gradient_accumulation_boundary() is (micro == 2)
            if micro == 2 or not managed:
                engine.step()
                applied.append(engine.was_step_applied())
    weights = weights_of(engine)
    engine.destroy()
    return weights, applied


@pytest.mark.parametrize("managed", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_boundaries_by_hand(pools, stage, managed):
    """The script says where the window ends; with managed_gradient_accumulation off it also divides, and the config's number is unused."""
    wanted = plain(two_heads(), both_losses, 2, sgd(0.5), gas=3).weights
    for weights, applied in pools(2).run(by_hand, stage, managed):
        assert_close(weights, wanted, 1e-6)
        assert applied == ([True, True] if managed else [False, False, True] * 2)


def plain_and_engine_backward():
    found = {}
    for stage in STAGES:
        for way in ("engine", "plain"):
            engine = engine_for(build("gpt"), stage, adamw(weight_decay=0.1), gradient_accumulation_steps=3, gradient_clipping=0.5)
            for step in range(2):
                for micro in range(3):
                    loss = gpt_loss(engine, step, micro, engine.global_rank)
                    engine.backward(loss) if way == "engine" else loss.backward()
                    engine.step()
            found[stage, way] = weights_of(engine)
            engine.destroy()
    return found


def test_plain_backward_equals_engine_backward(pools):
    """loss.backward() is averaged over ranks and micro-batches too, to the bit, at every stage."""
    wanted = plain(build("gpt"), gpt_loss, 2, adamw(weight_decay=0.1), gas=3, clip=0.5).weights
    for found in pools(2).run(plain_and_engine_backward):
        for stage in STAGES:
            assert_equal(found[stage, "plain"], found[stage, "engine"], stage)
            assert_close(found[stage, "plain"], wanted, 5e-5, stage)


def plain_fp16(stage):
    fp16 = {"enabled": True, "initial_scale_power": 8}

    def loss_of(engine, step):
        x = inputs(step, 0, engine.global_rank).half()
        losses = engine(x)
        return (losses["a"] + losses["b"]).float()

    engine = engine_for(two_heads(), stage, sgd(0.5), fp16=fp16)
    before = weights_of(engine)
    loss_of(engine, 0).backward()  # allowed by itself: another engine's loss may run through this model
    error = error_of(engine.step)
    untouched = all(torch.equal(before[key], value) for key, value in weights_of(engine).items())
    for step in range(2):  # the engine goes on after the refusal
        engine.scale(loss_of(engine, step)).backward()
        engine.step()
    scaled = weights_of(engine)
    engine.destroy()
    engine = engine_for(two_heads(), stage, sgd(0.5), fp16=fp16)
    for step in range(2):
        engine.backward(loss_of(engine, step))
        engine.step()
    wanted = weights_of(engine)
    engine.destroy()
    return error, untouched, scaled, wanted


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_plain_backward_under_fp16_is_refused_with_the_way_out(pools, stage):
    """Unscaled fp16 gradients are lost in silence, so loss.backward() says what to call; that call then equals engine.backward."""
    for (kind, message), untouched, scaled, wanted in pools(2).run(plain_fp16, stage):
        assert kind == "EngineError" and "engine.backward(loss)" in message and "\n" not in message
        assert untouched
        assert_equal(scaled, wanted)


def divided_by_the_caller():
    found = {}
    for stage in STAGES:
        for way in ("engine", "caller"):
            engine = engine_for(two_heads(), stage, sgd(0.5), gradient_accumulation_steps=2)
            returned = []
            for step in range(2):
                for micro in range(2):
                    loss = both_losses(engine, step, micro, engine.global_rank)
                    if way == "engine":
                        back = engine.backward(loss)
                        returned.append((back * 2 - loss).abs().item())
                    else:
                        back = engine.backward(loss / 2, scale_wrt_gas=False)
                        returned.append((back - loss / 2).abs().item())
                    engine.step()
            found[stage, way] = (weights_of(engine), max(returned))
            engine.destroy()
    return found


def test_scale_wrt_gas_false_leaves_the_division_to_the_caller(pools):
    wanted = plain(two_heads(), both_losses, 2, sgd(0.5), gas=2).weights
    for found in pools(2).run(divided_by_the_caller):
        for case, (weights, off) in found.items():
            assert_close(weights, wanted, 1e-6, case)
            assert off == 0.0, "backward() returns the loss divided by the accumulation steps"


def resized(stage):
    engine = engine_for(two_heads(), stage, sgd(0.5))
    drive(engine, both_losses, 1)
    info = [engine.get_batch_info()]
    bad = [error_of(lambda n=n: engine.set_train_batch_size(n)) for n in (6, 0, -4)]
    engine.set_train_batch_size(12)
    info.append(engine.get_batch_info())
    weights = drive(engine, both_losses, 2, first=1).weights
    counters = (engine.global_steps, engine.micro_steps, engine.global_samples)
    engine.destroy()
    return info, bad, weights, counters


@pytest.mark.parametrize("stage", [0, 3])
def test_set_train_batch_size_changes_the_accumulation(pools, stage):
    model = two_heads()
    plain(model, both_losses, 1, sgd(0.5))
    wanted = plain(model, both_losses, 2, sgd(0.5), gas=3, first=1).weights
    for info, bad, weights, counters in pools(2).run(resized, stage):
        assert info == [(4, 2, 1), (12, 2, 3)]
        assert all(kind == "ConfigError" for kind, _ in bad) and "nearest legal: 4" in bad[0][1]
        assert_close(weights, wanted, 1e-6)
        assert counters == (3, 7, 4 + 12 + 12)


GIVEN = [
    ({"train_batch_size": 16}, {2: (16, 8, 1), 3: None}),
    ({"train_micro_batch_size_per_gpu": 4}, {2: (8, 4, 1), 3: (12, 4, 1)}),
    ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2}, {2: (12, 2, 3), 3: (12, 2, 2)}),
    ({"train_batch_size": 12, "gradient_accumulation_steps": 2}, {2: (12, 3, 2), 3: (12, 2, 2)}),
    ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, {2: (12, 2, 3), 3: (18, 2, 3)}),
]


def batch_numbers():
    import stateroom

    found = []
    for given, _ in GIVEN:
        try:
            engine, *_ = stateroom.initialize(two_heads(), config={**given, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
        except stateroom.ConfigError as error:
            found.append(str(error))
            continue
        found.append((engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()))
        engine.destroy()
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_batch_numbers_follow_from_those_given_and_the_ranks(pools, ranks):
    """train = micro x accumulation x ranks, whichever of them the config leaves out (C01)."""
    for found in pools(ranks).run(batch_numbers):
        for numbers, (given, wanted) in zip(found, GIVEN, strict=True):
            if wanted[ranks] is None:
                assert isinstance(numbers, str) and "16" in numbers and "3" in numbers, given
            else:
                assert numbers == wanted[ranks], given


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x):
        return self.net(x)


def pair(step, micro, rank):
    x = inputs(step, micro, rank)
    return x, x.sum(1, keepdim=True)


def whole_batches(stage):
    engine = engine_for(Regression(), stage, sgd(0.5), gradient_accumulation_steps=3, loss_fn=F.mse_loss)
    rank = engine.global_rank
    losses = [engine.train_batch(iter([pair(step, micro, rank) for micro in range(3)])).item() for step in range(2)]
    engine.train()
    before = weights_of(engine)
    evaluated = engine.eval_batch(iter([pair(9, micro, rank) for micro in range(3)]))
    untouched = all(torch.equal(before[key], value) for key, value in weights_of(engine).items())
    facts = (engine.training, evaluated.requires_grad, untouched, engine.global_steps, engine.micro_steps)
    missing = error_of(engine.train_batch)
    losses += [engine.train_batch(iter([pair(2, micro, rank) for micro in range(3)])).item()]
    weights = weights_of(engine)
    engine.destroy()
    return losses, evaluated.item(), facts, missing, weights


@pytest.mark.parametrize("stage", STAGES)
def test_train_batch_and_eval_batch(pools, stage):
    """train_batch is one update and returns the mean loss over ranks and micro-batches; eval_batch changes nothing."""

    def loss_of(model, step, micro, rank):
        x, y = pair(step, micro, rank)
        return F.mse_loss(model(x), y)

    model = Regression()
    wanted = plain(model, loss_of, 2, sgd(0.5), gas=3)
    evaluation = sum(loss_of(model, 9, micro, rank).item() for micro in range(3) for rank in range(2)) / 6
    rest = plain(model, loss_of, 1, sgd(0.5), gas=3, first=2)
    for losses, evaluated, facts, missing, weights in pools(2).run(whole_batches, stage):
        assert losses == pytest.approx(wanted.losses + rest.losses, abs=1e-5)
        assert evaluated == pytest.approx(evaluation, abs=1e-5)
        assert facts == (True, False, True, 2, 6)
        assert missing[0] == "EngineError" and "training_data" in missing[1]
        assert_close(weights, rest.weights, 1e-5)
