"""Models as people write them: tied, frozen, empty, unused, on meta, compiled, recomputed; trained and read like plain PyTorch's."""

from __future__ import annotations

import copy
import functools
import io

import pytest
import torch
import torch.nn.functional as F
from models import DIM, MLP, VOCAB, Block, TiedGPT, batch, build
from oracle import adamw, assert_close, assert_equal, drive, engine_for, error_of, plain, sgd, weights_of
from torch import nn

STAGES = (0, 1, 2, 3)
BF16 = {"enabled": True}


def gpt_loss(model, step, micro, rank):
    return model(*batch("gpt", step, micro, rank))


def mlp_loss(model, step, micro, rank):
    return model(*batch("mlp", step, micro, rank))


def numbers(step, micro, rank, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(71 * step + 17 * micro + rank))


def states_equal(found, wanted):
    same_keys = list(found) == list(wanted)
    return same_keys and all(torch.equal(found[key], value) and found[key].dtype == value.dtype for key, value in wanted.items())


# ---- tied weights


def tied():
    found = {}
    for stage in STAGES:
        engine = engine_for(build("gpt"), stage, sgd(0.1), gradient_accumulation_steps=2)
        weights = drive(engine, gpt_loss, 3).weights
        module = engine.module
        found[stage] = (weights, module.head.weight is module.emb.weight, list(dict(module.named_parameters())), list(module.state_dict()))
        engine.destroy()
    return found


def test_tied_embedding_and_head(pools):
    """Gradients of both uses are added once, the tie holds, and the weight is listed once (C05)."""
    model = build("gpt")
    wanted = plain(model, gpt_loss, 3, sgd(0.1), gas=2).weights
    for found in pools(2).run(tied):
        for stage in STAGES:
            weights, same, names, keys = found[stage]
            assert_close(weights, wanted, what=stage)
            assert same and names == [name for name, _ in model.named_parameters()]
            assert keys == list(model.state_dict())


class AcrossBlocks(nn.Module):
    """One weight used by two blocks, which are units of their own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.blocks[2][0].weight = self.blocks[0][0].weight

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def across_loss(model, step, micro, rank):
    return model(numbers(step, micro, rank, 2, 6))


def tied_across_blocks():
    found = {}
    for stage in STAGES:
        engine = engine_for(AcrossBlocks(), stage, sgd(0.5))
        weights = drive(engine, across_loss, 2).weights
        module = engine.module
        same = module.blocks[2][0].weight is module.blocks[0][0].weight
        # a replacement after initialize would be trained by nobody
        module.blocks[1][0].weight = nn.Parameter(torch.zeros(6, 6))
        parameter = error_of(lambda engine=engine: drive(engine, across_loss, 1))
        engine.destroy()
        engine = engine_for(AcrossBlocks(), stage, sgd(0.5))
        engine.module.blocks[1] = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        module = error_of(lambda engine=engine: drive(engine, across_loss, 1))
        found[stage] = (weights, same, parameter, module)
        engine.destroy()
    return found


def test_tie_across_blocks_holds_and_a_replacement_is_refused(pools):
    """P17: the tie spans two units; a parameter or module put in after initialize() is an error that names it, not silence."""
    wanted = plain(AcrossBlocks(), across_loss, 2, sgd(0.5)).weights
    for found in pools(2).run(tied_across_blocks):
        for stage in STAGES:
            weights, same, parameter, module = found[stage]
            assert_close(weights, wanted, what=stage)
            assert same
            for kind, message in (parameter, module):
                assert kind == "EngineError" and "'blocks.1.0.weight'" in message and "initialize" in message, (stage, kind, message)


# ---- parameters without a gradient


class Tasks(nn.Module):
    """A trunk and two heads, one of which is used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.trunk = nn.Linear(6, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))

    def forward(self, x, task):
        return self.heads[task](torch.tanh(self.trunk(x))).pow(2).mean()


def task_loss(model, step, micro, rank):
    return model(numbers(step, micro, rank, 2, 6), step % 2)


def task_loss_of_one_rank(model, step, micro, rank):
    """Head 1 is used by rank 1 only, in the first micro-batch of step 1 only."""
    return model(numbers(step, micro, rank, 2, 6), int(step == 1 and micro == 0 and rank == 1))


OPTIMIZERS = {"sgd": sgd(0.3), "adamw": adamw(0.05, weight_decay=0.1)}
TASK_LOSSES = {"in turn": task_loss, "one rank": task_loss_of_one_rank}


def heads_in_turn(optimizer, loss_name):
    found = {}
    for stage in STAGES if loss_name == "in turn" else (0, 1, 2):
        engine = engine_for(Tasks(), stage, OPTIMIZERS[optimizer], gradient_accumulation_steps=2)
        kept = []
        for step in range(4):
            before = weights_of(engine)
            drive(engine, TASK_LOSSES[loss_name], 1, first=step)
            after = weights_of(engine)
            kept.append(tuple(torch.equal(before[f"heads.{h}.weight"], after[f"heads.{h}.weight"]) for h in (0, 1)))
        found[stage] = (weights_of(engine), kept)
        engine.destroy()
    return found


