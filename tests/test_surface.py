"""What DeepSpeed scripts import or look up is there, or says why it is not."""

from __future__ import annotations

import argparse
import importlib
import logging
import subprocess
import sys

import pytest
import stateroom
import stateroom as deepspeed
import torch
from stateroom.errors import RankError
from stateroom.runtime.lr_schedules import VALID_LR_SCHEDULES, add_tuning_arguments, get_lr_from_config
from stateroom.utils import groups

NAMES = """initialize init_distributed zero comm __version__ DeepSpeedEngine add_config_arguments checkpointing get_accelerator OnDevice
DeepSpeedConfigError log_dist logger ops.adam.FusedAdam ops.adam.DeepSpeedCPUAdam ops.lion.DeepSpeedCPULion ops.lion.FusedLion
ops.adagrad.DeepSpeedCPUAdagrad ops.lamb.FusedLamb zero.Init zero.GatheredParameters zero.ZeroParamStatus zero.register_external_parameter
zero.estimate_zero2_model_states_mem_needs_all_live zero.estimate_zero3_model_states_mem_needs_all_cold utils.safe_get_full_fp32_param
utils.safe_set_full_grad utils.safe_get_local_optimizer_state utils.set_z3_leaf_modules utils.unset_z3_leaf_modules
utils.get_z3_leaf_modules utils.z3_leaf_module utils.RepeatingLoader utils.groups.get_data_parallel_group utils.logger utils.log_dist
utils.logging.logger runtime.zero.partition_parameters.ZeroParamStatus runtime.lr_schedules.WarmupDecayLR
runtime.zero.stage3.estimate_zero3_model_states_mem_needs_all_live runtime.utils.see_memory_usage runtime.utils.set_random_seed
runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs_all_cold checkpointing.configure checkpointing.checkpoint
comm.all_reduce comm.barrier comm.get_rank comm.get_local_rank comm.ReduceOp comm.new_group""".split()  # noqa: SIM905


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_found_by_attribute_and_by_import(name):
    value = deepspeed
    for part in name.split("."):
        value = getattr(value, part)
    module, _, attribute = name.rpartition(".")
    if module not in ("comm", ""):
        path = {"checkpointing": "stateroom.engine.checkpointing"}.get(module, f"stateroom.{module}")
        assert getattr(importlib.import_module(path), attribute) is value


@pytest.mark.parametrize(("name", "reason"), [("init_inference", "training engine"), ("moe", "experts")])
def test_what_is_not_there_says_why(name, reason):
    with pytest.raises(AttributeError, match=reason):
        getattr(stateroom, name)
    assert not hasattr(stateroom, name)


def test_initialize_is_the_function_whatever_was_imported_before():
    program = "import stateroom.engine.initialize as module, stateroom; assert stateroom.initialize is module.initialize"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_typo_is_an_ordinary_attribute_error():
    with pytest.raises(AttributeError, match=r"no attribute 'initialise'$"):
        stateroom.initialise  # noqa: B018


def test_the_schedule_arguments_have_deepspeeds_defaults():
    args = add_tuning_arguments(argparse.ArgumentParser()).parse_args(["--lr_schedule", "OneCycle", "--cycle_momentum"])
    assert args.lr_schedule == "OneCycle" and args.cycle_momentum and not args.lr_range_test_staircase
    assert (args.warmup_max_lr, args.warmup_num_steps, args.warmup_type) == (0.001, 1000, "log")
    assert (args.cycle_second_step_size, args.decay_step_size, args.cos_min_ratio) == (-1, 1000, 0.01)


def test_the_rate_of_a_scheduler_section():
    assert get_lr_from_config({"type": "WarmupDecayLR", "params": {"warmup_max_lr": 0.1}}) == (0.1, "")
    assert get_lr_from_config({"type": "OneCycle", "params": {"cycle_max_lr": 0.2}}) == (0.2, "")
    for section in ({}, {"type": "WarmupLR"}, {"type": "X", "params": {}}, {"type": "WarmupCosineLR", "params": {}}):
        rate, reason = get_lr_from_config(section)
        assert rate is None and reason
    assert len(VALID_LR_SCHEDULES) == 5


def test_groups_need_a_process_group_and_nothing_is_model_parallel():
    assert (groups.get_model_parallel_world_size(), groups.get_tensor_model_parallel_rank()) == (1, 0)
    with pytest.raises(AttributeError, match="no model-parallel group"):
        groups.get_model_parallel_group  # noqa: B018
    if not torch.distributed.is_initialized():
        with pytest.raises(RankError, match="init_distributed"):
            groups.get_data_parallel_group()


def read_groups():
    return groups.get_data_parallel_world_size(), groups._get_data_parallel_rank(), groups.get_data_parallel_group().size()


def test_all_ranks_are_data_parallel(pools):
    assert pools(2).run(read_groups) == [(2, 0, 2), (2, 1, 2)]


def say():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    stateroom.logger.addHandler(handler)
    for ranks in (None, [1], [-1], []):
        stateroom.log_dist(f"{ranks}", ranks=ranks)
    stateroom.logger.removeHandler(handler)
    return lines


def test_log_dist_speaks_from_the_given_ranks(pools):
    assert pools(2).run(say) == [["[Rank 0] None", "[Rank 0] [-1]"], ["[Rank 1] [1]", "[Rank 1] [-1]"]]


def ask_engine():
    config = {"train_batch_size": 2, "bf16": {"enabled": True}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = stateroom.initialize(torch.nn.Linear(2, 2), config=config)
    found = (engine.get_data_parallel_rank(), engine.get_model_parallel_rank(), engine.communication_data_type, engine.get_type())
    engine.destroy()
    return found


def test_the_engine_answers_about_ranks_and_dtypes(pools):
    assert pools(2).run(ask_engine) == [(rank, 0, torch.float32, [0.0]) for rank in (0, 1)]
