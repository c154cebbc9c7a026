"""`stateroom ckpt import`: whatever another tool wrote is the same afterwards, in a directory that the engine takes for its own."""

from __future__ import annotations

import json

import pytest
import torch
from by_hand import FIXTURES
from engine_jobs import differences as apart
from stateroom.__main__ import main
from stateroom.checkpoint.cli_diff import differences
from stateroom.checkpoint.importing import import_checkpoint
from stateroom.checkpoint.native import NativeSource
from stateroom.checkpoint.opener import open_source
from stateroom.checkpoint.verifying import verify
from stateroom.errors import CheckpointError

EVERY = ["z1fp32", "z2bf16", "z3bf16", "z3sub", "u_z2bf16", "u_z3bf16", "pipe_fp32", "moe2"]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("file_size", ["2GB", 300])
def test_nothing_is_lost(name, file_size, tmp_path):
    made = import_checkpoint(FIXTURES / name, tmp_path, max_file_size=file_size)
    there, here = open_source(FIXTURES / name), open_source(tmp_path)
    assert isinstance(here, NativeSource) and here.folder == made.path
    assert differences(there, here) == []
    assert here.names() == there.names()
    assert {name: one.trainable for name, one in here.parameters.items()} == {n: one.trainable for n, one in there.parameters.items()}
    assert here.client_state() == there.client_state() and here.scheduler() == there.scheduler()
    assert [sorted(group) for group in here.groups()] == [sorted(group) for group in there.groups()]
    assert there.counters().items() <= here.counters().items()
    assert here.scale_state() == there.scale_state()
    assert verify(tmp_path) == []
    assert (here.manifest["world"] > 1) == (file_size == 300)


def load(folder):
    from test_engine_deepspeed import load as loaded

    return loaded(folder, 2, "bf16")


@pytest.mark.full
def test_the_engine_goes_on_as_from_the_original(pools, tmp_path):
    import_checkpoint(FIXTURES / "z2bf16", tmp_path, max_file_size=400)
    ours, theirs = pools(2).run(load, tmp_path), pools(2).run(load, FIXTURES / "z2bf16")
    for (states, lr, _, client, _, loss, after), (states_, lr_, _, client_, _, loss_, after_) in zip(ours, theirs, strict=True):
        assert (lr, client, loss) == (lr_, client_, loss_)
        assert apart(states, states_) == [] and apart(after, after_) == []


def test_plain_weights(tmp_path, capsys):
    weights = {"a.weight": torch.randn(4, 3), "a.count": torch.tensor(7), "b": torch.randn(2, 2, 2).bfloat16()}
    torch.save(weights, tmp_path / "model.pt")
    assert main(["ckpt", "import", str(tmp_path / "model.pt"), str(tmp_path / "out"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["parameters"] == 2 and said["path"].endswith("/out/model")
    here = open_source(tmp_path / "out")
    assert all(torch.equal(here.tensor(name, here.best_weight(name)), weights[name]) for name in here.parameters)
    assert torch.equal(here.buffers()["a.count"], weights["a.count"])


def test_a_tag_is_not_written_over_unasked(tmp_path):
    import_checkpoint(FIXTURES / "z1fp32", tmp_path)
    with pytest.raises(CheckpointError, match=r"exists already.*--overwrite"):
        import_checkpoint(FIXTURES / "z2bf16", tmp_path)
    import_checkpoint(FIXTURES / "z2bf16", tmp_path, overwrite=True)
    assert differences(open_source(FIXTURES / "z2bf16"), open_source(tmp_path)) == []
    import_checkpoint(FIXTURES / "z1fp32", tmp_path, out_tag="first")
    assert (tmp_path / "latest").read_text() == "first"


def test_states_held_in_part_are_an_error_unless_left_out(tmp_path):
    broken = FIXTURES / "written" / "p0_bf16_tied"
    with pytest.raises(CheckpointError, match=r"is not complete: state .*--no_strict"):
        import_checkpoint(broken, tmp_path)
    assert list(tmp_path.iterdir()) == []
    made = import_checkpoint(broken, tmp_path, strict=False)
    assert any(line.startswith("left out: state") for line in made.remarks)
    assert differences(open_source(broken), open_source(tmp_path)) == []


def test_an_error_on_the_way_leaves_nothing(tmp_path, monkeypatch):
    source = open_source(FIXTURES / "z1fp32")
    read, calls = type(source).tensor, []

    def fails_later(self, name, state):
        calls.append(name)
        if len(calls) == 5:
            raise CheckpointError("the disk is gone")
        return read(self, name, state)

    monkeypatch.setattr(type(source), "tensor", fails_later)
    with pytest.raises(CheckpointError, match="the disk is gone"):
        import_checkpoint(FIXTURES / "z1fp32", tmp_path, max_file_size=300)
    assert list(tmp_path.iterdir()) == []
