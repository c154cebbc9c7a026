"""A checkpoint loads under any layout: other ranks, other stage, other precision; every state comes back bit for bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from engine_jobs import batch_any, differences, load_here, new_engine, save_here, states_of, train

MODELS = ("gpt", "odd", "mlp")


def master_only(states):
    """Leave out what the other precision stores in another dtype: the weights that are computed with."""
    return {name: value for name, value in states.items() if not name.endswith("computed with")}


def check_pair(pools, folder, name, there, here):
    """Save under one (ranks, stage, precision) and load under another."""
    ranks, stage, precision = there
    saved = pools(ranks).run(save_here, name, stage, precision, folder)
    ranks, stage, other = here
    for rank, (found, losses) in enumerate(pools(ranks).run(load_here, name, stage, other, folder)):
        ours = dict(saved[rank if rank < there[0] else 0])  # running statistics differ by rank
        theirs = dict(found)
        if precision != other:
            ours, theirs = master_only(ours), master_only(theirs)
        if name == "odd" and precision != other:
            # a frozen weight is what it was computed with: fp32 in one run, 16 bits in the other
            for key in [key for key in ours if key.startswith("frozen.")]:
                assert torch.equal(ours.pop(key).bfloat16(), theirs.pop(key).bfloat16())
        if ranks != there[0]:
            ours["counters"] = theirs["counters"] = None  # samples are counted by batch, and that depends on the ranks
        assert differences(ours, theirs) == [], (there, here)
        masters = {key: value for key, value in found.items() if f"{key} as computed with" in found}
        for key, value in masters.items():
            assert torch.equal(value.to(found[f"{key} as computed with"].dtype), found[f"{key} as computed with"]), key
        assert all(loss == loss for loss in losses)


QUICK = [
    ("gpt", (2, 2, "fp32"), (1, 0, "fp32")),
    ("odd", (1, 0, "bf16"), (2, 3, "bf16")),
    ("odd", (2, 3, "fp32"), (2, 1, "bf16")),
    ("odd", (2, 1, "bf16"), (1, 2, "fp32")),
    ("mlp", (2, 0, "fp32"), (2, 3, "fp32")),
    ("gpt", (2, 3, "bf16"), (3, 2, "bf16")),
]


@pytest.mark.parametrize(("name", "there", "here"), QUICK, ids=str)
def test_all_states_survive_a_change_of_layout(pools, tmp_path, name, there, here):
    check_pair(pools, str(tmp_path), name, there, here)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(40))
def test_all_states_survive_any_change_of_layout(pools, tmp_path, seed):
    draw = random.Random(seed)

    def layout():
        return draw.choice((1, 2, 3, 4)), draw.randrange(4), draw.choice(("fp32", "bf16", "fp16"))

    check_pair(pools, str(tmp_path), draw.choice(MODELS), layout(), layout())


def losses_after(name, stage, folder, ranks):
    """Return the losses of the global batch of 3 more steps, whatever the number of ranks."""
    engine = new_engine(name, stage)
    engine.load_checkpoint(folder)
    found = []
    for step in range(3):
        rank = engine.global_rank
        mine = [batch_any(name, step, other) for other in range(6) if other % ranks == rank]
        inputs = tuple(torch.cat(parts) for parts in zip(*mine, strict=True))
        loss = engine(*inputs)
        engine.backward(loss)
        engine.step()
        found.append(engine.comm.gather_rows(loss.detach().reshape(1)).mean().item())
    engine.destroy()
    return found


def test_losses_go_on_within_rounding(pools, tmp_path):
    """The same global batches on 1, 2 and 3 ranks and other stages after one save."""
    pools(2).run(save_here, "gpt", 2, "fp32", str(tmp_path))
    first, *others = [pools(ranks).run(losses_after, "gpt", stage, str(tmp_path), ranks)[0] for ranks, stage in ((2, 2), (1, 0), (3, 3))]
    for other in others:
        assert max(abs(a - b) / abs(a) for a, b in zip(first, other, strict=True)) < 1e-5


def stored(folder):
    """Return every tensor of a checkpoint, and what stands beside them."""
    from stateroom.checkpoint.native import NativeSource

    (path,) = [path for path in Path(folder).iterdir() if path.is_dir()]
    source = NativeSource(path)
    tensors = {name: source.tensor(name, source.best_weight(name)) for name in source.parameters}
    tensors |= {f"{n}::{s}": source.tensor(n, s) for n in source.parameters for s in source.states(n)[1:]}
    tensors |= {f"buffer {name}": value for name, value in source.buffers().items()}
    beside = [(key, source.manifest[key]) for key in ("scalars", "groups", "counters", "aliases")]
    return {**tensors, "beside": sorted(beside)}


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt", "odd"])
def test_a_chain_of_layouts_returns_the_same_bytes(pools, tmp_path, name):
    """2 -> 3 -> 1 -> 4 ranks over stages 2, 3, 0, 1."""
    chain = [(2, 2), (3, 3), (1, 0), (4, 1)]
    folders = [str(tmp_path / f"{ranks}") for ranks, _ in chain]
    pools(2).run(save_here, name, 2, "fp32", folders[0])
    for (ranks, stage), before, after in zip(chain[1:], folders, folders[1:], strict=False):
        pools(ranks).run(load_here, name, stage, "fp32", before, after)
        assert differences(stored(before), stored(after)) == []


def uneven(ranks_stage, folder, load):
    """A model of which one layer was not used in some steps, so that its step count is behind."""
    stage, total = ranks_stage
    engine = new_engine("gpt", stage)
    if load:
        engine.load_checkpoint(folder)
    else:
        train(engine, "gpt", 1)
        for step in range(1, total):
            ids, targets = batch_any("gpt", step, engine.global_rank)
            x = engine.module.emb(ids)  # the blocks are left out
            loss = torch.nn.functional.cross_entropy(engine.module.head(x).flatten(0, 1), targets.flatten())
            engine.backward(loss)
            engine.step()
        engine.save_checkpoint(folder)
    before = states_of(engine)
    losses = train(engine, "gpt", 2, first=5)
    after = states_of(engine)
    engine.destroy()
    return before, losses, after


@pytest.mark.parametrize(
    ("there", "here"), [((2, 3), (2, 3)), *(pytest.param(*case, marks=pytest.mark.full) for case in (((0, 3), (1, 3)), ((1, 2), (0, 2))))]
)
def test_parameters_with_other_step_counts_keep_them(pools, tmp_path, there, here):
    straight = pools(2).run(uneven, there, str(tmp_path), False)
    counts = {value.item() for name, value in straight[0][0].items() if name.endswith("::step")}
    assert counts == {1.0, float(there[1])}
    for (before, losses, after), (found, again, final) in zip(straight, pools(2).run(uneven, here, str(tmp_path), True), strict=True):
        assert differences(before, found) == []
        assert again == losses
        assert differences(after, final) == []


OPTIMIZERS = {
    "SGD": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
    "Lion": {"type": "Lion", "params": {"lr": 1e-3}},
    "Adagrad": {"type": "Adagrad", "params": {"lr": 1e-2}},
    "Muon": {"type": "Muon", "params": {"lr": 1e-2}},
    "Lamb": {"type": "Lamb", "params": {"lr": 1e-2}},
    "ASGD": {"type": "ASGD", "params": {"lr": 1e-2}},
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizers_states_survive(pools, tmp_path, optimizer):
    """Momenta, sums, step counts."""
    section = OPTIMIZERS[optimizer]
    saved = pools(2).run(save_here, "gpt", 2, "fp32", str(tmp_path), optimizer=section)[0]
    assert len([key for key in saved if "::" in key]) > 10
    found, _ = pools(1).run(load_here, "gpt", 0, "fp32", str(tmp_path), optimizer=section)[0]
    saved["counters"] = found["counters"] = None
    assert differences(saved, found) == []


def test_states_of_another_shape_survive(pools, tmp_path):
    """Adafactor keeps a row and a column of each matrix."""
    section = {"type": "Adafactor", "params": {"lr": 1e-2}}
    first, second = str(tmp_path / "1"), str(tmp_path / "2")
    pools(2).run(save_only, "gpt", 3, first, section)
    pools(3).run(load_here_only, "gpt", 1, first, second, section)
    before, after = stored(first), stored(second)
    assert before["blocks.0.up.weight::row_var"].shape != before["blocks.0.up.weight"].shape
    assert differences(before, after) == []


def save_only(name, stage, folder, section):
    engine = new_engine(name, stage, optimizer=section)
    train(engine, name, 2)
    engine.save_checkpoint(folder)
    engine.destroy()


def load_here_only(name, stage, folder, again, section):
    engine = new_engine(name, stage, optimizer=section)
    engine.load_checkpoint(folder)
    engine.save_checkpoint(again)
    losses = train(engine, name, 1, first=3)
    engine.destroy()
    return losses


def test_the_pairs_cover_every_stage_and_a_change_of_each_kind():
    """The quick matrix above is small: see that it leaves nothing out."""
    stages = {layout[1] for _, *pair in QUICK for layout in pair}
    assert stages == {0, 1, 2, 3}
    changes = [tuple(a != b for a, b in zip(there, here, strict=True)) for _, there, here in QUICK]
    assert all(any(change[kind] for change in changes) for kind in range(3))
