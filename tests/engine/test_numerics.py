"""Numbers stay true: accumulation dtype, global norm, clipping, overflow, loss scale, schedule and autocast equal plain PyTorch."""

from __future__ import annotations

import logging
import math

import pytest
import torch
import torch.nn.functional as F
from models import batch, build
from oracle import adamw, assert_close, assert_equal, drive, engine_for, error_of, plain, sgd, weights_of
from torch import nn
from training import train_engine, train_plain

STAGES = (0, 1, 2, 3)
BF16 = {"enabled": True}


class Poison(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class Dot(nn.Module):
    """Its gradient is its input."""

    def __init__(self, numel=8):
        super().__init__()
        self.w = nn.Parameter(torch.ones(numel))

    def forward(self, x, factor=1.0):
        return (Poison.apply(self.w, factor) * x).sum()


class Net(nn.Module):
    """Three layers; the gradient of any one weight can be spoiled while the loss stays finite."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, spoiled=None, factor=1.0):
        for index, layer in enumerate(self.layers):
            weight = Poison.apply(layer.weight, factor) if spoiled == index else layer.weight
            x = torch.tanh(F.linear(x, weight, layer.bias))
        return x.float().pow(2).mean()


def net():
    torch.manual_seed(5)
    return Net()


def net_input(step, micro, rank):
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(97 * step + 13 * micro + rank))


def net_loss(model, step, micro, rank):
    return model(net_input(step, micro, rank))


class Log(logging.Handler):
    """The package's log lines while open."""

    def __enter__(self):
        self.lines = []
        logging.getLogger("stateroom").addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger("stateroom").removeHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())


# ---- accumulation of small gradients


def tiny_input(step, micro, rank):
    value = 1.0 if micro == 0 else 2.0**-10
    return torch.full((8,), value * (rank + 1))


def tiny_loss(model, step, micro, rank):
    return model(tiny_input(step, micro, rank).bfloat16()).float()


def accumulate_tiny(grad_accum_dtype):
    found = {}
    for stage in STAGES:
        types = {} if grad_accum_dtype is None else {"data_types": {"grad_accum_dtype": grad_accum_dtype}}
        engine = engine_for(Dot(), stage, sgd(1.0), gradient_accumulation_steps=64, bf16=BF16, **types)
        found[stage] = drive(engine, tiny_loss, 2).weights["w"]
        engine.destroy()
    return found


def test_bf16_accumulates_tiny_gradients_in_fp32(pools):
    """Adding 63 gradients of 2^-10 to one of 1 loses all of them in bf16, none in fp32."""
    mean = 1.5 * (1 + 63 * 2.0**-10) / 64
    for found in pools(2).run(accumulate_tiny, None):
        for stage in STAGES:
            assert torch.allclose(found[stage], torch.full((8,), 1 - 2 * mean), atol=1e-7, rtol=0), stage


def test_grad_accum_dtype_bf16_accumulates_in_bf16(pools):
    """Whoever asks for bf16 accumulation gets it: the sum differs from fp32's, and all stages agree."""
    mean = 1.5 * (1 + 63 * 2.0**-10) / 64
    for found in pools(2).run(accumulate_tiny, "bf16"):
        for stage in STAGES:
            assert torch.equal(found[stage], found[0]), stage
            assert (found[stage] - (1 - 2 * mean)).abs().min() > 1e-4, stage
            assert torch.allclose(found[stage], torch.full((8,), 1 - 2 * 1.5 / 64), atol=2e-3), stage


# ---- the global norm


def gpt_with_frozen_block():
    model = build("gpt")
    for param in model.blocks[1].parameters():
        param.requires_grad_(False)
    return model


def gpt_loss(model, step, micro, rank):
    return model(*batch("gpt", step, micro, rank))


def norms_at_all_stages(clip, precision):
    found = {}
    for stage in STAGES:
        keys = {} if precision == "fp32" else {precision: BF16}
        engine = engine_for(gpt_with_frozen_block(), stage, adamw(), gradient_clipping=clip, gradient_accumulation_steps=2, **keys)
        before = engine.get_global_grad_norm()
        found[stage] = (before, drive(engine, gpt_loss, 3))
        engine.destroy()
    return found


