"""The word "auto" becomes a value for every key, from facts where there are any, and a note says which."""

from __future__ import annotations

from typing import Any

import pytest
from config_inventory import keys, nest
from stateroom.config_schemas import Facts, load
from stateroom.config_schemas.draft import walk
from stateroom.errors import ConfigError

BATCH = {"train_batch_size": 8}
# "auto" is a value of its own here: the part that uses the key decides
NATIVE = {
    "pipeline.split",
    "units.min_numel",
    "data_types.keep_in_fp32_modules",
    "zero_optimization.zenflow.select_strategy",
    "zero_optimization.zenflow.select_interval",
    "zero_optimization.zenflow.update_interval",
}
# free text or free parameters
OPEN = {"optimizer.params", "scheduler.params"}


@pytest.mark.parametrize("path", keys())
def test_auto_never_stays_a_string(path: str) -> None:
    config = load({**BATCH, **nest(path, "auto")}, dp_world=2)
    left = {".".join(map(str, place)) for place, value in walk(config.to_dict()) if value == "auto"}
    assert left <= NATIVE
    assert any(note.kind == "auto" and note.path == path for note in config.notes)


@pytest.mark.parametrize(
    ("path", "facts", "value"),
    [
        ("gradient_clipping", Facts(), 1.0),
        ("zero_optimization.stage", Facts(), 0),
        ("bf16.enabled", Facts(), False),
        ("bf16.enabled", Facts(param_dtype="bf16"), True),
        ("bf16.enabled", Facts(param_dtype="fp32"), False),
        ("bf16.enabled", Facts(param_dtype="fp16"), False),
        ("fp16.enabled", Facts(param_dtype="fp16"), True),
        ("zero_optimization.reduce_bucket_size", Facts(hidden_size=100), 10_000),
        ("zero_optimization.stage3_prefetch_bucket_size", Facts(hidden_size=100), 9_000),
        ("zero_optimization.stage3_param_persistence_threshold", Facts(hidden_size=100), 1_000),
        ("zero_optimization.stage3_param_persistence_threshold", Facts(), 100_000),
        ("train_micro_batch_size_per_gpu", Facts(), 4),
        ("pipeline.stages", Facts(), 1),
    ],
)
def test_auto_value(path: str, facts: Facts, value: Any) -> None:
    config = load({**BATCH, **nest(path, "auto")}, dp_world=2, facts=facts)
    found: Any = config.to_dict()
    for part in path.split("."):
        found = found[part]
    assert found == value
    assert config.origin[path] == "auto"


def test_auto_precision_gives_way_to_the_one_that_is_set() -> None:
    config = load({**BATCH, "fp16": {"enabled": True}, "bf16": {"enabled": "auto"}}, dp_world=1, facts=Facts(param_dtype="bf16"))
    assert config.fp16.enabled and not config.bf16.enabled


def test_auto_optimizer_parameters_are_left_to_the_optimizer() -> None:
    params = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": 0.1}
    config = load({**BATCH, "optimizer": {"type": "AdamW", "params": params}}, dp_world=1)
    assert config.optimizer is not None and config.optimizer.params == {"weight_decay": 0.1}
    known = load({**BATCH, "optimizer": {"type": "AdamW", "params": params}}, dp_world=1, facts=Facts(optimizer_lr=3e-4))
    assert known.optimizer is not None and known.optimizer.params == {"lr": 3e-4, "weight_decay": 0.1}


def schedule(config: dict[str, Any], facts: Facts | None) -> dict[str, Any]:
    loaded = load({**BATCH, **config}, dp_world=1, facts=facts)
    assert loaded.scheduler is not None
    return loaded.scheduler.params


AUTO_SCHEDULE = {
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": "auto", "warmup_num_steps": "auto", "warmup_max_lr": "auto", "warmup_min_lr": "auto"},
    }
}


def test_auto_schedule_from_facts_and_from_the_optimizer() -> None:
    adam = {"optimizer": {"type": "Adam", "params": {"lr": 0.5}}}
    params = schedule({**AUTO_SCHEDULE, **adam}, Facts(total_steps=2000))
    assert params == {"total_num_steps": 2000, "warmup_num_steps": 60, "warmup_max_lr": 0.5, "warmup_min_lr": 0.0, "warmup_type": "log"}


def test_auto_schedule_without_facts_waits_for_the_run() -> None:
    params = schedule(AUTO_SCHEDULE, None)
    assert (params["total_num_steps"], params["warmup_num_steps"], params["warmup_max_lr"]) == (None, 1000, None)


def test_run_whose_length_is_unknown_is_refused_before_it_starts() -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.params\.total_num_steps: the number of steps of the run is not known"):
        load({**BATCH, **AUTO_SCHEDULE}, dp_world=1, facts=Facts())


@pytest.mark.parametrize(
    ("train", "micro", "steps", "facts", "expected"),
    [
        ("auto", "auto", "auto", Facts(), (2, 1, 1)),
        ("auto", "auto", "auto", Facts(micro_batch=3, gradient_accumulation_steps=4), (24, 3, 4)),
        ("auto", 4, "auto", Facts(), (8, 4, 1)),
        ("auto", "auto", 5, Facts(), (10, 1, 5)),
        (16, "auto", "auto", Facts(), (16, 8, 1)),
        (16, "auto", "auto", Facts(micro_batch=2), (16, 2, 4)),
        (16, 2, "auto", Facts(gradient_accumulation_steps=99), (16, 2, 4)),
        ("auto", 4, 3, Facts(micro_batch=7), (24, 4, 3)),
    ],
)
def test_auto_batch(train: Any, micro: Any, steps: Any, facts: Facts, expected: tuple[int, int, int]) -> None:
    config = load(
        {"train_batch_size": train, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}, dp_world=2, facts=facts
    )
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == expected
    for name, value in zip(("train_batch_size", "train_micro_batch_size_per_gpu"), (train, micro), strict=True):
        assert config.origin[name] == ("auto" if value == "auto" else "config")


def test_auto_does_not_make_an_unknown_key_known() -> None:
    with pytest.raises(ConfigError, match="gradient_cliping"):
        load({**BATCH, "gradient_cliping": "auto"}, dp_world=1)
    with pytest.raises(ConfigError, match=r"scheduler\.params\.warmup_stepz"):
        load({**BATCH, "scheduler": {"type": "WarmupLR", "params": {"warmup_stepz": "auto"}}}, dp_world=1)


def test_auto_in_a_removed_block_is_off() -> None:
    load({**BATCH, "amp": {"enabled": "auto", "opt_level": "auto"}}, dp_world=1)