@pytest.mark.parametrize("loss_name", TASK_LOSSES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_parameter_without_gradient_is_left_alone(pools, optimizer, loss_name):
    """No gradient on any rank in the window: no update, no decay, no step counted, at every stage (C07); else zeros stand in."""
    wanted = plain(Tasks(), TASK_LOSSES[loss_name], 4, OPTIMIZERS[optimizer], gas=2).weights
    kept = [(False, True), (True, False)] * 2 if loss_name == "in turn" else [(False, True), (False, False), (False, True), (False, True)]
    for found in pools(2).run(heads_in_turn, optimizer, loss_name):
        for stage in found:
            assert_close(found[stage][0], wanted, what=stage)
            assert found[stage][1] == kept, stage


class Empty(nn.Module):
    """One weight has no elements; it stands first or last."""

    def __init__(self, first):
        super().__init__()
        torch.manual_seed(6)
        order = ("nothing", "a", "b") if first else ("a", "b", "nothing")
        made = {"a": nn.Linear(8, 8), "nothing": nn.Linear(8, 0, bias=False), "b": nn.Linear(8, 1)}
        for name in order:
            setattr(self, name, made[name])

    def forward(self, x):
        x = torch.tanh(self.a(x))
        return (self.b(x) + self.nothing(x).sum() * 0).float().pow(2).mean()


def empty_loss(dtype):
    return lambda model, step, micro, rank: model(numbers(step, micro, rank, 2, 8).to(dtype))


def zero_elements(folder, precision):
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    keys = {} if precision == "fp32" else {"bf16": BF16}
    found = {}
    for stage in STAGES:
        for first in (True, False):
            engine = engine_for(Empty(first), stage, adamw(weight_decay=0.1), gradient_clipping=1.0, **keys)
            weights = drive(engine, empty_loss(dtype), 2).weights
            shape = tuple(engine.module.nothing.weight.shape)
            engine.save_checkpoint(folder, tag=f"{stage}{first}")
            straight = drive(engine, empty_loss(dtype), 1, first=2).weights
            state = engine.module.state_dict()
            engine.destroy()
            engine = engine_for(Empty(first), stage, adamw(weight_decay=0.1), gradient_clipping=1.0, **keys)
            engine.load_checkpoint(folder, tag=f"{stage}{first}")
            assert_equal(drive(engine, empty_loss(dtype), 1, first=2).weights, straight)
            engine.module.load_state_dict(state)
            found[stage, first] = (weights, shape, tuple(state["nothing.weight"].shape))
            engine.destroy()
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parameters_without_elements(pools, precision, tmp_path):
    """They keep shape and key, through save and load too, and the rest trains at parity, wherever they stand (C14)."""
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    for found in pools(2).run(zero_elements, str(tmp_path), precision):
        for (stage, first), (weights, shape, saved) in found.items():
            wanted = plain(Empty(first), empty_loss(dtype), 2, adamw(weight_decay=0.1), clip=1.0, dtype=dtype).weights
            assert_close(weights, wanted, 2e-5 if precision == "fp32" else 1e-2, (stage, first))
            assert shape == saved == (0, 8)


# ---- between updates


class Eval(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(9)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.out = nn.Linear(6, 6)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.out(x)


def eval_loss(model, step, micro, rank):
    return model(numbers(step, micro, rank, 2, 6)).pow(2).mean()


def between_updates(stage):
    engine = engine_for(Eval(), stage, adamw())
    rank = engine.global_rank
    input_grads, untouched = [], []
    for step in range(2):
        drive(engine, eval_loss, 1, first=3 * step)
        before = weights_of(engine)
        engine.eval()
        with torch.inference_mode():
            engine(numbers(50, 0, rank, 2, 6))
        untouched.append(all(torch.equal(before[key], value) for key, value in weights_of(engine).items()))
        engine.train()
        drive(engine, eval_loss, 1, first=3 * step + 1)
        before = weights_of(engine)
        engine.eval()
        x = numbers(51 + step, 0, rank, 2, 6).requires_grad_()
        input_grads.append(torch.autograd.grad(engine(x).sum(), x)[0])
        with torch.no_grad():
            h = numbers(60, 0, 0, 1, 6)
            for _ in range(int(engine.comm.sum_(torch.tensor([2])).item())):
                h = engine(h)
        untouched.append(all(torch.equal(before[key], value) for key, value in weights_of(engine).items()))
        untouched.append(error_of(engine.step)[0] == "EngineError")  # none of it counts as a backward
        engine.train()
        drive(engine, eval_loss, 1, first=3 * step + 2)
    weights = weights_of(engine)
    engine.destroy()
    return weights, input_grads, untouched


@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_between_updates_leaves_no_trace(pools, stage):
    """inference_mode, gradients with respect to an input, and a decode loop: right themselves, and training goes on at parity (C16)."""
    wanted = plain(Eval(), eval_loss, 6, adamw()).weights
    for rank, (weights, input_grads, untouched) in enumerate(pools(2).run(between_updates, stage)):
        assert_close(weights, wanted)
        assert all(untouched)
        model = Eval()
        plain(model, eval_loss, 2, adamw())
        x = numbers(51, 0, rank, 2, 6).requires_grad_()
        grads = torch.autograd.grad(model(x).sum(), x)[0]
        assert torch.allclose(input_grads[0], grads, atol=1e-5)


# ---- buffers


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(12)
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 1)
        self.register_buffer("freq", 1.0 / (10000 ** (torch.arange(6) / 7.0)), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.linspace(0, 1, 7) / 3)

    def forward(self, x):
        if self.training:
            self.count += 1
        x = self.norm(self.first(x)) * self.freq.to(x.dtype)
        return self.last(x).float().pow(2).mean()


def buffer_loss(model, step, micro, rank):
    return model(numbers(step, micro, 0, 4, 6).bfloat16())


def buffers(folder):
    found = {}
    for stage in STAGES:
        engine = engine_for(Buffers(), stage, adamw(), bf16=BF16)
        drive(engine, buffer_loss, 1)
        statistics = engine.module.norm.running_mean.clone()
        drive(engine, buffer_loss, 1, first=1)
        engine.save_checkpoint(folder, tag=str(stage))
        saved = {name: b.clone() for name, b in engine.module.named_buffers()}
        norm_dtype = engine.module.norm.weight.dtype
        state = engine.module.state_dict()
        engine.destroy()
        for way in ("checkpoint", "state_dict"):
            model = Buffers()
            with torch.no_grad():
                model.norm.running_mean.fill_(7.0)
                model.table.fill_(7.0)
            engine = engine_for(model, stage, adamw(), bf16=BF16)
            engine.load_checkpoint(folder, tag=str(stage)) if way == "checkpoint" else engine.load_module_state_dict(state)
            found[stage, way] = (saved, {name: b.clone() for name, b in engine.module.named_buffers()}, norm_dtype, statistics)
            engine.destroy()
    return found


def test_buffers_keep_dtype_and_value(pools, tmp_path):
    """In bf16: float buffers stay fp32, integers whole, BatchNorm's statistics are right, and all come back bit for bit (C18)."""
    fresh = dict(Buffers().named_buffers())
    reference = Buffers()
    reference.first.bfloat16()
    reference.norm(reference.first(numbers(0, 0, 0, 4, 6).bfloat16()))
    for found in pools(2).run(buffers, str(tmp_path)):
        for (stage, way), (saved, loaded, norm_dtype, statistics) in found.items():
            assert torch.equal(statistics, reference.norm.running_mean)
            assert {name: b.dtype for name, b in saved.items()} == {name: b.dtype for name, b in fresh.items()}, stage
            assert states_equal(loaded, saved), (stage, way)
            assert torch.equal(saved["freq"], fresh["freq"]) and torch.equal(saved["table"], fresh["table"])
            assert saved["count"] == 2 and saved["norm.num_batches_tracked"] == 2
            assert norm_dtype == torch.float32
            assert not torch.equal(saved["norm.running_mean"], fresh["norm.running_mean"])


def zero_init_buffers():
    import stateroom

    found = {}
    for name, source in {"dtype": {"dtype": torch.bfloat16}, "config": {"config_dict_or_path": {"bf16": BF16}}}.items():
        with stateroom.zero.Init(**source):
            model = Buffers()
        found[name] = ({n: b.dtype for n, b in model.named_buffers()}, model.freq.clone(), {p.dtype for p in model.parameters()})
    return found


def test_zero_init_keeps_the_buffers_dtype(pools):
    """P20: frequencies rounded to bf16 would make positions collapse."""
    fresh = dict(Buffers().named_buffers())
    for found in pools(2).run(zero_init_buffers):
        for dtypes, freq, param_dtypes in found.values():
            assert dtypes == {name: b.dtype for name, b in fresh.items()}
            assert torch.equal(freq, fresh["freq"])
            assert param_dtypes == {torch.bfloat16}


# ---- frozen weights


class Adapted(nn.Module):
    """Frozen blocks, each with a small trained adapter, and a frozen embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(13)
        self.emb = nn.Embedding(VOCAB, DIM).requires_grad_(False)
        self.blocks = nn.ModuleList()
        for _ in range(3):
            block = nn.ModuleDict({"base": Block(), "down": nn.Linear(DIM, 2, bias=False), "up": nn.Linear(2, DIM, bias=False)})
            block["base"].requires_grad_(False)
            self.blocks.append(block)
        self.head = nn.Linear(DIM, VOCAB).requires_grad_(False)

    def forward(self, ids, targets):
        x = self.emb(ids)
        for block in self.blocks:
            x = block["base"](x) + block["up"](block["down"](x))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def adapter_groups(model):
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if "down" in n and "base" not in n]},
        {"params": [p for n, p in named if "base" in n or "emb" in n]},  # nothing to train in it
        {"params": [p for n, p in named if ".up." in n and "base" not in n], "lr": 0.02},
    ]


def adapters():
    found = {}
    for stage in STAGES:
        model = Adapted()
        config = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}
        engine = adapter_engine(model, stage, config)
        run = drive(engine, gpt_loss, 3)
        state = engine.module_state_dict()
        small = engine.module_state_dict(exclude_frozen_parameters=True)
        groups = [group["lr"] for group in engine.optimizer.param_groups]
        found[stage] = (run.weights, state, list(small), groups)
        engine.destroy()
    return found


def adapter_engine(model, stage, section):
    import stateroom

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "optimizer": section,
        "zero_optimization": {"stage": stage},
        "units": {"min_numel": 0},
    }
    return stateroom.initialize(model, config=config, model_parameters=adapter_groups(model))[0]


def test_frozen_weights_with_small_adapters(pools):
    """P16: trains at parity with a group that has nothing to train; exports hold frozen and trained, or the adapters only."""
    model = Adapted()
    names = {id(p): n for n, p in model.named_parameters()}

    def make(params):
        ups = [m for p, m in zip([p for p in model.parameters() if p.requires_grad], params, strict=True) if ".up." in names[id(p)]]
        downs = [m for m in params if all(m is not u for u in ups)]
        return torch.optim.AdamW([{"params": downs}, {"params": ups, "lr": 0.02}], lr=0.01, weight_decay=0.1)

    wanted = plain(model, gpt_loss, 3, make, gas=2).weights
    for found in pools(2).run(adapters):
        for stage in STAGES:
            weights, state, small, rates = found[stage]
            assert_close(weights, wanted, what=stage)
            assert_close(state, {key: value for key, value in model.state_dict().items()}, what=stage)
            assert small == [n for n in model.state_dict() if "base" not in n and ("up" in n or "down" in n)]
            assert rates == [0.01, 0.01, 0.02]
            frozen = Adapted().state_dict()
            assert all(torch.equal(state[n], frozen[n]) for n in state if n not in small)


# ---- whole weights


def whole_state(folder):
    found = {}
    for stage in STAGES:
        engine = engine_for(build("gpt"), stage, adamw())
        drive(engine, gpt_loss, 2)
        found[stage] = engine.module.state_dict()
        again = engine.module_state_dict()
        assert states_equal(again, found[stage])
        if engine.global_rank == 0:
            torch.save(found[stage], f"{folder}/{stage}.pt")
        engine.save_16bit_model(folder, f"weights{stage}.bin")
        engine.destroy()
    return found


def test_state_dict_gives_whole_weights_at_every_stage(pools, tmp_path):
    """P08: at stage 3 too, on all ranks, equal to stage 0's bit for bit; the file loads into plain PyTorch and computes the same."""
    model = build("gpt")
    plain(model, gpt_loss, 2, adamw())
    for found in pools(2).run(whole_state, str(tmp_path)):
        for stage in STAGES:
            assert list(found[stage]) == list(model.state_dict())
            assert_close(found[stage], model.state_dict(), what=stage)
            assert_close(found[stage], found[0], 1e-6, stage)
    for stage in STAGES:
        for file in (f"{stage}.pt", f"weights{stage}.bin"):
            fresh = build("gpt")
            fresh.load_state_dict(torch.load(tmp_path / file, weights_only=True))
            assert gpt_loss(fresh, 7, 0, 0).item() == pytest.approx(gpt_loss(model, 7, 0, 0).item(), abs=1e-5)


def state_on_one_rank():
    """The other rank has gone on: rank 0 must not wait forever."""
    engine = engine_for(build("gpt"), 3, adamw())
    comm = engine.comm
    comm.meet = functools.partial(type(comm).meet, comm, timeout_s=1.5)
    error = error_of(engine.module.state_dict) if engine.global_rank == 0 else ("", "")
    comm.barrier()
    drive(engine, gpt_loss, 1)  # and it can go on when the script catches it
    engine.destroy()
    return error


def generation(stage):
    from stateroom.zero import unwrap_model_for_generation

    engine = engine_for(build("gpt"), stage, adamw())
    for round_ in range(2):
        engine.eval()
        lengths = []
        with torch.no_grad(), unwrap_model_for_generation(engine) as model:
            inside = engine.comm.snapshot()
            ids = torch.zeros((1, 1), dtype=torch.int64)
            for _ in range(7 if engine.global_rank == round_ else 2):  # the longer rank changes
                x = model.emb(ids)
                for block in model.blocks:
                    x = block(x)
                ids = torch.cat([ids, model.head(model.norm(x))[:, -1:].argmax(-1)], dim=1)
            lengths.append(ids.shape[1])
            quiet = engine.comm.snapshot() == inside
        engine.train()
        run = drive(engine, gpt_loss, 1, first=round_)
        at_rest = not any(unit.gathered for unit in engine.sharded.units if unit.sharded)
        assert quiet and at_rest
    engine.destroy()
    return lengths, run.weights


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_may_generate_different_lengths(pools, stage):
    """P18, with everything gathered; training afterwards is as without it."""
    wanted = plain(build("gpt"), gpt_loss, 2, adamw()).weights
    found = pools(2).run(generation, stage)
    assert [lengths for lengths, _ in found] == [[3], [8]]
    for _, weights in found:
        assert_close(weights, wanted, atol=1e-5)


def test_state_dict_on_one_rank_names_the_missing_one(pools):
    (kind, message), other = pools(2).run(state_on_one_rank)
    assert kind == "RankError" and "rank(s) [1] of 2 never called it" in message and "state_dict()" in message
    assert other == ("", "")


def reading_released():
    from stateroom.zero import GatheredParameters

    engine = engine_for(build("gpt"), 3, sgd(0.1))
    weight = engine.module.blocks[1].up.weight
    found = {
        "shape": (tuple(weight.shape), weight.dtype, weight.numel(), weight.requires_grad, weight.dim()),
        "repr": repr(weight),
        "sum": error_of(lambda: weight.sum()),
        "add": error_of(lambda: weight + 1),
        "item": error_of(lambda: weight[0, 0].item()),
        "write": error_of(lambda: weight.data.zero_()),
        "save": error_of(lambda: torch.save(weight, io.BytesIO())),
        "numpy": error_of(lambda: weight.detach().numpy()),
    }
    wanted = build("gpt").blocks[1].up.weight
    with GatheredParameters(weight):
        found["values"] = torch.equal(weight, wanted)
        array = weight.detach().numpy()  # shares the memory, which may then not be taken away
        with torch.no_grad():
            weight.zero_()  # without modifier_rank nothing is kept
    found["again"] = error_of(lambda: weight.sum())
    found["array"] = bool((array == 0).all())
    found["copy"] = torch.equal(copy.deepcopy(weight), wanted)  # all ranks copy, so it is gathered
    with GatheredParameters([weight], modifier_rank=1):
        found["not kept"] = torch.equal(weight, wanted)
        with torch.no_grad():
            weight.fill_(float(engine.global_rank + 1))
    with GatheredParameters(engine.module):
        found["kept"] = bool((weight == 2).all()), bool(torch.equal(engine.module.emb.weight, build("gpt").emb.weight))
    found["trained"] = drive(engine, gpt_loss, 2).weights
    engine.destroy()
    found["after destroy"] = error_of(lambda: weight.sum())
    return found


def test_released_parameters_are_never_read_in_silence(pools):
    """Shape questions are answered; values raise with the parameter's name; GatheredParameters reads, and writes with modifier_rank."""
    model = build("gpt")
    with torch.no_grad():
        model.blocks[1].up.weight.fill_(2.0)
    trained = plain(model, gpt_loss, 2, sgd(0.1)).weights
    for found in pools(2).run(reading_released):
        assert found["shape"] == ((2 * DIM, DIM), torch.float32, 2 * DIM * DIM, True, 2)
        assert "'blocks.1.up.weight'" in found["repr"] and "nan" not in found["repr"]
        for use in ("sum", "add", "item", "write", "save", "numpy", "again"):
            kind, message = found[use]
            assert kind == "EngineError" and "'blocks.1.up.weight'" in message and "GatheredParameters" in message, (use, found[use])
        assert found["array"] and found["copy"] and found["values"] and found["not kept"] and found["kept"] == (True, True)
        assert_close(found["trained"], trained)
        kind, message = found["after destroy"]
        assert kind == "EngineError" and "destroyed" in message and "module_state_dict" in message


def modifier_rank_at_all_stages(precision):
    from stateroom.zero import GatheredParameters

    found = {}
    for stage in STAGES:
        keys = {} if precision == "fp32" else {"bf16": BF16}
        engine = engine_for(build("gpt"), stage, sgd(0.1), **keys)
        weight = engine.module.blocks[0].down.weight
        with GatheredParameters(weight, modifier_rank=0), torch.no_grad():
            if engine.global_rank == 0:
                weight.fill_(0.25)
        drive(engine, gpt_loss, 1)
        found[stage] = weights_of(engine)
        engine.destroy()
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_write_through_gathered_parameters_reaches_the_master(pools, precision):
    """At every stage: the next update starts from what was written, not from an old fp32 copy."""
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    model = build("gpt")
    with torch.no_grad():
        model.blocks[0].down.weight.fill_(0.25)
    wanted = plain(model, gpt_loss, 1, sgd(0.1), dtype=dtype).weights
    for found in pools(2).run(modifier_rank_at_all_stages, precision):
        for stage in STAGES:
            # what was not written keeps its fp32 master in the engine as in the reference, up to bf16's rounding of untouched units
            assert_close(found[stage], wanted, 2e-5 if precision == "fp32" else 5e-3, stage)


def safe_functions(stage, precision):
    from stateroom import utils

    keys = {} if precision == "fp32" else {"bf16": BF16}
    engine = engine_for(build("gpt"), stage, adamw(), gradient_accumulation_steps=1, **keys)
    named = dict(engine.module.named_parameters())
    param = named["blocks.1.up.weight"]
    found = {"no gradient yet": utils.safe_get_full_grad(param), "no state yet": utils.safe_get_full_optimizer_state(param, "exp_avg")}
    engine.backward(gpt_loss(engine, 0, 0, engine.global_rank))
    found["grads"] = {name: utils.safe_get_full_grad(p) for name, p in named.items()}
    local = utils.safe_get_local_grad(param)
    utils.safe_set_local_grad(param, torch.ones_like(local))
    found["local grad set"] = utils.safe_get_full_grad(param)
    utils.safe_set_full_grad(param, torch.full_like(found["grads"]["blocks.1.up.weight"], 0.5))
    found["full grad set"] = utils.safe_get_full_grad(param)
    engine.step()
    found["exp_avg"] = utils.safe_get_full_optimizer_state(param, "exp_avg")
    found["step"] = utils.safe_get_full_optimizer_state(param, "step")
    found["unknown"] = utils.safe_get_full_optimizer_state(param, "momentum_buffer")
    found["local sizes"] = [
        x.numel() if x is not None else 0
        for x in (local, utils.safe_get_local_fp32_param(param), utils.safe_get_local_optimizer_state(param, "exp_avg"))
    ]
    values = torch.arange(param.numel(), dtype=torch.float32).reshape(param.shape) / 64
    utils.safe_set_full_fp32_param(param, values)
    utils.safe_set_full_optimizer_state(param, values * 2, "exp_avg")
    found["param set"] = utils.safe_get_full_fp32_param(param), engine.module.state_dict()["blocks.1.up.weight"].float().clone()
    found["state set"] = utils.safe_get_full_optimizer_state(param, "exp_avg")
    mine = utils.safe_get_local_fp32_param(param)
    utils.safe_set_local_fp32_param(param, mine + 1)
    moments = utils.safe_get_local_optimizer_state(param, "exp_avg")
    if moments is not None:
        utils.safe_set_local_optimizer_state(param, moments + 1, "exp_avg")
    found["local set"] = utils.safe_get_full_fp32_param(param), utils.safe_get_full_optimizer_state(param, "exp_avg")
    found["wrong shape"] = error_of(lambda: utils.safe_set_full_fp32_param(param, torch.zeros(3)))
    found["foreign"] = error_of(lambda: utils.safe_set_full_fp32_param(nn.Parameter(torch.zeros(3)), torch.zeros(3)))
    found["late grad"] = error_of(lambda: utils.safe_set_full_grad(param, torch.zeros(param.shape)))
    engine.destroy()
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_safe_get_and_set(pools, stage, precision):
    """Whole and local master weights, gradients and moments can be read and set between calls, at every stage."""
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    model = build("gpt").to(dtype)
    grads = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    for rank in range(2):
        model.zero_grad()
        gpt_loss(model, 0, 0, rank).backward()
        for name, p in model.named_parameters():
            grads[name] += p.grad.float() / 2
    results = pools(2).run(safe_functions, stage, precision)
    shape = (2 * DIM, DIM)
    values = torch.arange(2 * DIM * DIM, dtype=torch.float32).reshape(shape) / 64
    for found in results:
        assert found["no gradient yet"] is None and found["no state yet"] is None and found["unknown"] is None
        assert_close(found["grads"], grads, 1e-6)
        assert torch.equal(found["local grad set"], torch.ones(shape))
        assert torch.equal(found["full grad set"], torch.full(shape, 0.5))
        assert torch.allclose(found["exp_avg"], torch.full(shape, 0.05)) and found["step"] == 1
        assert len(set(found["local sizes"])) == 1
        assert torch.equal(found["param set"][0], values) and torch.equal(found["param set"][1], values.to(dtype).float())
        assert torch.equal(found["state set"], values * 2)
        assert torch.equal(found["local set"][0], values + 1) and torch.equal(found["local set"][1], values * 2 + 1)
        assert found["wrong shape"][0] == "EngineError" and "(3,)" in found["wrong shape"][1]
        assert found["foreign"][0] == "EngineError"
        assert found["late grad"][0] == "EngineError" and "between backward() and step()" in found["late grad"][1]
    sizes = [found["local sizes"][0] for found in results]
    assert sum(sizes) == values.numel() * (2 if stage == 0 else 1)


def load_then_train(precision):
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    keys = {} if precision == "fp32" else {"bf16": BF16}
    torch.manual_seed(77)
    other = TiedGPT().state_dict()
    found = {}
    for stage in STAGES:
        engine = engine_for(build("gpt"), stage, sgd(0.1), **keys)
        engine.module.load_state_dict(other)
        loaded = engine.module.state_dict()
        assert states_equal(loaded, {key: value.to(dtype) for key, value in other.items()}), stage
        wrong = {"nonsense": torch.zeros(1), **dict(list(other.items())[1:])}
        missing = error_of(functools.partial(engine.load_module_state_dict, wrong))
        report = engine.load_module_state_dict({**other, "extra": torch.zeros(1)}, strict=False)
        weights = drive(engine, gpt_loss, 2).weights
        found[stage] = (weights, missing, report.unexpected_keys, report.missing_keys)
        engine.destroy()
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_load_state_dict_then_training_equals_plain(pools, precision):
    """What is loaded reaches shards and masters at every stage: no step falls back to the initial weights (C31)."""
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    torch.manual_seed(77)
    model = TiedGPT()
    wanted = plain(model.to(dtype), gpt_loss, 2, sgd(0.1), dtype=dtype).weights
    for found in pools(2).run(load_then_train, precision):
        for stage in STAGES:
            weights, missing, unexpected, absent = found[stage]
            assert_close(weights, wanted, 2e-5 if precision == "fp32" else 4e-3, stage)
            assert missing[0] == "RuntimeError" and "nonsense" in missing[1] and "emb.weight" in missing[1]
            assert (unexpected, absent) == (["extra"], [])


def partial_loads(folder):
    """C31 (a) full load and (b) without optimizer states, each followed by a step with rate 0, into another seed's engine."""
    found = {}
    for stage in STAGES:
        for precision in ("fp32", "bf16"):
            keys = {} if precision == "fp32" else {"bf16": BF16}

            def new(seed, lr, stage=stage, keys=keys):
                torch.manual_seed(seed)
                model = TiedGPT()
                model.blocks[0].requires_grad_(False)
                return engine_for(model, stage, adamw(lr), **keys)

            tag = f"{stage}{precision}"
            engine = new(1, 0.01)
            drive(engine, gpt_loss, 2)
            engine.save_checkpoint(folder, tag=tag)
            saved = engine.module.state_dict()
            engine.destroy()
            for optimizer_states in (True, False):
                engine = new(2, 0.0)
                engine.load_checkpoint(folder, tag=tag, load_optimizer_states=optimizer_states)
                engine.set_lr(0.0)
                for group in engine.optimizer.param_groups:
                    group["weight_decay"] = 0.0
                drive(engine, gpt_loss, 1)
                found[tag, optimizer_states] = states_equal(engine.module.state_dict(), saved)
                engine.destroy()
    return found


def test_loaded_weights_survive_a_step_of_rate_zero(pools, tmp_path):
    for found in pools(2).run(partial_loads, str(tmp_path)):
        assert all(found.values()), found


# ---- how a model is built


def built_under_init(precision):
    import stateroom

    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    keys = {} if precision == "fp32" else {"bf16": BF16}
    found = {}
    for stage in STAGES:
        torch.manual_seed(3)
        with stateroom.zero.Init(config_dict_or_path=keys or None):
            model = TiedGPT()
        sizes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        engine = engine_for(model, stage, adamw(), **keys)
        found[stage] = (sizes, drive(engine, gpt_loss, 2).weights, {p.dtype for p in engine.parameters()} == {dtype})
        engine.destroy()
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_built_under_zero_init_trains_like_plain(pools, precision):
    """Same seed, same weights, same training, whichever stage the engine then has."""
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    wanted = plain(build("gpt"), gpt_loss, 2, adamw(), dtype=dtype).weights
    shapes = {name: tuple(p.shape) for name, p in build("gpt").named_parameters()}
    for found in pools(2).run(built_under_init, precision):
        for stage in STAGES:
            sizes, weights, right_dtype = found[stage]
            assert sizes == shapes and right_dtype
            assert_close(weights, wanted, 2e-5 if precision == "fp32" else 2.5e-2, stage)


def born_on_meta():
    found = {}
    for stage in STAGES:
        with torch.device("meta"):
            model = MLP()
        torch.manual_seed(3 if torch.distributed.get_rank() == 0 else 99)
        engine = engine_for(model, stage, adamw())
        found[stage] = (weights_of(engine), drive(engine, mlp_loss, 2).weights)
        engine.destroy()
    engine = engine_for(MetaBuffers(), 3, adamw())
    found["buffers"] = {name: b.clone() for name, b in engine.module.named_buffers()}
    engine.destroy()
    with torch.device("meta"):
        model = TiedGPT()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)  # over meta parameters, as scripts build it
    engine = engine_for(model, 3, optimizer=optimizer)
    before = weights_of(engine)
    after = drive(engine, gpt_loss, 1).weights
    moved = all(not torch.equal(before[name], after[name]) for name in before)
    found["gpt"] = (before, moved, engine.module.head.weight is engine.module.emb.weight)
    engine.destroy()
    return found


