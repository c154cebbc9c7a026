"""What scripts do between steps gives the same bits wherever the states rest: reads, writes, unfrozen and unused parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from models import DIM, batch, build
from offload_jobs import OPTIMIZERS, go_on, offload, start, states_of
from torch import nn
from training import config_for, master_weights

PLACES = [
    (1, "nvme", "none"),
    (3, "nvme", "nvme"),
    *(pytest.param(place, marks=pytest.mark.full) for place in [(2, "nvme", "none"), (3, "cpu", "cpu"), (3, "none", "nvme")]),
]


def results(engine):
    found = {**master_weights(engine), **states_of(engine)}
    engine.destroy()
    return found


def manipulations(zero, precision):
    """Read and write every kind of state through the public functions, between steps and between backward and step."""
    import stateroom
    from stateroom import utils

    engine = start("gpt", zero, "adamw", precision)
    go_on(engine, "gpt", 1, precision)
    one, two = engine.module.blocks[0].up.weight, engine.module.blocks[1].down.bias
    utils.safe_set_full_fp32_param(one, utils.safe_get_full_fp32_param(one) * 2)
    utils.safe_set_full_optimizer_state(two, torch.ones(two.shape), "exp_avg")
    loss = engine(*batch("gpt", 7, 0, engine.global_rank))
    engine.backward(loss)
    gradient = utils.safe_get_full_grad(one)
    utils.safe_set_full_grad(one, gradient * 3)
    utils.safe_set_local_grad(two, torch.full_like(utils.safe_get_local_grad(two), 0.25))
    engine.step()
    norm = engine.get_global_grad_norm()
    with stateroom.zero.GatheredParameters([two], modifier_rank=0):
        if engine.global_rank == 0:
            two.data.fill_(0.5)
    go_on(engine, "gpt", 1, precision, first=9)
    with torch.no_grad():
        evaluated = engine(*batch("gpt", 8, 0, engine.global_rank)).item()
    whole = engine.module_state_dict()
    saved = copy.deepcopy(engine.optimizer.state_dict())  # without offload it holds the live tensors
    go_on(engine, "gpt", 1, precision, first=10)
    engine.optimizer.load_state_dict(saved)
    moments = [state["exp_avg"] for run in saved["runs"] for state in [run["state"]] if state]
    assert moments and all(torch.isfinite(moment).all() for moment in moments)
    go_on(engine, "gpt", 1, precision, first=11)
    engine.load_module_state_dict(whole)
    go_on(engine, "gpt", 1, precision, first=12)
    return {**results(engine), "gradient": gradient, "norm": torch.tensor(norm), "evaluated": torch.tensor(evaluated)}


def equal(found, wanted):
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert torch.equal(mine[name], value), f"{name} is off by {(mine[name] - value).abs().max().item()}"


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.full), "bf16"])
@pytest.mark.parametrize("place", PLACES)
def test_reads_and_writes_reach_what_rests_elsewhere(pools, tmp_path, place, precision):
    stage, optimizer, params = place
    wanted = pools(2).run(manipulations, {"stage": stage}, precision)
    equal(pools(2).run(manipulations, offload(stage, optimizer, params, str(tmp_path)), precision), wanted)


class Branches(nn.Module):
    """A model whose middle branch is only sometimes used."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(DIM, 64), nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, x, y, use):
        x = torch.tanh(self.a(x))
        x = torch.tanh(self.b(x)) if use else x
        return torch.nn.functional.mse_loss(self.c(x), y)


def unused(zero, grow):
    """Leave a branch out in some steps, so that runs are cut; with `grow` it is frozen at first."""
    import stateroom

    torch.manual_seed(1)
    model = Branches()
    if grow:
        model.b.requires_grad_(False)
    config = config_for(0, "fp32", 1, optimizer=OPTIMIZERS["adamw"], zero_optimization=zero)
    engine, *_ = stateroom.initialize(model, config=config, model_parameters=model.parameters())
    for step, use in enumerate([True, False, False, True, True]):
        if step == 2:
            model.b.requires_grad_(True)
        engine.backward(engine(*batch("mlp", step, 0, engine.global_rank), use))
        engine.step()
    return results(engine)


