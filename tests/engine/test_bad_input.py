"""What users get wrong ends at once with one clear message, the same on every rank that has it, and never in a hang."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
from oracle import adamw, assert_equal, engine_for, error_of, sgd, weights_of
from stateroom.parallel.distributed import free_port
from torch import nn

STAGES = (0, 1, 2, 3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().pow(2).mean()


# ---- configs


def initialize_errors(cases):
    import stateroom

    return [error_of(lambda config=config: stateroom.initialize(Net(), config=config)) for config in cases]


def test_wrong_configs_name_the_place_and_the_fix(pools, tmp_path):
    unclosed = tmp_path / "unclosed.json"
    unclosed.write_text('{"train_batch_size": 4,\n "zero_optimization": {"stage": 1,\n "optimizer": {"type": "SGD"}\n')
    typo = tmp_path / "typo.json"
    deep = {"train_batch_size": 4, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none", "pin_memry": True}}}
    typo.write_text(json.dumps(deep, indent=1))
    missing = tmp_path / "nowhere.json"
    ok = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    cases: list[tuple[object, list[str]]] = [
        (str(missing), [str(missing)]),
        (str(unclosed), [str(unclosed), "line"]),
        (str(typo), ["zero_optimization.offload_optimizer.pin_memry", "pin_memory", "line"]),
        ({**ok, "zero_optimisation": {"stage": 2}}, ["zero_optimisation", "zero_optimization"]),
        ({**ok, "gradient_clipping": "one"}, ["gradient_clipping", "one"]),
        ({**ok, "train_micro_batch_size_per_gpu": "two"}, ["train_micro_batch_size_per_gpu", "two"]),
        ({**ok, "train_batch_size": 30, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, ["30", "4", "2"]),
        ({"train_batch_size": 3, "optimizer": ok["optimizer"]}, ["3", "2"]),
        ({**ok, "optimizer": {"type": "Adamm", "params": {}}}, ["Adamm", "Adam"]),
        ({**ok, "optimizer": {"type": "SGD", "params": {"learning_rate": 1}}}, ["learning_rate"]),
        ({**ok, "scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 4}}}, ["warmup_steps", "warmup_num_steps"]),
        ({**ok, "fp16": {"enabled": True}, "bf16": {"enabled": True}}, ["fp16", "bf16"]),
        ({**ok, "zero_optimization": {"stage": 4}}, ["zero_optimization.stage", "4"]),
        ({**ok, "bf16": {"enabled": "yes"}}, ["bf16.enabled", "yes"]),
        (None, ["no config"]),
    ]
    for found in pools(2).run(initialize_errors, [config for config, _ in cases]):
        for (kind, message), (config, words) in zip(found, cases, strict=True):
            assert kind == "ConfigError", (config, kind, message)
            for word in words:
                assert word in message, (config, word, message)


def auto_everywhere():
    import stateroom

    found = {}
    base = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    for name, keys in {
        "clipping": {"gradient_clipping": "auto"},
        "micro": {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": 4},
        "stage": {"zero_optimization": {"stage": "auto"}},
        "bf16": {"bf16": {"enabled": "auto"}},
        "rate": {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}}},
    }.items():
        try:
            engine, *_ = stateroom.initialize(Net(), config={**base, **keys})
        except stateroom.ConfigError as error:
            found[name] = str(error)
            continue
        engine.backward(engine(torch.ones(2, 4)))
        engine.step()
        found[name] = "auto" in json.dumps(engine.config.to_dict()["optimizer"]) or engine.gradient_clipping() == "auto"
        engine.destroy()
    return found


def test_auto_is_resolved_or_refused_at_initialize(pools):
    """It never lives on to crash in step() (C03)."""
    for found in pools(2).run(auto_everywhere):
        assert len(found) == 5
        for name, outcome in found.items():
            assert outcome is False or (isinstance(outcome, str) and "auto" in outcome), (name, outcome)


# ---- models and optimizers


class NoReset(nn.Module):
    """Has a weight of its own and no way to initialise it."""

    def __init__(self, device):
        super().__init__()
        self.inner = nn.Linear(4, 4, device=device)
        self.scale = nn.Module()
        self.scale.gain = nn.Parameter(torch.ones(4, device=device))

    def forward(self, x):
        return (self.inner(x) * self.scale.gain).sum()


class Elsewhere(nn.Parameter):
    """Says that it is on another kind of device."""

    device = torch.device("xpu:0")


def wrong_models():
    import stateroom

    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "units": {"min_numel": 0}}
    adam = {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    found = {}

    def attempt(name, *args, **kwargs):
        found[name] = error_of(lambda: stateroom.initialize(*args, config={**config, **adam}, **kwargs))

    attempt("meta without reset", NoReset("meta"))
    other = Net()
    other.layers[1].bias = Elsewhere(torch.zeros(4))
    attempt("other device", other)
    attempt("not a module", [1, 2])
    attempt("no model", None)
    attempt("foreign optimizer", Net(), optimizer=torch.optim.SGD(Net().parameters(), lr=0.1))
    attempt("foreign parameters", Net(), model_parameters=Net().parameters())
    twice = Net()
    attempt("parameter twice", twice, model_parameters=[{"params": twice.parameters()}, {"params": twice.layers[0].parameters()}])
    attempt("optimizer is a number", Net(), optimizer=3)
    attempt("factory returns a list", Net(), optimizer=lambda params: list(params))
    lbfgs = Net()
    attempt("lbfgs", lbfgs, optimizer=torch.optim.LBFGS(lbfgs.parameters()))
    lazy = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))
    attempt("lazy", lazy)
    complex_model = Net()
    complex_model.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    attempt("complex", complex_model)
    owned = Net()
    engine = engine_for(owned, 2, sgd())
    attempt("another engine's", owned)
    engine.destroy()
    attempt("empty data", Net(), training_data=[])
    again, *_ = stateroom.initialize(owned, config={**config, **adam})  # freed by destroy()
    again.destroy()
    bad = error_of(lambda: again(torch.ones(2, 4)))
    found["destroyed"] = bad
    return found


def test_wrong_models_and_optimizers_are_refused_at_initialize(pools):
    wanted = {
        "meta without reset": ("EngineError", ["'scale'", "reset_parameters", "zero.Init"]),
        "other device": ("EngineError", ["'layers.1.bias'", "xpu:0", "cpu"]),
        "not a module": ("EngineError", ["nn.Module", "list"]),
        "no model": ("EngineError", ["nn.Module", "NoneType"]),
        "foreign optimizer": ("ConfigError", ["group 0", "(4, 4)", "not the model's"]),
        "foreign parameters": ("ConfigError", ["group 0", "(4, 4)", "not a parameter of the model"]),
        "parameter twice": ("ConfigError", ["'layers.0.weight'", "twice"]),
        "optimizer is a number": ("ConfigError", ["optimizer=", "int"]),
        "factory returns a list": ("ConfigError", ["list", "torch.optim.Optimizer"]),
        "lbfgs": ("ConfigError", ["LBFGS", "closure"]),
        "lazy": ("LayoutError", ["'0.weight'", "lazy"]),
        "complex": ("LayoutError", ["'phase'", "complex64"]),
        "another engine's": ("EngineError", ["'layers.0.weight'", "destroy()"]),
        "empty data": ("ConfigError", ["training_data", "empty"]),
        "destroyed": ("EngineError", ["destroyed"]),
    }
    for found in pools(2).run(wrong_models):
        assert found.keys() == wanted.keys()
        for name, (kind, words) in wanted.items():
            assert found[name][0] == kind, (name, found[name])
            for word in words:
                assert word in found[name][1], (name, found[name])


# ---- calls in the wrong order or with the wrong thing


def wrong_calls(stage):
    engine = engine_for(Net(), stage, adamw())
    x = torch.ones(2, 4)
    before = weights_of(engine)
    found = {
        "step first": error_of(engine.step),
        "vector": error_of(lambda: engine.backward(torch.stack([engine(x), engine(x)]))),
        "no graph": error_of(lambda: engine.backward(torch.ones(()))),
        "no_grad": error_of(lambda: engine.backward(evaluated(engine, x))),
        "float": error_of(lambda: engine.backward(1.0)),
        "tuple": error_of(lambda: engine.backward((engine(x),))),
        "closure": error_of(lambda: engine.optimizer.step(lambda: None)),
        "empty group": error_of(lambda: engine.optimizer.add_param_group({"params": []})),
    }
    assert_equal(weights_of(engine), before)
    engine.backward(engine(x))
    engine.step()  # none of this left the engine broken
    found["step twice"] = error_of(engine.step)
    found["graph used up"] = error_of(lambda: backward_twice(engine, x))
    engine.backward(engine(x))
    engine.step()
    assert engine.global_steps == 2
    engine.destroy()
    return found


def evaluated(engine, x):
    with torch.no_grad():
        return engine(x)


def backward_twice(engine, x):
    loss = engine(x)
    engine.backward(loss)
    engine.backward(loss)


def without_optimizer():
    import stateroom

    engine, optimizer, *_ = stateroom.initialize(Net(), config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}})
    assert optimizer is None
    loss = engine(torch.ones(2, 4))
    found = error_of(lambda: engine.backward(loss)), error_of(engine.step)
    with torch.no_grad():
        assert torch.isfinite(engine(torch.ones(2, 4)))
    engine.destroy()
    return found


def test_wrong_calls_say_what_to_call(pools):
    wanted = {
        "step first": ("EngineError", ["step() before backward()"]),
        "vector": ("EngineError", ["scalar", "(2,)", "mean()"]),
        "no graph": ("EngineError", ["no graph"]),
        "no_grad": ("EngineError", ["no graph", "no_grad"]),
        "float": ("EngineError", ["float", "loss"]),
        "tuple": ("EngineError", ["tuple", "loss"]),
        "closure": ("EngineError", ["closure"]),
        "empty group": ("EngineError", ["no parameters"]),
        "step twice": ("EngineError", ["step() before backward()"]),
        "graph used up": ("RuntimeError", ["retain_graph"]),
    }
    for stage in STAGES:
        for found in pools(2).run(wrong_calls, stage):
            assert found.keys() == wanted.keys()
            for name, (kind, words) in wanted.items():
                assert found[name][0] == kind, (stage, name, found[name])
                for word in words:
                    assert word in found[name][1], (stage, name, found[name])
    for found in pools(2).run(without_optimizer):
        assert all(kind == "EngineError" and "no optimizer" in message for kind, message in found)


# ---- NaN loss, and a process group that is gone


def nan_loss(stage, precision):
    keys = {} if precision == "fp32" else {precision: {"enabled": True}}
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    engine = engine_for(Net(), stage, adamw(), gradient_accumulation_steps=2, **keys)
    x = torch.ones(2, 4, dtype=dtype)
    for _ in range(2):
        engine.backward(engine(x))
        engine.step()
    good = weights_of(engine)
    engine.backward(engine(x) * (float("nan") if engine.global_rank == 1 else 1.0))
    engine.step()
    engine.backward(engine(x))
    error = error_of(engine.step)
    assert_equal(weights_of(engine), good, (stage, precision))
    engine.destroy()
    return error


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_nan_loss_on_one_rank_is_the_same_error_on_all(pools, precision):
    """In the first of two micro-batches, on rank 1 only: named by rank and step, before a weight has changed."""
    for stage in STAGES:
        errors = pools(2).run(nan_loss, stage, precision)
        assert errors[0] == errors[1]
        kind, message = errors[0]
        assert kind == "EngineError" and "NaN on rank(s) [1] at step 2" in message


def group_gone(stage, rendezvous):
    import torch.distributed as dist

    engine = engine_for(Net(), stage, adamw())
    x = torch.ones(2, 4)
    engine.backward(engine(x))
    engine.step()
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    found = []

    def step():
        engine.backward(engine(x))
        engine.step()

    try:
        found = [error_of(step), error_of(step), error_of(lambda: weights_of(engine)) if stage else None]
    finally:
        store = dist.FileStore(rendezvous, world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    return found


def test_a_destroyed_process_group_is_one_clear_error(pools, tmp_path):
    """Also where the backend's group object would work on; the new group's file stays, since the ranks go on using it."""
    for stage in STAGES:
        for found in pools(2).run(group_gone, stage, str(tmp_path / f"rendezvous{stage}")):
            for error in found:
                if error is not None:
                    kind, message = error
                    assert kind in ("RankError", "EngineError"), (stage, kind, message)
                    assert "process group was destroyed" in message and "\n" not in message, (stage, message)


# ---- whole jobs

JOB = """
import sys
import torch
import stateroom
from torch import nn