@pytest.mark.parametrize(("clip", "precision"), [(0.0, "fp32"), (0.05, "fp32"), (0.05, "bf16")])
def test_global_norm_is_the_true_one_before_clipping(pools, clip, precision):
    """With a frozen block and tied weights: each trained element counts once, no padding, on every rank and stage, as a float."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    wanted = plain(gpt_with_frozen_block(), gpt_loss, 3, adamw(), gas=2, clip=clip, dtype=dtype)
    assert min(wanted.norms) > 0.05
    ranks = pools(2).run(norms_at_all_stages, clip, precision)
    for found in ranks:
        for stage in STAGES:
            before, run = found[stage]
            assert before is None
            assert all(type(norm) is float for norm in run.norms)
            assert run.norms == ranks[0][stage][1].norms, stage
            assert run.norms == pytest.approx(found[0][1].norms, rel=1e-6), stage
            assert run.norms == pytest.approx(wanted.norms, rel=1e-5 if precision == "fp32" else 2e-2), stage
            assert_close(run.weights, wanted.weights, 2e-5 if precision == "fp32" else 2e-2, stage)


def sum_of_weights(clip):
    found = {}
    for stage in STAGES:
        engine = engine_for(Dot(), stage, sgd(0.25), gradient_clipping=clip)
        run = drive(engine, lambda e, *_: e(torch.ones(8)), 3)
        found[stage] = (run.norms, run.weights["w"])
        engine.destroy()
    return found


@pytest.mark.parametrize(("clip", "applied"), [(1.0, 1 / math.sqrt(8)), (0.0, 1.0), (None, 1 / math.sqrt(8)), (100.0, 1.0)])
def test_clipping_by_hand(pools, clip, applied):
    """The reported norm is that before clipping; an absent key clips to 1.0, as in DeepSpeed (C20)."""
    for found in pools(2).run(sum_of_weights, clip):
        for stage in STAGES:
            norms, weight = found[stage]
            assert norms == pytest.approx([math.sqrt(8)] * 3, rel=1e-6), stage
            assert torch.allclose(weight, torch.full((8,), 1 - 3 * 0.25 * applied), atol=1e-5), stage


# ---- inf and NaN gradients


def spoil(stage, precision, value, gas, spoiled_rank):
    """Three steps; in the second, one rank's first micro-batch has a spoiled gradient for layer 1."""
    keys = {} if precision == "fp32" else {precision: BF16}
    engine = engine_for(net(), stage, adamw(weight_decay=0.1), gradient_accumulation_steps=gas, gradient_clipping=1.0, **keys)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    facts = []
    for step in range(3):
        before = weights_of(engine)
        with Log() as log:
            for micro in range(gas):
                bad = step == 1 and micro == 0 and engine.global_rank == spoiled_rank
                x = net_input(step, micro, engine.global_rank).to(dtype)
                engine.backward(engine(x, spoiled=1 if bad else None, factor=value))
                engine.step()
        after = weights_of(engine)
        same = all(torch.equal(before[name], after[name]) for name in before)
        facts.append((engine.was_step_applied(), same, engine.optimizer.bad_parameter, engine.skipped_steps, " ".join(log.lines)))
    weights = weights_of(engine)
    engine.destroy()
    return facts, weights


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize(("stage", "precision", "gas"), [(0, "fp32", 1), (1, "fp32", 2), (2, "bf16", 2), (3, "fp32", 2), (3, "bf16", 1)])
def test_bad_gradient_on_one_rank_skips_the_step_on_all(pools, stage, precision, gas, value):
    """Weights stay bit-equal in the skipped step, the first bad parameter is named, and the next step is as if nothing happened."""
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16

    def loss_of(model, step, micro, rank):
        return model(net_input(step, micro, rank).to(dtype))

    wanted = plain(net(), loss_of, 3, adamw(weight_decay=0.1), gas=gas, clip=1.0, dtype=dtype, skip=(1,))
    for rank, (facts, weights) in enumerate(pools(2).run(spoil, stage, precision, value, gas, 1)):
        assert [fact[:4] for fact in facts] == [
            (True, False, None, 0),
            (False, True, "layers.1.weight", 1),
            (True, False, None, 1),
        ]
        if rank == 0:
            assert "layers.1.weight" in facts[1][4] and "skipped" in facts[1][4]
        assert_close(weights, wanted.weights, 2e-5 if precision == "fp32" else 1e-2)


def overflow_always():
    found = {}
    for stage in STAGES:
        fp16 = {"enabled": True, "initial_scale_power": 2, "hysteresis": 1}
        engine = engine_for(net(), stage, adamw(), fp16=fp16)
        drive(engine, lambda e, s, m, r: e(net_input(s, m, r).half()), 2)
        good = weights_of(engine)
        errors = []
        for step in range(2, 8):
            x = net_input(step, 0, engine.global_rank).half()
            engine.backward(engine(x, spoiled=2 if engine.global_rank == 1 else None, factor=math.inf))
            errors.append(error_of(engine.step))
            if errors[-1][0]:
                break
        found[stage] = (errors, engine.global_steps, engine.skipped_steps)
        assert_equal(weights_of(engine), good)
        engine.destroy()
    return found


