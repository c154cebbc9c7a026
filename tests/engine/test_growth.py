"""Parameters that join the training later: unfrozen ones, modules added between steps, groups added to the optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
from models import DIM, batch, build
from oracle import assert_close, engine_for, error_of, weights_of
from torch import nn

STEPS = 6


def loss_of(model, step, rank):
    return model(*batch("gpt", step, 0, rank))


class WithHead(nn.Module):
    """A model that gets a further block on its way."""

    def __init__(self):
        super().__init__()
        self.body = build("gpt")
        self.late = None

    def forward(self, ids, targets):
        loss = self.body(ids, targets)
        if self.late is not None:
            loss = loss + self.late(self.body.emb(ids)).square().mean()
        return loss


def late_block():
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 3))


def freeze(model, frozen):
    for part in frozen:
        for p in model.get_submodule(part).parameters():
            p.requires_grad_(False)


def act(model, optimizer, step, way):
    """What the script does before a step; the same lines for plain PyTorch and for the engine."""
    body = getattr(model, "body", model)
    if way == "thaw" and step in (2, 4):
        for p in body.blocks[0 if step == 2 else 1].parameters():
            p.requires_grad_(True)
    if way == "group" and step == 2:
        for p in body.blocks[0].parameters():
            p.requires_grad_(True)
        optimizer.add_param_group({"params": list(body.blocks[0].parameters()), "lr": 3e-3})
    if way == "module" and step == 3:
        model.late = late_block()
        optimizer.add_param_group({"params": model.late.parameters(), "lr": 5e-3, "weight_decay": 0.0})


def start(way):
    model = WithHead() if way == "module" else build("gpt")
    freeze(getattr(model, "body", model), ("blocks.0", "blocks.1"))
    return model


def params_for(model, way):
    return list(model.parameters()) if way == "thaw" else [p for p in model.parameters() if p.requires_grad]


OPTIMIZERS = {"AdamW": torch.optim.AdamW, "Adafactor": torch.optim.Adafactor}


def plain_run(way, name):
    model = start(way)
    optimizer = OPTIMIZERS[name](params_for(model, way), lr=1e-2)
    for step in range(STEPS):
        act(model, optimizer, step, way)
        for rank in range(2):
            (loss_of(model, step, rank) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {key: p.detach().clone() for key, p in model.named_parameters()}


def engine_run(way, name, stage):
    model = start(way)
    engine = engine_for(model, stage, lambda ps: OPTIMIZERS[name](ps, lr=1e-2), model_parameters=params_for(model, way))
    for step in range(STEPS):
        act(engine.module, engine.optimizer, step, way)
        engine.backward(loss_of(engine, step, engine.global_rank))
        engine.step()
    weights = weights_of(engine)
    state = copy.deepcopy(engine.module_state_dict())
    groups = len(engine.optimizer.param_groups)
    ledger = engine.ledger(show=False)
    equal = {s.state: (s.predicted_bytes, s.measured_bytes) for s in ledger.states}
    engine.destroy()
    return weights, state, groups, equal


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("way", ["thaw", "group", "module"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_joins_later_trains_like_plain(pools, way, name, stage):
    wanted = plain_run(way, name)
    for weights, state, groups, account in pools(2).run(engine_run, way, name, stage):
        assert_close(weights, wanted, atol=1e-5, what=(way, stage))
        assert_close({key: state[key] for key in wanted if key in state}, wanted, atol=1e-5)
        assert groups == (1 if way == "thaw" else 2)
        known = {state: pair for state, pair in account.items() if pair[0] is not None}  # Adafactor's states are not predicted
        assert len(known) >= 3 and all(predicted == measured for predicted, measured in known.values()), account


def refusals():
    model = build("gpt")
    freeze(model, ("blocks.0",))
    engine = engine_for(model, 3, lambda ps: torch.optim.AdamW(ps, lr=1e-2))
    found = [
        error_of(lambda: engine.optimizer.add_param_group({"params": [model.norm.weight]})),
        error_of(lambda: engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})),
    ]
    model.blocks[0].up.bias.requires_grad_(True)
    engine.backward(loss_of(engine, 0, engine.global_rank))
    found.append(error_of(engine.step))
    engine.destroy()
    return found


def test_what_cannot_join_is_named(pools):
    for twice, foreign, ungrouped in pools(2).run(refusals):
        assert "'norm.weight' is in optimizer group 0 already" in twice[1]
        assert "not the model's" in foreign[1]
        assert "'blocks.0.up.bias'" in ungrouped[1] and "add_param_group" in ungrouped[1]
