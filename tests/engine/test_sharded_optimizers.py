"""Any torch optimizer, sharded or not, updates as it would on the whole model: elementwise ones on slices, others on whole parameters."""

from __future__ import annotations

import os
import pathlib
import shutil

import pytest
import torch
from models import batch, build
from training import config_for, master_weights, train_plain

STEPS = 5
ELEMENTWISE = {
    "Adam": lambda ps: torch.optim.Adam(ps, lr=1e-3, weight_decay=0.01),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-3),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, nesterov=True),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2),
    "Adadelta": lambda ps: torch.optim.Adadelta(ps, lr=0.5),
    "Adamax": lambda ps: torch.optim.Adamax(ps, lr=1e-3),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=1e-3),
    "RAdam": lambda ps: torch.optim.RAdam(ps, lr=1e-3),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3, momentum=0.5, centered=True),
    "Rprop": lambda ps: torch.optim.Rprop(ps, lr=1e-3),
    "ASGD": lambda ps: torch.optim.ASGD(ps, lr=1e-2),
}


class RowNormSGD(torch.optim.Optimizer):
    """A user's own optimizer: it divides each row of the gradient by that row's norm, so it needs whole rows."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["seen_rows"] = state.get("seen_rows", torch.zeros(p.shape[:1])) + 1
                    grad = p.grad.reshape(p.shape[0], -1)
                    p.sub_((grad / (grad.norm(dim=1, keepdim=True) + 1e-8)).view(p.shape), alpha=group["lr"])


class BlockwiseMomentum(torch.optim.Optimizer):
    """Momentum kept in 8 bits as bitsandbytes keeps it: codes like the parameter, a scale for each block of 32, a shared table."""

    BLOCK = 32

    def __init__(self, params, lr, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.table = torch.linspace(-1, 1, 255)

    def _decoded(self, state, numel):
        blocks = self.table[state["state1"].flatten().long()].split(self.BLOCK)
        return torch.cat([codes * scale for codes, scale in zip(blocks, state["absmax1"], strict=True)])[:numel]

    def _encode(self, state, flat, shape):
        scales = torch.stack([part.abs().max() + 1e-12 for part in flat.split(self.BLOCK)])
        scaled = torch.cat([part / scale for part, scale in zip(flat.split(self.BLOCK), scales, strict=True)])
        state["absmax1"], state["state1"] = scales, ((scaled + 1) * 127).round().to(torch.uint8).view(shape)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["qmap1"], state["step"] = self.table, 0
                    self._encode(state, torch.zeros(p.numel()), p.shape)
                state["step"] += 1
                flat = self._decoded(state, p.numel()) * group["momentum"] + p.grad.flatten()
                self._encode(state, flat, p.shape)
                p.sub_(flat.view(p.shape), alpha=group["lr"])


WHOLE = {
    "RowNormSGD": lambda ps: RowNormSGD(ps, lr=1e-3),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
    "BlockwiseMomentum": lambda ps: BlockwiseMomentum(ps, lr=1e-2),
}
ALL = {**ELEMENTWISE, **WHOLE}


def train(engine, steps, model="gpt", first=0):
    losses = []
    for step in range(first, first + steps):
        loss = engine(*batch(model, step, 0, engine.global_rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def with_optimizer(name, stages, as_instance):
    """Return final master weights for each stage; the optimizer is given as an instance or as a factory."""
    import stateroom

    found = []
    for stage in stages:
        model = build("gpt")
        optimizer = ALL[name](model.parameters()) if as_instance else ALL[name]
        config = config_for(stage, "fp32", 1)
        del config["optimizer"]
        engine, returned, *_ = stateroom.initialize(model, config=config, optimizer=optimizer)
        assert isinstance(returned, torch.optim.Optimizer)
        train(engine, STEPS)
        found.append(master_weights(engine))
        engine.destroy()
    return found


@pytest.mark.parametrize("name", ALL)
def test_equals_the_same_optimizer_on_the_whole_model(pools, name):
    _, plain, _ = train_plain("gpt", "fp32", 1, STEPS, 2, optimizer=ALL[name])
    for weights in pools(2).run(with_optimizer, name, (0, 1, 3), name in ("AdamW", "RowNormSGD"))[0]:
        for key, expected in plain.items():
            scale = expected.abs().max().item() + 1e-6
            assert (weights[key] - expected).abs().max().item() / scale < 3e-5, (name, key)


def step_hooks(stage):
    import stateroom

    seen = []
    engine, optimizer, *_ = stateroom.initialize(build("gpt"), config=config_for(stage, "fp32", 1))
    before = optimizer.register_step_pre_hook(lambda inner, args, kwargs: seen.append("before"))
    optimizer.register_step_post_hook(lambda inner, args, kwargs: seen.append("after"))
    train(engine, 2)
    before.remove()
    train(engine, 1, first=2)
    engine.destroy()
    return seen


@pytest.mark.parametrize("stage", [0, 3])
def test_hooks_on_the_optimizers_step_run(pools, stage):
    assert pools(2).run(step_hooks, stage) == [["before", "after", "before", "after", "after"]] * 2


def whole_state(stage):
    """States of other shapes than the parameter: read, saved and loaded."""
    import tempfile

    import stateroom
    from stateroom.utils import safe_get_full_optimizer_state

    config = config_for(stage, "fp32", 1)
    del config["optimizer"]
    runs = []
    folder = pathlib.Path(tempfile.gettempdir()) / f"blockwise-{stage}-{os.getppid()}"
    for resumed in (False, True):
        engine, *_ = stateroom.initialize(build("gpt"), config=config, optimizer=ALL["BlockwiseMomentum"])
        if resumed:
            engine.load_checkpoint(folder)
        else:
            train(engine, 2)
            engine.save_checkpoint(folder)
            weight = engine.module.blocks[0].up.weight
            codes = safe_get_full_optimizer_state(weight, "state1")
        train(engine, 2, first=2)
        runs.append(master_weights(engine))
        engine.destroy()
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(folder)
    return runs, codes.shape == weight.shape and codes.unique().numel() > 3


@pytest.mark.parametrize("stage", [0, 3])
def test_states_of_other_shapes_survive_a_save(pools, stage):
    for (straight, resumed), whole in pools(2).run(whole_state, stage):
        assert whole
        assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def from_config(section, stages):
    import stateroom

    found = []
    for stage in stages:
        engine, *_ = stateroom.initialize(build("gpt"), config=config_for(stage, "fp32", 1, optimizer=section))
        train(engine, STEPS)
        found.append(master_weights(engine))
        engine.destroy()
    return found


@pytest.mark.parametrize("kind", ["Muon", "Lamb", "Lion", "SGD", "Adagrad"])
def test_config_optimizers_agree_between_stages_and_rank_counts(pools, kind):
    section = {"type": kind, "params": {"lr": 1e-3}}
    one = pools(1).run(from_config, {**section}, (0,))[0][0]
    first, *others = pools(2).run(from_config, section, (0, 1, 2, 3))[0]
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
    assert set(one) == set(first)


def grouped(stage):
    """Two groups with their own options; names with norm or bias are spared from decay by the config in a second run."""
    import stateroom

    model = build("gpt")
    decay = [p for n, p in model.named_parameters() if p.dim() > 1]
    rest = [p for n, p in model.named_parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.5, "lr": 1e-3}, {"params": rest, "weight_decay": 0.0, "lr": 5e-3}]
    engine, optimizer, *_ = stateroom.initialize(model, config=config_for(stage, "fp32", 1), model_parameters=groups)
    options = [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
    train(engine, STEPS)
    by_hand = master_weights(engine)
    engine.destroy()
    section = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.5}, "no_decay": ["*norm*", "*bias"]}
    engine, optimizer, *_ = stateroom.initialize(build("gpt"), config=config_for(stage, "fp32", 1, optimizer=section))
    spared = [g["weight_decay"] for g in optimizer.param_groups]
    engine.destroy()
    return options, by_hand, spared


def test_groups_keep_their_own_options(pools):
    model = build("gpt")
    big = [i for i, p in enumerate(model.parameters()) if p.dim() > 1]

    def plain_groups(params):
        decay = [p for i, p in enumerate(params) if i in big]
        rest = [p for i, p in enumerate(params) if i not in big]
        return torch.optim.AdamW([{"params": decay, "weight_decay": 0.5, "lr": 1e-3}, {"params": rest, "weight_decay": 0.0, "lr": 5e-3}])

    _, plain, _ = train_plain("gpt", "fp32", 1, STEPS, 2, optimizer=plain_groups)
    for stage in (0, 2, 3):
        options, weights, spared = pools(2).run(grouped, stage)[0]
        assert options == [(1e-3, 0.5), (5e-3, 0.0)]
        assert spared == [0.5, 0.0]
        assert max((weights[n] - plain[n]).abs().max().item() for n in plain) < 2e-6


def continued(stage, whole):
    """Train an optimizer in plain PyTorch first, then hand it over with its states."""
    import stateroom

    model = build("gpt")
    make = ALL["RowNormSGD" if whole else "AdamW"]
    optimizer = make(model.parameters())
    for step in range(2):
        for rank in range(2):
            (model(*batch("gpt", step, 0, rank)) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    config = config_for(stage, "fp32", 1)
    del config["optimizer"]
    engine, *_ = stateroom.initialize(model, config=config, optimizer=optimizer)
    train(engine, 3, first=2)
    weights = master_weights(engine)
    engine.destroy()
    return weights


@pytest.mark.parametrize("whole", [False, True])
def test_states_that_exist_already_are_taken_over(pools, whole):
    _, plain, _ = train_plain("gpt", "fp32", 1, 5, 2, optimizer=ALL["RowNormSGD" if whole else "AdamW"])
    for stage in (0, 1, 3):
        weights = pools(2).run(continued, stage, whole)[0]
        assert max((weights[n] - plain[n]).abs().max().item() for n in plain) < 3e-6


def dropout_run(stage, precision, plan, folder):
    """Train with dropout and different randomness per rank; `plan` is steps, or "save" / "load" markers in between."""
    import stateroom
    from models import TiedGPT

    class WithDropout(TiedGPT):
        def forward(self, ids, targets):
            x = torch.nn.functional.dropout(self.emb(ids), 0.3, self.training)
            for block in self.blocks:
                x = block(x)
            return torch.nn.functional.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())

    torch.manual_seed(3)
    config = config_for(stage, precision, 2, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10}})
    engine, *_ = stateroom.initialize(WithDropout(), config=config)
    torch.manual_seed(100 + engine.global_rank)
    torch.rand(7 * engine.global_rank + 1)
    losses = []
    for item in plan:
        if item == "save":
            engine.save_checkpoint(folder, client_state={"note": {"rank": engine.global_rank}})
        elif item == "load":
            path, client = engine.load_checkpoint(folder)
            assert path and client == {"note": {"rank": engine.global_rank}}
        else:
            for micro in range(2):
                loss = engine(*batch("gpt", item, micro, engine.global_rank))
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
    weights = master_weights(engine)
    engine.destroy()
    return losses, weights, engine.get_lr() if engine.optimizer else None


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
def test_resume_is_bit_exact_with_dropout(pools, stage, precision, tmp_path):
    pool = pools(2)
    straight = pool.run(dropout_run, stage, precision, list(range(6)), None)
    saved_often = pool.run(dropout_run, stage, precision, [0, "save", 1, "save", 2, "save", 3, 4, 5], str(tmp_path / "often"))
    pool.run(dropout_run, stage, precision, [0, 1, 2, "save"], str(tmp_path / "half"))
    resumed = pool.run(dropout_run, stage, precision, ["load", 3, 4, 5], str(tmp_path / "half"))
    for rank in range(2):
        assert saved_often[rank][0] == straight[rank][0]
        assert resumed[rank][0] == straight[rank][0][6:]
        for name, weight in straight[rank][1].items():
            assert torch.equal(weight, resumed[rank][1][name]) and torch.equal(weight, saved_often[rank][1][name])


def other_stage(folder):
    """Save at stage 2 and load at stage 3; load where nothing is."""
    import stateroom

    engine, *_ = stateroom.initialize(build("gpt"), config=config_for(2, "fp32", 1))
    train(engine, 2)
    saved = master_weights(engine)
    engine.save_checkpoint(folder)
    engine.destroy()
    engine, *_ = stateroom.initialize(build("gpt"), config=config_for(3, "fp32", 1))
    engine.load_checkpoint(folder)
    loaded = master_weights(engine)
    nothing = engine.load_checkpoint(folder + "-none")
    engine.destroy()
    return saved, loaded, nothing


def test_a_save_of_another_stage_loads(pools, tmp_path):
    for saved, loaded, nothing in pools(2).run(other_stage, str(tmp_path / "x")):
        assert all(torch.equal(saved[name], loaded[name]) for name in saved)
        assert nothing == (None, {})
