"""What DeepSpeed wrote is loaded by the engine under any layout: weights, moments, step counts, groups, schedule, counters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from engine_jobs import listen, states_of
from oracle import error_of
from stateroom.checkpoint.opener import open_source
from torch import nn

FIXTURES = Path(__file__).parent / "fixtures"


class Net(nn.Module):
    """The model of the fixtures."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(10, 6)
        self.l1 = nn.Linear(6, 7)
        self.ln = nn.LayerNorm(7)
        self.l2 = nn.Linear(7, 6, bias=False)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.emb.weight
        self.frozen = nn.Linear(6, 6, bias=False).requires_grad_(False)
        self.register_buffer("buf", torch.full((3,), -1.0))

    def forward(self, ids):
        x = self.emb(ids)
        return F.cross_entropy(self.head(self.l2(self.ln(self.l1(x))) + self.frozen(x)).float().flatten(0, 1), ids.flatten())


def engine_for_fixture(stage, precision, optimizer="AdamW"):
    import stateroom

    torch.manual_seed(77)
    model = Net()
    groups = [
        {"params": [p for p in model.parameters() if p.requires_grad and p.dim() > 1], "weight_decay": 0.5},
        {"params": [p for p in model.parameters() if p.requires_grad and p.dim() == 1], "weight_decay": 0.5},
    ]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": optimizer, "params": {"lr": 0.5}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 10}},
        "zero_optimization": {"stage": stage},
        "units": {"min_numel": 0},
    }
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    return stateroom.initialize(model, config=config, model_parameters=groups)[0]


def load(folder, stage, precision):
    engine = engine_for_fixture(stage, precision)
    lines = listen(engine)
    path, client = engine.load_checkpoint(folder)
    states, lr = states_of(engine), engine.get_lr()
    steps = [state["step"] for state in engine.optimizer.inner.state.values()]
    assert len({step.data_ptr() for step in steps}) == len(steps), "each run must count its own steps"
    loss = engine(torch.arange(8).view(2, 4) % 10)
    engine.backward(loss)
    engine.step()
    after = states_of(engine)
    engine.destroy()
    return states, lr, path, client, lines, loss.item(), after


@pytest.mark.parametrize("name", ["z1fp32", "z2bf16", "z3bf16", "z3sub", "u_z2bf16", "u_z3bf16"])
@pytest.mark.parametrize(("ranks", "stage", "precision"), [(2, 3, "bf16"), (1, 0, "fp32"), (2, 1, "fp32")])
def test_a_checkpoint_of_deepspeeds_loads(pools, name, ranks, stage, precision):
    folder = FIXTURES / name
    source = open_source(folder)
    for states, lr, _, client, lines, loss, after in pools(ranks).run(load, str(folder), stage, precision):
        for parameter in source.parameters:
            expected = source.tensor(parameter, source.best_weight(parameter)).float()
            if parameter.startswith("frozen") and precision == "bf16":
                expected = expected.bfloat16().float()
            assert torch.equal(states[parameter], expected), parameter
        for parameter in ("emb.weight", "l1.bias", "ln.weight", "l2.weight"):
            for state in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(states[f"{parameter}::{state}"], source.tensor(parameter, state)), (parameter, state)
            assert states[f"{parameter}::step"] == 2 and after[f"{parameter}::step"] == 3
        assert torch.equal(states["buffer buf"], torch.tensor([0.0, 1.0, 2.0]))
        assert [states[f"group {index}"]["weight_decay"] for index in range(2)] == [0.1, 0.0]
        assert client["my_epoch"] == 3
        assert states["counters"][0] == 2 and loss == loss
        assert 0 < lr[0] < 1e-3 and lr[0] == lr[1]
        assert not [line for line in lines if "anew" in line]


def test_the_same_step_follows_whatever_wrote_the_checkpoint(pools):
    """From DeepSpeed's files and from its universal ones, under three layouts: equal up to rounding."""
    found = [
        pools(ranks).run(load, str(FIXTURES / name), stage, "fp32")[0][-1]
        for name, ranks, stage in (("z2bf16", 1, 0), ("z2bf16", 2, 3), ("u_z2bf16", 2, 2))
    ]
    for other in found[1:]:
        for key, value in found[0].items():
            if isinstance(value, torch.Tensor):
                assert torch.allclose(value.float(), other[key].float(), rtol=1e-5, atol=1e-7), key


def wrong_optimizer(folder):
    engine = engine_for_fixture(2, "fp32", "Lion")
    error = error_of(lambda: engine.load_checkpoint(folder))
    engine.destroy()
    return error


@pytest.mark.parametrize("name", ["z2bf16", "u_z3bf16"])
def test_states_of_another_optimizer_are_refused(pools, name):
    for kind, text in pools(1).run(wrong_optimizer, str(FIXTURES / name)):
        assert kind == "CheckpointError" and "with exp_avg, exp_avg_sq" in text and "Lion" in text


def resave(folder, again):
    engine = engine_for_fixture(3, "fp32")
    engine.load_checkpoint(folder)
    engine.save_checkpoint(again, tag="mine")
    engine.destroy()


def test_what_was_deepspeeds_is_saved_in_our_own_form(pools, tmp_path):
    from stateroom.checkpoint.verifying import verify

    pools(2).run(resave, str(FIXTURES / "z3bf16"), str(tmp_path))
    assert verify(tmp_path) == []
    theirs, ours = open_source(FIXTURES / "z3bf16"), open_source(tmp_path)
    assert list(ours.parameters) == [name for name in ours.parameters if name in theirs.names()]
    for name in ours.parameters:
        for state in ours.states(name):
            if state in theirs.states(theirs.names()[name]):
                assert torch.equal(ours.tensor(name, state), theirs.tensor(theirs.names()[name], state))
