"""What DeepSpeed 0.19.8's own tools get wrong, right here: one test each."""

from __future__ import annotations

import shutil
from itertools import pairwise

import pytest
import torch
from by_hand import FIXTURES, flat_states, optimizer, pipe_states, raw
from stateroom import CheckpointError
from stateroom.checkpoint import convert_to_universal, load_state_dict_from_checkpoint, open_source
from stateroom.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

TAG, WRITTEN = "global_step2", FIXTURES / "written"


@pytest.mark.parametrize("name", ["z1fp32", "z2bf16", "z3bf16"])
def test_1_a_universal_checkpoint_holds_frozen_parameters_and_buffers(name, tmp_path):
    """DeepSpeed leaves them at their initial values in silence."""
    convert_to_universal(FIXTURES / name, tmp_path / "u")
    source = open_source(tmp_path / "u")
    saved = load_state_dict_from_checkpoint(FIXTURES / name)
    assert torch.equal(source.read("frozen.weight", source.best_weight("frozen.weight")).float(), saved["frozen.weight"].flatten())
    assert torch.equal(source.buffers()["buf"], torch.arange(3.0))


def test_1_a_tensor_that_no_file_covers_is_an_error_that_names_it(tmp_path):
    shutil.copytree(FIXTURES / "u_z2bf16", tmp_path / "u")
    shutil.rmtree(tmp_path / "u" / "global_step2_universal" / "zero" / "l1.weight")
    path = tmp_path / "u" / "global_step2_universal" / "mp_rank_00_model_states.pt"
    model = torch.load(path, weights_only=True)
    del model["module"]["l1.weight"]
    torch.save(model, path)
    with pytest.raises(CheckpointError, match=r"weights of l1\.weight are not there.*l1\.weight/fp32\.pt is missing"):
        load_state_dict_from_checkpoint(tmp_path / "u")


def test_2_each_group_of_a_universal_stage_3_checkpoint_has_its_own_options():
    """DeepSpeed gives every group the options of the first."""
    assert [group["weight_decay"] for group in open_source(FIXTURES / "u_z3bf16").groups()] == [0.1, 0.0]


@pytest.mark.parametrize(("name", "stage"), [("z2bf16", 3), ("z3bf16", 2), ("z1fp32", 3), ("z3sub", 1)])
def test_3_universal_checkpoints_cross_between_stage_3_and_the_others(name, stage, tmp_path):
    """DeepSpeed finds no files. What its readers open at each stage is there, with everything."""
    convert_to_universal(FIXTURES / name, tmp_path / "u", stage=stage)
    head = "zero_pp_rank_0_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
    assert (tmp_path / "u" / head).is_file()
    stored = torch.load(tmp_path / "u" / "zero" / "l1.weight" / "fp32.pt", weights_only=True)
    assert isinstance(stored, torch.Tensor) == (stage == 3)
    before, after = open_source(FIXTURES / name), open_source(tmp_path / "u")
    for parameter, one in before.parameters.items():
        assert after.parameters[parameter] == one
        for state in before.states(parameter):
            if state != "param":
                assert torch.equal(before.tensor(parameter, state), after.tensor(parameter, state))
        assert {key: float(value) for key, value in before.scalars(parameter).items()} == {
            key: float(value) for key, value in after.scalars(parameter).items()
        }
    assert torch.equal(
        load_state_dict_from_checkpoint(tmp_path / "u")["frozen.weight"], load_state_dict_from_checkpoint(FIXTURES / name)["frozen.weight"]
    )
    assert before.groups() == after.groups() and torch.equal(after.buffers()["buf"], torch.arange(3.0))