case = sys.argv[1]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3},
    "units": {"min_numel": 0},
}
if case == "config":
    config["zero_optimization"]["stagee"] = 1
engine, *_ = stateroom.initialize(model, config=config)
for step in range(4):
    loss = engine(torch.ones(2, 4)).pow(2).mean()
    if case == "one rank" and step == 2 and engine.global_rank == 1:
        raise ValueError("rank 1 cannot read its batch")
    if case == "nan" and step == 2:
        loss = loss * float("nan")
    engine.backward(loss)
    engine.step()
print("done")
"""


def job(folder, case):
    """Run JOB on two ranks that nobody watches over; return (exit statuses, last error lines of each rank that raised).

    An agent would end the second rank as soon as the first has failed, often before it can say anything.
    """
    script = folder / "job.py"
    script.write_text(JOB)
    env = {**os.environ, "TORCH_DISTRIBUTED_DEBUG": "OFF", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), case],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    last = {}
    for rank, process in enumerate(ranks):
        text = process.communicate(timeout=90)[1]
        lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in text.splitlines() if line.strip()]
        heads = [i for i, line in enumerate(lines) if line.startswith("stateroom.") or line.startswith("ValueError")]
        last[rank] = lines[heads[-1] :] if heads else []
    return [process.returncode for process in ranks], last


def test_jobs_end_with_one_message_and_a_status(tmp_path):
    """Every rank that has the error ends with it as the last thing of its traceback, and with a status; nobody hangs."""
    statuses, last = job(tmp_path, "config")
    assert statuses == [1, 1]
    for rank in (0, 1):
        text = " ".join(last[rank])
        assert last[rank][0].startswith("stateroom.errors.ConfigError")
        assert "zero_optimization.stagee" in text and "nearest known key" in text

    statuses, last = job(tmp_path, "one rank")
    assert statuses == [1, 1]
    assert last[1][0] == "ValueError: rank 1 cannot read its batch"
    assert last[0][0].startswith("stateroom.errors.RankError") and "A peer ended" in last[0][0]

    statuses, last = job(tmp_path, "nan")
    assert statuses == [1, 1]
    for rank in (0, 1):
        assert len(last[rank]) == 1
        assert last[rank][0].startswith("stateroom.errors.EngineError: the loss is NaN on rank(s) [0, 1] at step 3")
