"""Every tensor of every checkpoint that DeepSpeed wrote comes out right under its name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from by_hand import FIXTURES, flat_states, moe_states, optimizer, pipe_states, raw, sharded_states
from checkpoint_truth import problems
from stateroom.checkpoint import load_state_dict_from_checkpoint, open_source

TAG = "global_step2"
STATES = {
    "z1fp32": flat_states,
    "z2bf16": flat_states,
    "z3bf16": sharded_states,
    "z3sub": sharded_states,
    "pipe_fp32": pipe_states,
    "moe2": moe_states,
}
DENSE = ("z1fp32", "z2bf16", "z3bf16", "z3sub")
WRITTEN = sorted(path.name for path in (FIXTURES / "written").iterdir())


@pytest.mark.parametrize("name", STATES)
def test_every_state_equals_the_one_assembled_by_hand(name):
    source, wanted = open_source(FIXTURES / name), STATES[name](FIXTURES / name / TAG)
    trainable = [one.name for one in source.parameters.values() if one.trainable]
    assert sorted(trainable) == sorted(wanted)
    for parameter, states in wanted.items():
        for state, value in states.items():
            found = source.tensor(parameter, state)
            assert torch.equal(found, value), f"{state} of {parameter}"
            assert found.dtype == value.dtype
        assert float(source.scalars(parameter)["step"]) == 2.0
    assert not source.gaps()


@pytest.mark.parametrize("name", DENSE)
def test_weights_buffers_frozen_and_tied_ones(name):
    source, folder = open_source(FIXTURES / name), FIXTURES / name / TAG
    (first,) = [path for path in folder.glob("*model_states.pt") if "rank_1" not in path.name]
    module = raw(first)["module"]
    assert list(source.buffers()) == ["buf"] and torch.equal(source.buffers()["buf"], torch.arange(3.0))
    assert source.parameters["emb.weight"].aliases == ("head.weight",)
    assert set(module) == {*source.names(), "buf"}
    frozen = source.parameters["frozen.weight"]
    assert not frozen.trainable and frozen.dtype == module["frozen.weight"].dtype
    assert [one.name for one in source.parameters.values() if not one.trainable] == ["frozen.weight"]
    if first.name.startswith("mp_"):
        for parameter in source.parameters:
            assert torch.equal(source.tensor(parameter, "param"), module[parameter])
    else:
        halves = [
            raw(folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")["frozen_param_fragments"]["frozen.weight"] for rank in (0, 1)
        ]
        assert torch.equal(source.tensor("frozen.weight", "param"), torch.cat(halves).view(6, 6))


def test_parameters_come_in_the_order_of_the_module():
    for name in DENSE:
        assert [n for n in open_source(FIXTURES / name).parameters] == [
            *("emb.weight", "l1.weight", "l1.bias", "ln.weight", "ln.bias", "l2.weight", "frozen.weight")
        ]


@pytest.mark.parametrize("name", DENSE)
def test_groups_scheduler_counters_and_client_state(name):
    source = open_source(FIXTURES / name)
    matrices, vectors = source.groups()
    assert matrices["params"] == ["emb.weight", "l1.weight", "l2.weight"] and matrices["weight_decay"] == 0.1
    assert vectors["params"] == ["l1.bias", "ln.weight", "ln.bias"] and vectors["weight_decay"] == 0.0
    inner = optimizer(FIXTURES / name / TAG, 0)
    kept = inner.get("base_optimizer_state") or inner["optimizer_state_dict"]
    assert matrices["lr"] == kept["param_groups"][0]["lr"] and matrices["betas"] == (0.9, 0.999)
    assert source.scheduler() == {"last_batch_iteration": 1}
    assert source.counters() == {"global_steps": 2, "global_samples": 8, "skipped_steps": 0}
    assert source.client_state() == {"my_epoch": 3}
    assert source.loss_scaler() == {"cur_scale": 1.0, "dynamic": False}
    facts = source.facts()
    assert (facts["writer"], facts["version"], facts["tag"]) == ("DeepSpeed", "0.19.8", TAG)
    assert facts["stage"] == int(name[1]) and facts["ranks"] == {"dp": 2, "pp": 1, "tp": 1}


@pytest.mark.parametrize("name", DENSE)
def test_any_interval_of_a_state_is_read_alone(name):
    source = open_source(FIXTURES / name)
    for state in ("fp32", "exp_avg"):
        whole = source.tensor("l1.weight", state).flatten()
        for start, stop in ((0, 42), (11, 13), (0, 0), (41, 42), (5, 30), (21, 42)):
            assert torch.equal(source.read("l1.weight", state, start, stop), whole[start:stop])


@pytest.mark.parametrize("name", WRITTEN)
def test_more_optimizers_ranks_and_options(name):
    assert problems(name, FIXTURES / "written" / name) == []


def test_the_check_sees_a_wrong_fragment(tmp_path):
    """Negative control: the truth of a run without round robin does not fit the order with it."""
    good = FIXTURES / "written" / "z2_fp32_round_robin"
    shutil.copytree(good, tmp_path / "x")
    path = tmp_path / "x" / "global_step3" / "mp_rank_00_model_states.pt"
    model = torch.load(path, weights_only=True)
    shapes = model["param_shapes"][0]
    model["param_shapes"][0] = type(shapes)(reversed(shapes.items()))
    torch.save(model, path)
    assert problems("z2_fp32_round_robin", tmp_path / "x")


def test_losses_of_names_are_said_and_not_guessed():
    """What DeepSpeed has not saved is a gap with its reason; weights that are there stay readable."""
    source = open_source(FIXTURES / "written" / "p0_bf16_tied")
    assert any("only data-parallel rank 0" in note for note in source.facts()["notes"])
    assert ("1.bias", "fp32") in source.gaps()
    state = load_state_dict_from_checkpoint(FIXTURES / "written" / "p0_bf16_tied", dtype="auto")
    assert state["1.bias"].dtype == torch.bfloat16


def test_a_state_that_no_parameter_can_have_a_part_of_is_named():
    source = open_source(FIXTURES / "written" / "z2_fp32_per_row")
    assert "(2, 2)" in source.gaps()["l1.weight", "corner"]
    assert source.states("l1.weight") == ("fp32", "m", "param")
    assert source.scalars("l1.weight") == {"count": 3}


def test_without_zero_states_of_any_shape_are_whole():
    source = open_source(FIXTURES / "written" / "z0_fp32_per_row")
    assert source.shape_of("l1.weight", "corner") == (2, 2) and source.shape_of("l1.weight", "m") == (7, 6)


def test_the_folder_of_a_tag_can_be_named_itself_or_by_tag():
    direct = open_source(FIXTURES / "z2bf16" / TAG)
    named = open_source(str(FIXTURES / "z2bf16"), tag=TAG)
    assert list(direct.parameters) == list(named.parameters)


def test_universal_directories_say_the_same_as_what_they_were_made_of():
    for name in ("z2bf16", "z3bf16"):
        first, second = open_source(FIXTURES / name), open_source(FIXTURES / f"u_{name}")
        assert first.parameters == second.parameters
        for parameter in first.parameters:
            for state in first.states(parameter):
                assert torch.equal(first.tensor(parameter, state), second.tensor(parameter, state))
            assert dict(first.scalars(parameter)) == dict(second.scalars(parameter))
        assert first.groups() == second.groups() and first.client_state() == second.client_state()
        assert first.counters() == second.counters() and first.scheduler() == second.scheduler()
        assert {name: tensor.tolist() for name, tensor in first.buffers().items()} == {
            name: tensor.tolist() for name, tensor in second.buffers().items()
        }


def test_opening_reads_no_tensor_data(tmp_path):
    """All bytes of all tensors are overwritten with another value: opening cannot tell, reading can."""
    import zipfile

    shutil.copytree(FIXTURES / "z2bf16", tmp_path / "x")
    before = open_source(tmp_path / "x")
    shapes = {name: (one.shape, before.states(name)) for name, one in before.parameters.items()}
    for path in Path(tmp_path / "x" / TAG).glob("*.pt"):
        content = bytearray(path.read_bytes())
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if "/data/" in info.filename and info.file_size > 4:
                    lengths = content[info.header_offset + 26 : info.header_offset + 30]
                    begin = info.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
                    content[begin : begin + info.file_size] = bytes(info.file_size)
        path.write_bytes(content)
    after = open_source(tmp_path / "x")
    assert {name: (one.shape, after.states(name)) for name, one in after.parameters.items()} == shapes
    assert not after.tensor("l1.weight", "fp32").any() and before.parameters == after.parameters