def test_fp16_overflow_at_every_step_ends_with_the_reason(pools):
    """After scale 4, 2 and 1 have failed: an error with step, first bad parameter and history; weights of the last good step."""
    for found in pools(2).run(overflow_always):
        for stage in STAGES:
            errors, steps, skipped = found[stage]
            assert [kind for kind, _ in errors] == ["", "", "EngineError"], stage
            message = errors[-1][1]
            assert "step 5" in message and "'layers.2.weight'" in message
            assert "4 since update 0, 2 since update 3, 1 since update 4" in message
            assert (steps, skipped) == (5, 3)


def dynamic_scale(folder, stage):
    def new():
        fp16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 2}
        warmup = {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_num_steps": 4, "warmup_type": "linear"}
        return engine_for(Dot(), stage, sgd(0.1), fp16=fp16, scheduler={"type": "WarmupLR", "params": warmup})

    def go(engine, steps):
        rows = []
        for step in steps:
            bad = step in (1, 2, 3) and engine.global_rank == 1
            engine.backward(engine(torch.ones(8).half(), factor=math.inf if bad else 1.0).float())
            engine.step()
            rows.append((engine.loss_scale, engine.skipped_steps, weights_of(engine)["w"][0].item(), engine.get_lr()[0]))
        return rows

    engine = new()
    rows = go(engine, range(4))
    engine.save_checkpoint(folder, tag=f"s{stage}")
    rows += go(engine, range(4, 8))
    engine.destroy()
    engine = new()
    engine.load_checkpoint(folder, tag=f"s{stage}")
    tail = go(engine, range(4, 8))
    engine.destroy()
    return rows, tail


@pytest.mark.parametrize("stage", STAGES)
def test_dynamic_scale_by_hand_with_overflow_on_one_rank(pools, stage, tmp_path):
    """Scale, skips, learning rate and weight after each of eight steps, three of them overflowing on rank 1 only (C24)."""
    for rows, tail in pools(2).run(dynamic_scale, str(tmp_path), stage):
        assert [row[0] for row in rows] == [16, 16, 8, 4, 4, 4, 8, 8]
        assert [row[1] for row in rows] == [0, 1, 2, 3, 3, 3, 3, 3]
        assert [row[2] for row in rows] == pytest.approx([0.9, 0.9, 0.9, 0.9, 0.8, 0.6, 0.3, -0.1], abs=1e-6)
        assert rows[0][3] == rows[3][3], "the schedule moved with a skipped step"
        assert tail == rows[4:]


# ---- schedules that the script brings


def two_groups(model):
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": decayed, "lr": 0.02, "weight_decay": 0.3}, {"params": rest, "lr": 0.005, "weight_decay": 0.0}]


def lambdas():
    return [lambda step: 0.5**step, lambda step: 1 / (1 + step)]


def scheduled(folder, stage, as_factory):
    """Six updates in which the second is skipped; saved after three and resumed in a new engine."""

    def new():
        model = net()
        optimizer = torch.optim.AdamW(two_groups(model))
        if as_factory:
            scheduler = lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambdas())  # noqa: E731
        else:
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambdas())
        return engine_for(model, stage, optimizer=optimizer, lr_scheduler=scheduler)

    def go(engine, steps):
        rates = []
        for step in steps:
            x = net_input(step, 0, engine.global_rank)
            bad = step == 1 and engine.global_rank == 1
            engine.backward(engine(x, spoiled=0 if bad else None, factor=math.inf))
            rates.append(engine.get_lr())
            engine.step()
        return rates

    engine = new()
    rates = go(engine, range(3))
    engine.save_checkpoint(folder, tag=f"s{stage}")
    rates += go(engine, range(3, 6))
    straight = weights_of(engine)
    engine.destroy()
    engine = new()
    engine.load_checkpoint(folder, tag=f"s{stage}")
    tail = go(engine, range(3, 6))
    resumed = weights_of(engine)
    decays = [group["weight_decay"] for group in engine.optimizer.param_groups]
    engine.destroy()
    assert_equal(resumed, straight, stage)
    return rates, tail, straight, decays


