"""What rank processes run for the tests of tiers: the same few steps, wherever the states rest."""

from __future__ import annotations

import logging

import torch
from models import batch, build
from training import cast, config_for, master_weights

OPTIMIZERS = {
    "adam": {"type": "Adam", "params": {"lr": 2e-3, "adam_w_mode": False, "weight_decay": 0.01}},
    "adamw": {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.1}},
    "momentum": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
    "lamb": {"type": "Lamb", "params": {"lr": 2e-3}},
    "muon": {"type": "Muon", "params": {"lr": 2e-3}},
}


def offload(stage, optimizer="none", params="none", folder=None, tile=4096, **more):
    """Return the zero_optimization section; `more` goes into offload_optimizer."""
    section = {"stage": stage, "sub_group_size": tile}
    if optimizer != "none":
        section["offload_optimizer"] = {"device": optimizer, "nvme_path": folder, **more}
    if params != "none":
        section["offload_param"] = {"device": params, "nvme_path": folder, "max_in_cpu": 0}
    return section


def start(model_name, zero, optimizer="adamw", precision="fp32", gas=1, extra_optimizer=None, **extra):
    import stateroom

    config = config_for(0, precision, gas, optimizer=extra_optimizer or OPTIMIZERS[optimizer], zero_optimization=zero, **extra)
    engine, *_ = stateroom.initialize(build(model_name), config=config)
    return engine


def go_on(engine, model_name, steps, precision="fp32", first=0):
    """Train and return (losses, norms)."""
    losses, norms = [], []
    for step in range(first, first + steps):
        for micro in range(engine.gradient_accumulation_steps()):
            loss = engine(*cast(batch(model_name, step, micro, engine.global_rank), precision))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def states_of(engine):
    """Return the whole optimizer states by parameter and name."""
    from stateroom.utils import safe_get_full_optimizer_state

    return {
        f"{name}.{key}": value
        for name, param in engine.module.named_parameters()
        for key in ("exp_avg", "exp_avg_sq", "momentum_buffer")
        if param.requires_grad and (value := safe_get_full_optimizer_state(param, key)) is not None
    }


def train(model_name, zero, optimizer="adamw", precision="fp32", gas=1, steps=3, **extra):
    """Return (losses, norms, whole weights, whole optimizer states by name) of this rank."""
    engine = start(model_name, zero, optimizer, precision, gas, **extra)
    losses, norms = go_on(engine, model_name, steps, precision)
    states, weights = states_of(engine), master_weights(engine)
    engine.destroy()
    return losses, norms, weights, states


def train_and_save(folder, model_name, zero, optimizer="adamw", precision="fp32", steps=2, **extra):
    """Train, save, train one step more while the save may be in flight, and end."""
    engine = start(model_name, zero, optimizer, precision, **extra)
    go_on(engine, model_name, steps, precision)
    engine.save_checkpoint(folder)
    go_on(engine, model_name, 1, precision, first=50)
    engine.destroy()


def load_and_train(folder, model_name, zero, optimizer="adamw", precision="fp32", first=2, steps=2, **extra):
    """Load, train on, and return what `train` returns for the steps after the load."""
    engine = start(model_name, zero, optimizer, precision, **extra)
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    losses, norms = go_on(engine, model_name, steps, precision, first=first)
    states, weights = states_of(engine), master_weights(engine)
    engine.destroy()
    return losses, norms, weights, states


def with_lines(function, *args, **kwargs):
    """Run a job and return (its result, the lines that the engine logged on this rank)."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("stateroom")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        return function(*args, **kwargs), lines
    finally:
        logger.removeHandler(handler)


def same(found, wanted, what=""):
    """Compare two results of `train` bit for bit."""
    assert found[0] == wanted[0], (what, found[0], wanted[0])
    assert found[1] == wanted[1], (what, found[1], wanted[1])
    for mine, theirs in ((found[2], wanted[2]), (found[3], wanted[3])):
        assert mine.keys() == theirs.keys(), what
        for name, value in theirs.items():
            assert torch.equal(mine[name], value), f"{what}: {name} is off by {(mine[name] - value).abs().max().item()}"
