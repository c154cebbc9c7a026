"""What a config may not say: each problem is named with its full path, its line, what was expected, and all at once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from config_inventory import keys, nest
from hypothesis import given, settings
from hypothesis import strategies as st
from stateroom.config_schemas import load
from stateroom.errors import ConfigError

BATCH = {"train_batch_size": 8}


def problems(extra: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load({**BATCH, **extra}, dp_world=1)
    return [line.strip() for line in str(caught.value).splitlines()][1:]


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("gradient_cliping", "gradient_clipping"),
        ("zero_optimisation", "zero_optimization"),
        ("train-batch-size", "train_batch_size"),
        ("stage", "zero_optimization.stage"),
        ("lr", "optimizer.params.lr"),
        ("zero_optimization.reduce_bucket_sise", "zero_optimization.reduce_bucket_size"),
        ("zero_optimization.warmup_type", "scheduler.params.warmup_type"),
        ("aio.block_sise", "aio.block_size"),
        ("flops_profiler.profile_steps", "flops_profiler.profile_step"),
        ("checkpoint.tag_validaton", "checkpoint.tag_validation"),
        ("pipeline.stage_count", "known keys here: stages"),
        ("data_types.grad_dtype", "data_types.grad_accum_dtype"),
        ("activation_checkpointing.policies", "activation_checkpointing.policy"),
        ("zero_optimization.offload_param.devise", "zero_optimization.offload_param.device"),
        ("fp16.enable", "fp16.enabled"),
        ("data_efficiency.data_sampling.curriculum_learning.enable", "data_efficiency.data_sampling.curriculum_learning.enabled"),
        (
            "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.seqlen.min_dificulty",
            "curriculum_metrics.seqlen.min_difficulty",
        ),
        (
            "tensor_parallel.partition_config.layer_specs.0.partition_tipe",
            "tensor_parallel.partition_config.layer_specs.0.partition_type",
        ),
    ],
)
def test_unknown_key_is_named_with_the_nearest(path: str, nearest: str) -> None:
    (line,) = problems(nest(path, 1))
    assert line.startswith(f"{path}: unknown key") and nearest in line


@pytest.mark.parametrize(("kind", "params"), [("WarmupLR", {}), ("WarmupDecayLR", {"total_num_steps": 9}), ("LRRangeTest", {})])
def test_unknown_schedule_parameter(kind: str, params: dict[str, Any]) -> None:
    (line,) = problems({"scheduler": {"type": kind, "params": {**params, "warmup_num_stepz": 3}}})
    assert line.startswith("scheduler.params.warmup_num_stepz: unknown key")


def test_misspelt_parameter_of_a_known_optimizer() -> None:
    (line,) = problems({"optimizer": {"type": "adamw", "params": {"weight_decy": 0.1}}})
    assert "optimizer.params.weight_decay" in line


def test_schedule_without_its_steps() -> None:
    (line,) = problems({"scheduler": {"type": "WarmupDecayLR", "params": {}}})
    assert line.startswith("scheduler.params.total_num_steps: required by WarmupDecayLR")


@pytest.mark.parametrize("value", ["yes", "true", 1, 0, "1", None, [], 1.0])
@pytest.mark.parametrize("path", ["fp16.enabled", "zero_optimization.contiguous_gradients", "wall_clock_breakdown", "tensorboard.enabled"])
def test_only_true_and_false_are_booleans(path: str, value: Any) -> None:
    (line,) = problems(nest(path, value))
    assert line == f"{path}: expected true or false, got {json.dumps(value)}"


@pytest.mark.parametrize(
    ("value", "number"),
    [(5e8, 500_000_000), ("5e8", 500_000_000), (" 12 ", 12), ("7", 7), (7.0, 7), (2**62 + 1, 2**62 + 1), (str(2**62 + 1), 2**62 + 1)],
)
def test_integral_floats_and_numeric_strings_are_integers(value: Any, number: int) -> None:
    loaded = load({**BATCH, "zero_optimization": {"reduce_bucket_size": value}}, dp_world=1).zero_optimization.reduce_bucket_size
    assert loaded == number and type(loaded) is int


@pytest.mark.parametrize("value", ["8x", "", "0x10", "1_000", 1.5, "1.5", True, None, [1], {"a": 1}, float("nan"), float("inf")])
def test_what_is_no_integer(value: Any) -> None:
    (line,) = problems({"zero_optimization": {"reduce_bucket_size": value}})
    assert line.startswith("zero_optimization.reduce_bucket_size: expected an integer")


@pytest.mark.parametrize(
    ("path", "value", "wanted"),
    [
        ("zero_optimization.stage", 4, "at most 3"),
        ("zero_optimization.stage", -1, "at least 0"),
        ("scheduler", {"type": "WarmupLR", "params": 3}, "an object"),
        ("zero_optimization.zenflow.topk_ratio", 1.0, "below 1"),
        ("zero_optimization.offload_optimizer.device", "gpu", "'none', 'cpu' or 'nvme'"),
        ("communication_data_type", "int8", "fp32, fp16, bf16"),
        ("gradient_allreduce_op", "max", "'mean' or 'sum'"),
        ("zero_optimization", 3, "an object"),
        ("fp16", [], "an object"),
        ("optimizer.params", 3, "an object"),
        ("run_dir", 5, "a string"),
        ("units.classes", "Block", "a list"),
        ("optimizer.params.lr", "fast", "a number"),
        ("optimizer.params.betas", 0.9, "a list of at least two numbers"),
        ("mesh.tp", 0, "at least 1"),
        ("gradient_clipping", 10**400, "finite"),
        ("zero_optimization.stage3_prefetch_bucket_size", 15099494.4, "an integer"),
    ],
)
def test_wrong_value_says_what_was_expected(path: str, value: Any, wanted: str) -> None:
    (line,) = problems(nest(path, value))
    assert line.startswith(path) and ": expected" in line and wanted in line and ", got " in line


@pytest.mark.parametrize(
    ("written", "meant"),
    [("float32", "fp32"), ("half", "fp16"), ("float16", "fp16"), ("bfloat16", "bf16"), ("torch.bfloat16", "bf16"), ("BF16", "bf16")],
)
def test_dtype_spellings(written: str, meant: str) -> None:
    assert load({**BATCH, "communication_data_type": written}, dp_world=1).communication_data_type == meant


def test_both_precisions_are_refused_by_name() -> None:
    (line,) = problems({"fp16": {"enabled": True}, "bf16": {"enabled": True}})
    assert "fp16.enabled and bf16.enabled are both true" in line


def test_foreign_keys_in_a_block_that_is_off_are_accepted_and_named() -> None:
    config = load({**BATCH, "fp16": {"enabled": False, "min_loss_scale": 0.5, "opt_level": "O1"}, "bf16": {"loss_scale": 0}}, dp_world=1)
    assert [note.path for note in config.notes if note.kind == "ignored_block"] == [
        "fp16.min_loss_scale",
        "fp16.opt_level",
        "bf16.loss_scale",
    ]
    assert config.fp16.min_loss_scale == 1


def test_foreign_keys_in_a_block_that_is_on_are_explained() -> None:
    assert problems({"bf16": {"enabled": True, "loss_scale": 0}}) == ["bf16.loss_scale: bf16 needs no loss scale; remove bf16.loss_scale"]
    assert problems({"fp16": {"enabled": True, "min_loss_scale": 0.5}}) == ["fp16.min_loss_scale: expected an integer, got 0.5"]
    assert problems({"fp16": {"enabled": True, "loss_scale_window": 0}}) == ["fp16.loss_scale_window: expected a number above 0, got 0"]
    assert "bf16 or fp16" in problems({"torch_autocast": {"enabled": True, "dtype": "fp32"}})[0]
    assert "an option of Apex" in problems({"fp16": {"enabled": True, "opt_level": "O2"}})[0]


def test_misspelt_switch_does_not_hide_in_a_block_that_is_off() -> None:
    assert problems({"bf16": {"enabeld": True}}) == ["bf16.enabeld: unknown key; nearest known key: bf16.enabled"]
    assert problems({"bf16": {"enabled": "yes"}}) == ['bf16.enabled: expected true or false, got "yes"']


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "needs bf16.bf16_master_weights_and_grads"),
        ({"data_types": {"param_dtype": "bf16"}}, "make the weights fp32"),
        ({"data_parallel_size": 2}, "sequence_parallel_size"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "zero_optimization.offload_param.nvme_path: required"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, "needs stage 3"),
        ({"mesh": {"pp": 2}, "pipeline": {"stages": 4}}, "mesh.pp 2 and pipeline.stages 4 disagree"),
        ({"mesh": {"dp_shard": 4}}, "must be the 1 data-parallel ranks"),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}, "use gradient_clipping"),
        ({"scheduler": {"type": "warmuplr"}}, "write WarmupLR"),
        ({"compile": {"disable": "no"}}, "compile.disable"),
    ],
)
def test_rules_between_keys(extra: dict[str, Any], text: str) -> None:
    assert any(text in line for line in problems(extra))


def test_all_problems_are_in_one_report_in_the_order_of_the_file(tmp_path: Any) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        '{\n"train_batch_size": 7,\n"train_micro_batch_size_per_gpu": 2,\n"amp": {"enabled": true},\n"fp16": {"enabled": "on"},\n'
        '"zero_optimization": {\n  "stage": 9,\n  "stag": 1},\n"optimizer": {"type": "Adam", "params": {"lr": "x"}},\n'
        '"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}},\n"foo": 1\n}'
    )
    with pytest.raises(ConfigError) as caught:
        load(path, dp_world=2)
    heading, *lines = str(caught.value).splitlines()
    assert heading == f"{path}: 8 problems, all 8 in one report"
    places = ["train_batch_size (line 2)", "amp (line 4)", "fp16.enabled (line 5)", "zero_optimization.stage (line 7)"]
    places += [
        "zero_optimization.stag (line 8)",
        "optimizer.params.lr (line 9)",
        "scheduler.params.warmup_num_steps (line 10)",
        "foo (line 11)",
    ]
    assert [line.strip().split(":")[0] for line in lines] == places


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 2**70)
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["auto", "cpu", "none", "fp16"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=300, deadline=None)
@given(path=st.sampled_from(keys()), value=JSON_VALUES)
def test_any_value_at_any_key_loads_or_is_refused_under_that_key(path: str, value: Any) -> None:
    try:
        config = load({**BATCH, **nest(path, value)}, dp_world=1)
    except ConfigError as error:
        assert path.rsplit(".", 1)[0].split(".")[0] in str(error)
    else:
        assert load(config.to_dict(), dp_world=1).to_dict() == config.to_dict()


@settings(max_examples=60, deadline=None)
@given(name=st.text(min_size=1, max_size=12).filter(lambda name: name not in keys()), section=st.sampled_from(["", "aio.", "checkpoint."]))
def test_any_unknown_name_is_refused(name: str, section: str) -> None:
    tree: dict[str, Any] = {name: 1} if not section else {section[:-1]: {name: 1}}
    if f"{section}{name}" not in keys():
        lines = problems(tree)
        assert lines