@pytest.mark.parametrize(("stage", "as_factory"), [(0, False), (1, True), (2, False), (3, True)])
def test_torch_schedule_moves_with_real_updates_only_and_resumes(pools, stage, as_factory, tmp_path):
    """LambdaLR with two groups: the rate at each step equals plain PyTorch's that leaves the skipped step out (P31, C32)."""
    model = net()
    optimizer = torch.optim.AdamW(two_groups(model))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambdas())
    wanted = []
    for step in range(6):
        wanted.append(scheduler.get_last_lr())
        if step == 1:
            continue
        optimizer.zero_grad()
        (sum(model(net_input(step, 0, rank)) for rank in range(2)) / 2).backward()
        optimizer.step()
        scheduler.step()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    for rates, tail, found, decays in pools(2).run(scheduled, str(tmp_path), stage, as_factory):
        for mine, theirs in zip(rates, wanted, strict=True):
            assert mine == pytest.approx(theirs)
        assert tail == rates[3:]
        assert decays == [0.3, 0.0]
        assert_close(found, weights)


# ---- token weights


COUNTS = ((1, 7), (3, 5))  # tokens of (rank, micro-batch)
PER_TOKEN = ((10.0, 1.0), (2.0, 4.0))


def token_weighted(by_hand):
    found = {}
    tokens = sum(map(sum, COUNTS))
    for stage in STAGES:
        engine = engine_for(Dot(1), stage, sgd(1.0), gradient_accumulation_steps=2)
        rank = engine.global_rank
        for micro in range(2):
            total = engine(torch.full((1,), PER_TOKEN[rank][micro] * COUNTS[rank][micro]))
            if by_hand:
                engine.backward(total * 2 / tokens, scale_wrt_gas=False)
            else:
                engine.backward(total * 2 * 2 / tokens)
            engine.step()
        found[stage] = 1 - weights_of(engine)["w"].item()
        engine.destroy()
    return found


@pytest.mark.parametrize("by_hand", [False, True])
def test_token_weighted_loss_over_unequal_micro_batches(pools, by_hand):
    """The gradient is the mean over tokens, 2.6875, not 4.25, the mean of means; both ways to say it are the same (C23)."""
    for found in pools(2).run(token_weighted, by_hand):
        assert found == {stage: pytest.approx(2.6875, abs=1e-6) for stage in STAGES}


# ---- other precisions


def autocast(dtype):
    found = {}
    for stage in STAGES:
        keys = {"torch_autocast": {"enabled": True, "dtype": dtype}}
        if dtype == "fp16":
            keys["fp16"] = {"enabled": False, "initial_scale_power": 8}
        engine = engine_for(net(), stage, sgd(0.5), gradient_accumulation_steps=2, **keys)
        found[stage] = (drive(engine, net_loss, 3).weights, next(engine.parameters()).dtype, engine.loss_scale)
        engine.destroy()
    return found


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_torch_autocast_equals_plain_autocast(pools, name, dtype):
    def loss_of(model, step, micro, rank):
        with torch.autocast("cpu", dtype=dtype):
            return net_loss(model, step, micro, rank)

    wanted = plain(net(), loss_of, 3, sgd(0.5), gas=2).weights
    exact = plain(net(), net_loss, 3, sgd(0.5), gas=2).weights
    assert max((wanted[key] - exact[key]).abs().max() for key in wanted) > 2e-5, "autocast must show in the reference"
    for found in pools(2).run(autocast, name):
        for stage in STAGES:
            weights, param_dtype, scale = found[stage]
            assert_close(weights, wanted, 2e-5 if name == "bf16" else 2e-4, stage)
            assert param_dtype == torch.float32
            assert scale == (1.0 if name == "bf16" else 256.0)


def autocast_overflow():
    keys = {"torch_autocast": {"enabled": True, "dtype": "fp16"}, "fp16": {"enabled": False, "initial_scale_power": 1, "hysteresis": 1}}
    engine = engine_for(net(), 2, sgd(0.5), **keys)
    errors = []
    for step in range(4):
        engine.backward(engine(net_input(step, 0, 0), spoiled=0, factor=math.inf))
        errors.append(error_of(engine.step)[1])
        if errors[-1]:
            break
    engine.destroy()
    return errors


def test_fp16_autocast_also_ends_at_the_minimum_scale(pools):
    """A dynamic scale is a dynamic scale, whichever block switched fp16 on."""
    for errors in pools(2).run(autocast_overflow):
        assert [bool(error) for error in errors] == [False, True]
        assert "'layers.0.weight'" in errors[-1]