class MetaBuffers(nn.Module):
    """BatchNorm and linear layers, made on meta."""

    def __init__(self):
        super().__init__()
        import stateroom

        with stateroom.OnDevice(device="meta"):
            self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))

    def forward(self, x):
        return self.net(x).pow(2).mean()


def test_a_meta_model_comes_to_life(pools):
    """Through its own initialisers: with rank 0's seed it has the weights of the plain build, on all ranks, and trains at parity."""
    start = dict(build("mlp").named_parameters())
    wanted = plain(build("mlp"), mlp_loss, 2, adamw()).weights
    for found in pools(2).run(born_on_meta):
        for stage in STAGES:
            assert_equal(found[stage][0], {name: p.detach() for name, p in start.items()}, stage)
            assert_close(found[stage][1], wanted, what=stage)
        assert {name: b.flatten().tolist() for name, b in found["buffers"].items()} == {
            "net.1.running_mean": [0.0] * 4,
            "net.1.running_var": [1.0] * 4,
            "net.1.num_batches_tracked": [0],
        }
        before, moved, same = found["gpt"]
        assert moved and same
        assert all(torch.isfinite(value).all() for value in before.values())
        assert torch.equal(before["blocks.0.norm1.weight"], torch.ones(DIM))


# ---- compile, recompute, units


