"""What load_checkpoint restores and leaves alone, what it refuses, and what it says."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import pytest
import torch
from engine_jobs import Odd, batch_any, build_any, differences, listen, new_engine, states_of, train
from oracle import error_of
from torch import nn


class Bigger(Odd):
    """Odd with one more layer."""

    def __init__(self):
        super().__init__()
        self.more = nn.Linear(3, 3)


def weights_of(engine):
    return {name: value.clone() for name, value in engine.module_state_dict().items()}


def save_odd(folder, stage=2, precision="fp32", **options):
    engine = new_engine("odd", stage, precision)
    train(engine, "odd", 2)
    engine.save_checkpoint(folder, client_state={"rank": engine.global_rank}, **options)
    found = weights_of(engine), states_of(engine)
    engine.destroy()
    return found


def another(model, stage, precision, seed=5, lr=0.0):
    """An engine from another seed, with an optimizer that changes nothing."""
    torch.manual_seed(seed)
    optimizer = {"type": "SGD", "params": {"lr": lr}} if lr == 0.0 else {"type": "AdamW", "params": {"lr": lr}}
    return new_engine("odd", stage, precision, optimizer, model=model())


def weights_only(folder, stage, precision, way):
    """Load without optimizer states into a fresh engine; return the weights before, after, and after a step with rate 0."""
    engine = another(Bigger if way == "extra layer" else Odd, stage, precision)
    before = weights_of(engine)
    options = {"load_module_only": True} if way == "module only" else {"load_optimizer_states": False}
    engine.load_checkpoint(folder, load_module_strict=way != "extra layer", **options)
    loaded = weights_of(engine)
    train(engine, "odd", 1, first=7)
    stepped = weights_of(engine)
    counters = engine.global_steps
    engine.destroy()
    return before, loaded, stepped, counters


@pytest.mark.parametrize("way", ["no states", "module only", "extra layer"])
@pytest.mark.parametrize(("stage", "precision"), [(0, "bf16"), (1, "fp32"), (2, "bf16"), (3, "bf16"), (3, "fp32")])
def test_loaded_weights_reach_the_master_copy(pools, tmp_path, stage, precision, way):
    """A step with learning rate 0 leaves exactly the loaded weights, frozen ones too; a new layer keeps its own (C31)."""
    pool = pools(2)
    saved = pool.run(save_odd, str(tmp_path), 2, precision)
    for (weights, _), (before, loaded, stepped, counters) in zip(
        saved, pool.run(weights_only, str(tmp_path), stage, precision, way), strict=True
    ):
        for name, value in weights.items():
            assert torch.equal(value, loaded[name]), name
            if not name.startswith(("bn.running", "bn.num", "steps")):
                assert torch.equal(value, stepped[name]), name
        fresh = [name for name in before if name.startswith("more.")]
        assert len(fresh) == (2 if way == "extra layer" else 0)
        assert all(torch.equal(before[name], stepped[name]) for name in fresh)
        assert not torch.equal(before["frozen.weight"], loaded["frozen.weight"])
        assert counters == (1 if way == "module only" else 3)


def buffers_after(folder):
    engine = another(Odd, 3, "bf16")
    engine.module.frequencies.fill_(9)
    engine.load_checkpoint(folder)
    found = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    engine.destroy()
    return found


def test_buffers_keep_dtype_and_value(pools, tmp_path):
    """Floating ones stay fp32 in a bf16 run, counters exact; one that is not persistent keeps what the constructor gave it (C18)."""

    def persistent(states):
        return {name.removeprefix("buffer "): value for name, value in states.items() if name.startswith("buffer ")}

    saved = pools(2).run(save_odd_sgd, str(tmp_path))
    for states, found in zip(saved, pools(2).run(buffers_after, str(tmp_path)), strict=True):
        expected = persistent(states)
        expected["frequencies"] = torch.full((5,), 9.0)
        assert differences(expected, found) == []
        assert found["table"].dtype == torch.float32 and found["steps"].tolist() == [2, 2]
    means = [found["bn.running_mean"] for found in pools(2).run(buffers_after, str(tmp_path))]
    assert not torch.equal(*means), "each rank gets the statistics that it had"


def save_odd_sgd(folder):
    engine = new_engine("odd", 2, "bf16", {"type": "SGD", "params": {"lr": 0.1}})
    train(engine, "odd", 2)
    engine.save_checkpoint(folder)
    states = states_of(engine)
    engine.destroy()
    return states


def refused(folder, what):
    """Try to load what does not fit; return the error and whether the engine still has its own weights."""
    engine = another(Bigger if what == "added" else Small if what == "shape" else Fewer if what == "removed" else Odd, 2, "fp32", lr=0.1)
    before = weights_of(engine)
    options = {"optimizer": {}, "tags": {"tag": f"tag{engine.global_rank}"}, "no tag": {"tag": "global_step7"}}.get(what, {})
    path = folder + "/nowhere/at/all" if what == "nowhere" else folder
    lines = listen(engine)
    error = error_of(lambda: engine.load_checkpoint(path, **options))
    untouched = all(torch.equal(value, before[name]) for name, value in weights_of(engine).items())
    engine.destroy()
    return error, untouched, "\n".join(lines)


class Small(Odd):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 5)


class Fewer(Odd):
    def __init__(self):
        super().__init__()
        self.head = nn.Identity()


REFUSALS = {
    "added": ["lacks 'more.weight', 'more.bias'", "load_module_strict=False"],
    "removed": ["the model lacks 'head.weight', 'head.bias'", "load_module_strict=False"],
    "shape": ["'head.weight' is (5, 3) here and (4, 3) in the checkpoint", "rename="],
    "tags": ["ranks ask for different checkpoints", "tag0", "tag1"],
    "no tag": ["global_step7 does not exist", "global_step2"],
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_does_not_fit_is_refused_on_every_rank(pools, tmp_path, what):
    pools(2).run(save_odd, str(tmp_path))
    for error, untouched, _ in pools(2).run(refused, str(tmp_path), what):
        assert error[0] == "CheckpointError"
        assert all(part in error[1] for part in REFUSALS[what]), error[1]
        assert untouched


def test_states_of_another_optimizer_are_refused(pools, tmp_path):
    pools(2).run(save_odd_sgd, str(tmp_path))
    for error, untouched, _ in pools(2).run(refused, str(tmp_path), "optimizer"):
        assert error[0] == "CheckpointError" and "SGD" in error[1] and "load_optimizer_states=False" in error[1]
        assert untouched


def test_nothing_to_load_is_no_error(pools, tmp_path):
    for error, untouched, _ in pools(2).run(refused, str(tmp_path), "nowhere"):
        assert error == ("", "") and untouched


def mapped(folder):
    """Load with renamed keys, and with some left out."""
    engine = another(Renamed, 3, "fp32")
    before = weights_of(engine)

    def rename(name):
        if name.startswith("conv."):
            return None
        return name.replace("body.", "inward.")

    engine.load_checkpoint(folder, rename=rename, load_module_only=True)
    found = before, weights_of(engine)
    engine.destroy()
    return found


class Renamed(Odd):
    def __init__(self):
        super().__init__()
        self.body = self.inward
        del self.inward

    def forward(self, x, y):
        raise NotImplementedError


def test_names_may_be_mapped(pools, tmp_path):
    saved = pools(2).run(save_odd, str(tmp_path))
    for (weights, _), (before, loaded) in zip(saved, pools(2).run(mapped, str(tmp_path)), strict=True):
        assert torch.equal(loaded["body.weight"], weights["inward.weight"])
        assert torch.equal(loaded["head.weight"], weights["head.weight"])
        assert torch.equal(loaded["conv.weight"], before["conv.weight"])


def thawed(folder, stage):
    """Train the layer that was frozen, freeze one that was trained, and load; return lines and states."""
    model = build_any("odd")
    model.frozen.requires_grad_(True)
    model.head.requires_grad_(False)
    engine = new_engine("odd", stage, model=model)
    lines = listen(engine)
    engine.load_checkpoint(folder)
    states = states_of(engine)
    losses = train(engine, "odd", 2, first=2)
    engine.destroy()
    return states, losses, "\n".join(lines)


def test_frozen_parameters_may_be_added_and_removed(pools, tmp_path):
    saved = pools(2).run(save_odd, str(tmp_path))
    for (weights, states), (found, losses, said) in zip(saved, pools(2).run(thawed, str(tmp_path), 3), strict=True):
        kept = [name for name in states if "::" in name and not name.startswith("head.")]
        assert all(torch.equal(states[name], found[name]) for name in kept) and len(kept) > 20
        assert all(torch.equal(weights[name], found[name]) for name in weights if name in found)
        assert not [name for name in found if name.startswith(("head.weight::", "frozen.weight::"))]
        assert all(loss == loss for loss in losses)
        assert "'frozen.weight' is trained here and was frozen" in said and "'head.weight' is frozen here and was trained" in said
        assert "starts anew for" in said


def without_frozen(folder, stage):
    engine = another(Odd, stage, "fp32")
    before, lines = weights_of(engine), listen(engine)
    engine.load_checkpoint(folder, load_optimizer_states=False)
    found = before, weights_of(engine), "\n".join(lines)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_parameters_may_be_left_out(pools, tmp_path, stage):
    pool = pools(2)
    saved = pool.run(save_odd, str(tmp_path), stage, exclude_frozen_parameters=True)
    for (weights, _), (before, loaded, said) in zip(saved, pool.run(without_frozen, str(tmp_path), stage), strict=True):
        assert "'frozen.weight' keeps its values" in said
        for name in weights:
            expected = before if name.startswith("frozen.") else weights
            assert torch.equal(loaded[name], expected[name]), name


def custom(folder, stage):
    seen = []

    def load(src, dst):
        seen.append(sorted(src))
        dst.load_state_dict({name: value * 2 for name, value in src.items()})

    engine = another(Odd, stage, "bf16")
    engine.load_checkpoint(folder, load_optimizer_states=False, custom_load_fn=load)
    train(engine, "odd", 1)
    found = seen, weights_of(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_a_function_of_the_scripts_own_may_bring_the_weights(pools, tmp_path, stage):
    saved = pools(2).run(save_odd, str(tmp_path), 2, "bf16")
    for (weights, _), (seen, loaded) in zip(saved, pools(2).run(custom, str(tmp_path), stage), strict=True):
        assert seen == [sorted(weights)]
        assert torch.equal(loaded["head.weight"], 2 * weights["head.weight"])


class WithExtra(Odd):
    """A module that keeps something of its own in its state dict."""

    def __init__(self):
        super().__init__()
        self.extra = {"calls": 0}

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def extra_state(folder):
    engine = new_engine("odd", 2, model=WithExtra())
    engine.module.extra = {"calls": 5, "history": [1.5, (2, 3)]}
    engine.save_checkpoint(folder)
    engine.module.extra = {}
    engine.load_checkpoint(folder, load_module_only=True)
    found = engine.module.extra
    engine.destroy()
    return found


def test_extra_states_of_modules_come_back(pools, tmp_path):
    assert pools(2).run(extra_state, str(tmp_path)) == [{"calls": 5, "history": [1.5, (2, 3)]}] * 2


def compiled(folder, load, save):
    """Load into and save from a plain model, one compiled before initialize(), or one compiled by the engine."""
    torch._dynamo.reset()
    model = build_any("mlp")
    before = save if load is None else load
    if before == "before":
        model = torch.compile(model, backend="eager")
    if before == "layer":
        model.net[0] = torch.compile(model.net[0], backend="eager")
    engine = new_engine("mlp", 3, model=model)
    if before == "engine":
        engine.compile(backend="eager")
    if load is None:
        train(engine, "mlp", 1)
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    found = {name.replace("_orig_mod.", ""): value for name, value in states_of(engine).items()}
    losses = train(engine, "mlp", 1, first=3)
    engine.destroy()
    return found, losses


@pytest.mark.parametrize(
    ("save", "load"), [("before", "plain"), ("plain", "engine"), ("engine", "plain"), ("plain", "layer"), ("layer", "before")]
)
def test_compiled_models_have_plain_names(pools, tmp_path, save, load):
    """Checkpoints of compiled models load into plain ones and the reverse (C19)."""
    (saved, losses), *_ = pools(1).run(compiled, str(tmp_path), None, save)
    found, again = pools(1).run(compiled, str(tmp_path), load, None)[0]
    assert differences(saved, found) == [] and losses == again


def imported(path, stage, precision):
    engine = another(Odd, stage, precision)
    engine.load_checkpoint(path, load_module_only=True)
    loaded = weights_of(engine)
    train(engine, "odd", 1, first=3)
    stepped = weights_of(engine)
    engine.destroy()
    return loaded, stepped


@pytest.mark.parametrize("form", ["pt", "safetensors"])
@pytest.mark.parametrize(("stage", "precision"), [(3, "bf16"), (1, "fp32")])
def test_plain_weights_are_imported(pools, tmp_path, form, stage, precision):
    """A state dict of torch.save, or a folder of safetensors, into a sharded model."""
    torch.manual_seed(8)
    state = Odd().state_dict()
    if form == "pt":
        path = tmp_path / "weights.pt"
        torch.save(state, path)
    else:
        from safetensors.torch import save_file

        path = tmp_path / "weights"
        path.mkdir()
        save_file({name: value.clone() for name, value in state.items() if name != "again.weight"}, path / "model.safetensors")
    for loaded, stepped in pools(2).run(imported, str(path), stage, precision):
        for name, value in state.items():
            assert torch.equal(loaded[name], value.to(loaded[name].dtype)), name
            if name.endswith("weight") and not name.startswith("bn."):
                assert torch.equal(stepped[name], loaded[name]), name


def weights_file(folder):
    engine = new_engine("odd", 3, "bf16")
    train(engine, "odd", 1)
    engine.save_16bit_model(folder)
    engine.save_16bit_model(folder, "model.safetensors")
    engine.save_16bit_model(folder, "trained.bin", exclude_frozen_parameters=True)
    found = weights_of(engine)
    engine.destroy()
    return found


def test_weights_are_saved_whole_in_the_compute_dtype(pools, tmp_path):
    from safetensors.torch import load_file

    weights = pools(2).run(weights_file, str(tmp_path))[0]
    loaded = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert differences(weights, loaded) == [] and loaded["head.weight"].dtype == torch.bfloat16
    tensors = load_file(tmp_path / "model.safetensors")
    assert set(weights) - set(tensors) == {"again.weight"}
    assert all(torch.equal(value, weights[name]) for name, value in tensors.items())
    trained = torch.load(tmp_path / "trained.bin", weights_only=True)
    assert set(weights) - set(trained) == {"frozen.weight", "frozen.bias"}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def only_one_saves(folder):
    """Rank 0 calls save_checkpoint, rank 1 does not; then both do."""
    engine = new_engine("gpt", 2)
    engine.comm.meet = functools.partial(engine.comm.meet, timeout_s=2.0)
    error = error_of(lambda: engine.save_checkpoint(folder)) if engine.global_rank == 0 else None
    engine.comm.barrier()
    engine.comm.meet = functools.partial(type(engine.comm).meet, engine.comm)
    engine.save_checkpoint(folder)
    engine.destroy()
    return error


def test_a_save_that_not_every_rank_calls_ends_in_an_error(pools, tmp_path):
    """And the ranks can go on (P23)."""
    error, nothing = pools(2).run(only_one_saves, str(tmp_path))
    assert nothing is None and error[0] == "RankError" and "rank(s) [1]" in error[1] and "save_checkpoint" in error[1]
    assert (tmp_path / "latest").read_text() == "global_step0"


def odd_saves(folder, what):
    engine = new_engine("gpt", 1, checkpoint={"tag_validation": "Fail" if what == "tags fail" else "Warn"})
    rank = engine.global_rank
    client = {"path": Path("x")} if what == "client" and rank == 1 else {}
    tag = f"tag{rank}" if what.startswith("tags") else "a/b" if what == "tag" else None
    if what == "state":
        engine.optimizer.inner.state[engine.optimizer.runs[0].tensor]["strange"] = [object()]
    lines = listen(engine)
    error = error_of(lambda: engine.save_checkpoint(folder, tag=tag, client_state=client))
    engine.destroy()
    return (*error, "\n".join(lines))


SAVES = {
    "client": r"rank 1: .*client_state'\]\['path'\] is a pathlib",
    "state": "optimizer state '.*::strange' of .*|optimizer state '.*::strange'.* holds a builtins.object",
    "tag": "'a/b' cannot name a checkpoint",
    "tags fail": "ranks gave different tags.*tag0.*tag1",
}


@pytest.mark.parametrize("what", SAVES)
def test_what_cannot_be_saved_is_refused_before_anything_is_written(pools, tmp_path, what):
    import re

    for error in pools(2).run(odd_saves, str(tmp_path), what):
        assert error[0] == "CheckpointError" and re.search(SAVES[what], error[1]), error
    assert list(tmp_path.iterdir()) == []


def test_ranks_with_different_tags_save_under_that_of_rank_0(pools, tmp_path):
    for kind, _, said in pools(2).run(odd_saves, str(tmp_path), "tags"):
        assert kind == "" and "ranks gave different tags" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "tag0"]


def too_full(folder, free_bytes):
    """Save where the disk has so little room."""
    import os

    engine = new_engine("gpt", 2)
    real = os.statvfs(".")
    fields = {"f_bavail": free_bytes // real.f_frsize, "f_frsize": real.f_frsize}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "statvfs", lambda path: type("Disk", (), fields))
        error = error_of(lambda: engine.save_checkpoint(folder))
    engine.destroy()
    return error


def test_room_on_the_disk_is_looked_at_first(pools, tmp_path):
    for error in pools(2).run(too_full, str(tmp_path), 20_000):
        assert error[0] == "CheckpointError" and "bytes and" in error[1] and "nothing was written" in error[1]
    assert list(tmp_path.iterdir()) == []
    assert pools(2).run(too_full, str(tmp_path), 2_000_000) == [("", "")] * 2


def test_a_checkpoint_without_its_manifest_is_not_taken_for_one(pools, tmp_path):
    """Half a copy: named, with what there is."""
    pools(1).run(save_odd, str(tmp_path))
    shutil.copytree(tmp_path / "global_step2", tmp_path / "copy")
    (tmp_path / "copy" / "manifest.json").unlink()
    (tmp_path / "latest").write_text("copy")
    error, _, said = pools(1).run(refused, str(tmp_path), "nothing")[0]
    assert error == ("", "")
    assert "names 'copy'" in said and "loading global_step2" in said


def test_the_batches_differ_between_ranks():
    """Else the tests of per-rank buffers would show nothing."""
    assert not torch.equal(batch_any("odd", 0, 0)[0], batch_any("odd", 0, 1)[0])