@pytest.mark.parametrize("grow", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize("place", PLACES)
def test_unused_and_unfrozen_parameters(pools, tmp_path, place, grow):
    stage, optimizer, params = place
    wanted = pools(2).run(unused, {"stage": stage}, grow)
    equal(pools(2).run(unused, offload(stage, optimizer, params, str(tmp_path)), grow), wanted)


def added(zero):
    """Put a parameter into the model and train it from then on."""
    import stateroom

    engine = start("mlp", zero)
    go_on(engine, "mlp", 2)
    model = engine.module
    torch.manual_seed(9)
    model.net.append(nn.Linear(4, 4))
    for param in model.net[-1].parameters():
        engine.comm.broadcast(param.data)
    engine.optimizer.add_param_group({"params": list(model.net[-1].parameters()), "lr": 1e-3})
    go_on(engine, "mlp", 2, first=2)
    assert stateroom.utils.safe_get_full_optimizer_state(model.net[-1].weight, "exp_avg").abs().sum() > 0
    return results(engine)


@pytest.mark.parametrize("place", PLACES)
def test_parameters_that_come_later(pools, tmp_path, place):
    stage, optimizer, params = place
    equal(pools(2).run(added, offload(stage, optimizer, params, str(tmp_path))), pools(2).run(added, {"stage": stage}))


def own_optimizer(zero, steps_before):
    """Pass an optimizer that has stepped already, with two groups."""
    import stateroom

    model = build("gpt")
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 1e-2}], lr=1e-3, foreach=False)
    for step in range(steps_before):
        model(*batch("gpt", 100 + step, 0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    config = config_for(0, "fp32", 1, zero_optimization=zero)
    config.pop("optimizer")
    engine, *_ = stateroom.initialize(model, config=config, optimizer=optimizer)
    calls = []
    engine.optimizer.register_step_pre_hook(lambda inner, *_: calls.append("before"))
    engine.optimizer.register_step_post_hook(lambda inner, *_: calls.append("after"))
    go_on(engine, "gpt", 3)
    assert calls == ["before", "after"] * 3  # one update, however many sub-groups
    return results(engine)


@pytest.mark.parametrize("place", PLACES)
def test_an_optimizer_that_has_states_already(pools, tmp_path, place):
    stage, optimizer, params = place
    wanted = pools(2).run(own_optimizer, {"stage": stage}, 2)
    equal(pools(2).run(own_optimizer, offload(stage, optimizer, params, str(tmp_path)), 2), wanted)


def overflow(zero):
    """Let fp16 gradients overflow once: the step is skipped and the parameter named."""
    engine = start("gpt", zero, "adamw", "fp16", fp16={"enabled": True, "initial_scale_power": 40, "hysteresis": 1})
    before = master_weights(engine)
    go_on(engine, "gpt", 1, "fp16")
    after = master_weights(engine)
    named = engine.optimizer.bad_parameter
    skipped = engine.skipped_steps
    engine.destroy()
    return named, skipped, all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("place", [(3, "nvme", "nvme"), (2, "nvme", "none")])
def test_overflow_is_found_and_named(pools, tmp_path, place):
    stage, optimizer, params = place
    wanted = pools(2).run(overflow, {"stage": stage})
    assert wanted[0][1:] == (1, True)
    assert pools(2).run(overflow, offload(stage, optimizer, params, str(tmp_path))) == wanted


def where_everything_is(folder):
    """Return bytes in memory of states between steps, and what a script sees in the optimizer's own tensors."""
    engine = start("gpt", offload(3, "nvme", "nvme", folder))
    go_on(engine, "gpt", 2)
    units = engine.sharded.units
    states = [v for state in engine.optimizer.state.values() for v in state.values() if v.dim()]
    tensors = [*states, *(unit.shard for unit in units), *(unit.master for unit in units), *(unit.full for unit in units)]
    held = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
    gradients = sum(t.nbytes for unit in units for t in unit.gradients.tensors())
    seen = all(torch.isnan(value).all() for value in states)
    engine.destroy()
    return held, gradients, seen, len(states)


def test_between_steps_nothing_of_it_is_in_memory(pools, tmp_path):
    for held, gradients, seen, count in pools(2).run(where_everything_is, str(tmp_path)):
        assert held <= 8  # the one element that stands for all of them
        assert gradients == 0
        assert seen and count >= 8
