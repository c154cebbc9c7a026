"""engine.offload_states() and reload_states(): the memory goes, the bits come back, and nothing is used meanwhile."""

from __future__ import annotations

import pytest
import torch
from models import batch
from offload_jobs import go_on, offload, same, start, states_of, train
from oracle import error_of
from training import master_weights

KINDS = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")


def held(engine):
    """Return bytes of the storages behind all states."""
    tensors = [v for s in engine.optimizer.state.values() for v in s.values() if v.dim()]
    for unit in engine.sharded.units:
        tensors += [unit.full, unit.shard, unit.master, *unit.gradients.tensors()]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def phases(zero, precision, include, between):
    """Train, offload, reload and train on; return the results and the bytes held before, away and after."""
    engine = start("gpt", zero, "adamw", precision)
    losses, norms = go_on(engine, "gpt", 2, precision)
    if between:  # between backward and step: gradients are states then
        loss = engine(*batch("gpt", 2, 0, engine.global_rank))
        engine.backward(loss)
    before = held(engine)
    engine.offload_states(include=include)
    away = held(engine)
    engine.offload_states(include=include)  # a second time changes nothing
    engine.reload_states()
    after = held(engine)
    if between:
        engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    else:
        more = go_on(engine, "gpt", 1, precision, first=2)
        losses, norms = losses + more[0], norms + more[1]
    result = (losses, norms, master_weights(engine), states_of(engine))
    engine.destroy()
    return result, (before, away, after)


@pytest.mark.parametrize("between", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.full), 3])
def test_everything_goes_and_comes_back(pools, stage, precision, between):
    wanted = pools(2).run(train, "gpt", {"stage": stage}, "adamw", precision)
    for (result, (before, away, after)), plain in zip(
        pools(2).run(phases, {"stage": stage}, precision, None, between), wanted, strict=True
    ):
        same(result, plain, (stage, precision, between))
        assert before == after > 0
        assert away == 0


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_alone(pools, kind):
    wanted = pools(2).run(train, "gpt", {"stage": 3}, "adamw", "bf16")
    for (result, (before, away, after)), plain in zip(pools(2).run(phases, {"stage": 3}, "bf16", [kind], True), wanted, strict=True):
        same(result, plain, kind)
        assert 0 < away < before == after


def test_what_rests_elsewhere_stays_there(pools, tmp_path):
    zero = offload(3, "nvme", "nvme", str(tmp_path))
    wanted = pools(2).run(train, "gpt", {"stage": 3})
    for (result, _), plain in zip(pools(2).run(phases, zero, "fp32", None, False), wanted, strict=True):
        same(result, plain)


def uses(include):
    """Return the errors of everything that a script may try while states are away."""
    from stateroom.runtime.zero.offload_config import OffloadStateTypeEnum
    from stateroom.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    engine = start("gpt", {"stage": 1}, "adamw", "bf16")
    go_on(engine, "gpt", 1, "bf16")
    weight = engine.module.blocks[0].up.weight
    inputs = batch("gpt", 1, 0, engine.global_rank)
    engine.offload_states(include=[OffloadStateTypeEnum[name] for name in include])
    tried = {
        "forward": error_of(lambda: engine(*inputs))[1],
        "train": error_of(lambda: go_on(engine, "gpt", 1, "bf16", first=1))[1],
        "read": error_of(lambda: weight.sum())[1],
        "master": error_of(lambda: safe_get_full_fp32_param(weight))[1],
        "state": error_of(lambda: safe_get_full_optimizer_state(weight, "exp_avg"))[1],
        "save": error_of(lambda: engine.save_checkpoint("/nowhere"))[1],
        "unknown": error_of(lambda: engine.offload_states(include=["everything"]))[1],
        "device": error_of(lambda: engine.offload_states(device="nvme"))[1],
    }
    engine.reload_states()
    engine.reload_states()
    go_on(engine, "gpt", 1, "bf16", first=1)
    assert torch.isfinite(weight).all()
    engine.destroy()
    return tried


def test_what_is_away_is_not_used(pools):
    for tried in pools(2).run(uses, ["lp_params", "optim_states"]):
        assert "everything" in tried.pop("unknown") and "nvme" in tried.pop("device")
        for what, message in tried.items():
            assert "engine.reload_states()" in message and "lp_params" in message, (what, message)


def test_without_optimizer_states_the_model_still_answers(pools):
    for tried in pools(2).run(uses, ["optim_states", "hp_params"]):
        assert tried["forward"] == "" and tried["read"] == ""
        for what in ("train", "master", "state", "save"):
            assert "engine.reload_states()" in tried[what], what