def compiled(folder):
    """Each way to compile, at stages 2 and 3: keys, parity, and checkpoints both ways."""
    found, states = {}, {}
    for stage in (2, 3):
        for way, backend in (("none", ""), ("before", "eager"), ("method", "eager"), ("method", "aot_eager"), ("config", "eager")):
            torch._dynamo.reset()
            keys = {"compile": {"enabled": True, "backend": backend}} if way == "config" else {}
            model = build("gpt")
            engine = engine_for(torch.compile(model, backend=backend) if way == "before" else model, stage, adamw(), **keys)
            if way == "method":
                engine.compile(backend=backend)
            weights = drive(engine, gpt_loss, 2).weights
            state = engine.module.state_dict()
            tag = f"{stage}{way}{backend}"
            engine.save_checkpoint(folder, tag=tag)
            plain_tag = f"{stage}none"
            engine.load_checkpoint(folder, tag=plain_tag)
            states[tag] = {name: value.clone() for name, value in state.items()} if way == "none" else state
            loads = way == "none" or states_equal(engine.module.state_dict(), states[plain_tag])
            found[tag] = (weights, list(state), engine.is_compiled is (way != "none"), loads)
            engine.destroy()
        for tag in (f"{stage}beforeeager", f"{stage}methodeager"):
            engine = engine_for(build("gpt"), stage, adamw())
            engine.load_checkpoint(folder, tag=tag)
            found[f"{tag} back"] = weights_of(engine)
            engine.destroy()
    return found