@pytest.mark.parametrize("ranks", [1, 3, 4, 7])
def test_4_and_5_any_number_of_ranks_and_any_stage_find_their_intervals(ranks):
    """DeepSpeed refuses another number of ranks, and stage 3 what stage 2 wrote."""
    for name in ("z2bf16", "z3bf16", "z3sub", "z1fp32"):
        source = open_source(FIXTURES / name)
        for parameter, one in source.parameters.items():
            bounds = [one.numel * rank // ranks for rank in range(ranks + 1)]
            best = source.best_weight(parameter)
            parts = [source.read(parameter, best, start, stop) for start, stop in pairwise(bounds)]
            assert torch.equal(torch.cat(parts).view(one.shape), source.tensor(parameter, best))


def test_6_frozen_parameters_of_stage_1_are_not_dropped():
    state = get_fp32_state_dict_from_zero_checkpoint(FIXTURES / "z1fp32")
    saved = raw(FIXTURES / "z1fp32" / TAG / "mp_rank_00_model_states.pt")["module"]
    assert torch.equal(state["frozen.weight"], saved["frozen.weight"]) and set(state) == set(saved)


def test_7_files_of_the_bf16_optimizer_are_read():
    """DeepSpeed: "not a zero checkpoint"."""
    folder = WRITTEN / "z1_bf16_optimizer"
    assert "zero_stage" not in optimizer(folder / "global_step3", 0)
    state, by_hand = get_fp32_state_dict_from_zero_checkpoint(folder), flat_states(folder / "global_step3")
    assert all(torch.equal(state[name], states["fp32"]) for name, states in by_hand.items())


def test_8_pipelines_and_stage_0_are_read():
    """DeepSpeed: AttributeError, and a refusal."""
    state = get_fp32_state_dict_from_zero_checkpoint(FIXTURES / "pipe_fp32")
    assert all(torch.equal(state[name], states["fp32"]) for name, states in pipe_states(FIXTURES / "pipe_fp32" / TAG).items())
    plain = WRITTEN / "z0_fp32_sgd"
    saved = raw(plain / "global_step3" / "mp_rank_00_model_states.pt")["module"]
    state = get_fp32_state_dict_from_zero_checkpoint(plain)
    assert set(state) == set(saved) and all(torch.equal(state[name], tensor) for name, tensor in saved.items())


@pytest.mark.parametrize("name", ["z2bf16", "z3bf16"])
def test_9_frozen_parameters_come_in_fp32(name):
    state = get_fp32_state_dict_from_zero_checkpoint(FIXTURES / name)
    assert {name for name, tensor in state.items() if tensor.dtype != torch.float32} == set()
    assert get_fp32_state_dict_from_zero_checkpoint(FIXTURES / name, exclude_frozen_parameters=True).keys() == state.keys() - {
        "frozen.weight"
    }


@pytest.mark.parametrize("name", ["z1fp32", "z2bf16", "z3bf16", "u_z2bf16", "u_z3bf16"])
def test_10_the_client_state_is_what_the_script_saved(name):
    assert open_source(FIXTURES / name).client_state() == {"my_epoch": 3}


def test_11_round_robin_gradients_are_read_in_the_order_that_the_flat_tensor_has():
    """DeepSpeed's table of fragments, and so its converter, has the order without round robin: every weight comes out wrong."""
    folder = WRITTEN / "z2_fp32_round_robin"
    inner = optimizer(folder / "global_step3", 0)
    model = raw(folder / "global_step3" / "mp_rank_00_model_states.pt")
    address = inner["param_slice_mappings"][0]["l1.weight"]
    by_table = inner["single_partition_of_fp32_groups"][0][address.start : address.start + address.numel]
    assert not torch.equal(by_table, model["module"]["l1.weight"].flatten()[: address.numel])
    state = get_fp32_state_dict_from_zero_checkpoint(folder)
    assert all(torch.equal(state[name], tensor) for name, tensor in model["module"].items())


def test_12_experts_that_lie_on_several_ranks_are_converted_under_their_own_numbers(tmp_path):
    """DeepSpeed joins the first experts of all ranks into one: "shape is invalid"."""
    folder = WRITTEN / "m2_bf16_ep2"
    convert_to_universal(folder, tmp_path / "u")
    before, after = open_source(folder), open_source(tmp_path / "u")
    assert sum("deepspeed_experts" in name for name in after.parameters) == 16
    for name in before.parameters:
        assert all(torch.equal(before.tensor(name, state), after.tensor(name, state)) for state in ("fp32", "exp_avg", "exp_avg_sq"))
    assert [sorted(group["params"]) for group in before.groups()] == [sorted(group["params"]) for group in after.groups()]