def static_scale():
    fp16 = {"enabled": True, "loss_scale": 256}
    found = {stage: train_engine("mlp", stage, "fp16", 2, 3, {"fp16": fp16}) for stage in STAGES}
    engine = engine_for(net(), 2, adamw(), fp16=fp16)
    engine.backward(engine(net_input(0, 0, 0).half(), spoiled=0, factor=math.inf))
    engine.step()
    found["after overflow"] = (engine.loss_scale, engine.skipped_steps, engine.dynamic_loss_scale(), engine.was_step_applied())
    engine.destroy()
    return found


def test_static_loss_scale_is_kept_and_gives_plain_results(pools):
    _, weights, norms = train_plain("mlp", "fp16", 2, 3, 2)
    for found in pools(2).run(static_scale):
        assert found["after overflow"] == (256.0, 1, False, False)
        for stage in STAGES:
            assert found[stage][2] == pytest.approx(norms, rel=1e-2)
            assert_close(found[stage][1], weights, 1e-2, stage)


def pure_bf16():
    found = {}
    for stage in STAGES:
        engine = engine_for(net(), stage, sgd(0.5), bf16={"enabled": True, "bf16_master_weights_and_grads": True})
        run = drive(engine, lambda e, s, m, r: e(net_input(s, m, r).bfloat16()), 3)
        kinds = {run_.tensor.dtype for run_ in engine.optimizer.runs}
        kinds |= {unit.gradients.dtype for unit in engine.optimizer.units} | {p.dtype for p in engine.parameters()}
        found[stage] = (run.weights, kinds)
        engine.destroy()
    return found


def test_pure_bf16_keeps_no_fp32_state(pools):
    """Weights, gradients and the tensors that the optimizer sees are bf16; the result is plain bf16 training's."""
    model = net().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            (model(net_input(step, 0, rank).bfloat16()) / 2).backward()
        optimizer.step()
    wanted = {name: p.detach().float() for name, p in model.named_parameters()}
    masters = plain(net(), lambda m, s, i, r: m(net_input(s, i, r).bfloat16()), 3, sgd(0.5), dtype=torch.bfloat16).weights
    assert max((masters[key] - wanted[key]).abs().max() for key in wanted) > 5e-4, "the recipe must show in the reference"
    for found in pools(2).run(pure_bf16):
        for stage in STAGES:
            weights, kinds = found[stage]
            assert kinds == {torch.bfloat16}, stage
            assert_equal(weights, found[0][0], stage)
            assert_close(weights, wanted, 2e-3, stage)


def on_the_wire(dtype):
    found = {}
    for stage in STAGES:
        engine = engine_for(net(), stage, sgd(0.5), communication_data_type=dtype)
        run = drive(engine, net_loss, 2)
        sent = sum(t.sent_bytes for (kind, state), t in engine.comm.snapshot().items() if state == "gradients" and kind == "reduce_scatter")
        found[stage] = (run.weights, sent)
        engine.destroy()
    return found


def test_communication_data_type_is_what_travels(pools):
    """bf16 on the wire halves the reduce-scatter's bytes and rounds what arrives; all stages agree bit for bit."""
    exact = plain(net(), net_loss, 2, sgd(0.5)).weights
    plain_bytes = pools(2).run(on_the_wire, None)
    for rank, found in enumerate(pools(2).run(on_the_wire, "bf16")):
        for stage in STAGES:
            weights, sent = found[stage]
            assert_equal(weights, found[0][0], stage)
            assert_close(weights, exact, 2e-3, stage)
            assert max((weights[key] - exact[key]).abs().max() for key in exact) > 2e-6
            assert sent * 2 == plain_bytes[rank][stage][1] > 0


def bf16_without_check():
    found = {}
    for stage in (0, 3):
        engine = engine_for(net(), stage, sgd(0.5), bf16={"enabled": True, "check_grad_overflow": False})
        before = weights_of(engine)
        loss = engine(net_input(0, 0, 0).bfloat16())
        engine.backward(loss * (math.nan if engine.global_rank == 1 else 1.0))
        error = error_of(engine.step)
        after = weights_of(engine)
        engine.destroy()
        found[stage] = (error, all(torch.equal(before[key], after[key]) for key in before))
    return found


def test_nan_loss_changes_no_weight_even_without_overflow_check(pools):
    """The message says that the weights are those of the last good step, so they must be, also with check_grad_overflow off."""
    for found in pools(2).run(bf16_without_check):
        for (kind, message), same in found.values():
            assert kind == "EngineError" and "rank(s) [1]" in message
            assert same