def test_compiled_models_keep_plain_names_and_numbers(pools, tmp_path):
    """torch.compile before initialize, engine.compile() after it, or the config: same keys, same losses, files load both ways (C19)."""
    model = build("gpt")
    wanted = plain(model, gpt_loss, 2, adamw()).weights
    for found in pools(2).run(compiled, str(tmp_path)):
        for tag, facts in found.items():
            if tag.endswith("back"):
                assert_equal(facts, found[tag.removesuffix(" back")][0], tag)
                continue
            assert_close(facts[0], wanted, what=tag)
            assert facts[1] == list(model.state_dict()), tag
            assert facts[2] and facts[3], tag


class Counted(nn.Module):
    """A block that counts how often its forward really runs."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        Counted.calls += 1
        return x + self.drop(self.down(torch.tanh(self.up(x))))


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(21)
        self.blocks = nn.ModuleList(Counted() for _ in range(4))
        self.out = nn.Linear(DIM, 4)

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.out(x), y)


def recomputed():
    found = {}
    for stage in (0, 3):
        for policy, every in (("none", 1), ("full", 1), ("full", 2), ("full", 3), ("selective", 1)):
            torch.manual_seed(1)  # dropout
            engine = engine_for(Deep(), stage, adamw(), activation_checkpointing={"policy": policy, "every": every})
            Counted.calls = 0
            run = drive(engine, mlp_loss, 2)
            with torch.no_grad():
                before = Counted.calls
                engine(*batch("mlp", 5, 0, 0))
            found[stage, policy, every] = (run.losses, run.weights, before, Counted.calls - before)
            engine.destroy()
    return found


def test_recompute_changes_no_number_and_really_recomputes(pools):
    """full, every n-th, selective: losses are identical, dropout included; forwards of recomputed blocks run twice, none in evaluation."""
    extra = {("none", 1): 0, ("full", 1): 4, ("full", 2): 2, ("full", 3): 2, ("selective", 1): 4}
    for found in pools(2).run(recomputed):
        for (stage, policy, every), (losses, weights, calls, evaluation) in found.items():
            assert losses == found[0, "none", 1][0], (stage, policy, every)
            assert_equal(weights, found[stage, "none", 1][1], (stage, policy, every))
            assert calls == 2 * (4 + extra[policy, every]), (stage, policy, every)
            assert evaluation == 4


def units_of():
    found = {}
    for name, section in {
        "smallest": {"min_numel": 0},
        "classes": {"classes": ["Block"]},
        "dotted": {"classes": ["models.Block"]},
        "linear": {"classes": ["Linear"]},
        "merged": {"min_numel": 4000},
        "opened": {"min_numel": 0, "max_numel": 10},
        "auto": {},
    }.items():
        engine = engine_for(build("gpt"), 3, adamw(), units=section)
        names = [unit.name for unit in engine.sharded.units]
        found[name] = (names, drive(engine, gpt_loss, 2).weights)
        engine.destroy()
    return found


def test_units_follow_the_config_and_change_no_number(pools):
    wanted = plain(build("gpt"), gpt_loss, 2, adamw()).weights
    linears = [name for name, module in build("gpt").named_modules() if isinstance(module, nn.Linear) and name != "head"]
    for found in pools(2).run(units_of):
        for name, (_, weights) in found.items():
            assert_close(weights, wanted, what=name)
        blocks = ["blocks.0", "blocks.1", "blocks.2"]
        names = {name: units for name, (units, _) in found.items()}
        assert names["smallest"] == names["classes"] == names["dotted"] == ["root", *blocks]
        assert names["auto"] == ["root", "blocks.0..2"]  # all of them are smaller than what a collective is worth
        assert names["linear"] == ["root", *linears]
        assert names["merged"] == ["root", "blocks.0..1", "blocks.2"]
        assert names["opened"] == ["root"]
