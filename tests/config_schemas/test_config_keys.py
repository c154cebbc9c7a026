"""Every key of the inventory is known, has its default, and carries a verdict; removed and renamed keys are dealt with."""

from __future__ import annotations

import math
from typing import Any

import pytest
from config_inventory import DEAD, DEFAULTS, DEPRECATED, SCHEDULES, keys, nest
from stateroom.config_schemas import load
from stateroom.config_schemas.draft import walk
from stateroom.config_schemas.optim import KNOWN_PARAMS
from stateroom.config_schemas.schedule import KNOWN_SCHEDULES
from stateroom.config_schemas.tree import find, keys_of, known_keys
from stateroom.errors import ConfigError

BATCH = {"train_batch_size": 8}


def value_at(config: Any, path: str) -> Any:
    value = config.to_dict()
    for part in path.split("."):
        value = value[part]
    return value


@pytest.mark.parametrize("path", keys())
def test_key_is_known_and_described(path: str) -> None:
    parts: tuple[Any, ...] = tuple(int(part) if part.isdigit() else part for part in path.split("."))
    field = find(parts)
    assert field is not None
    assert field.description and field.description.endswith(".")


def test_nothing_is_known_that_the_inventory_does_not_list() -> None:
    listed = {tuple("*" if part in ("0", "any") else part for part in path.split(".")) for path in keys()}
    assert [known.path for known in known_keys() if known.path not in listed] == []


def test_every_key_has_exactly_one_kind_of_verdict() -> None:
    for known in known_keys():
        kinds = [known.effect == "honoured", known.effect.startswith("no effect here because "), known.effect.startswith("no effect yet: ")]
        assert sum(kinds) == 1, known.path
        assert not (known.alters and known.effect == "honoured"), known.path


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_has_its_parameters(name: str) -> None:
    assert set(keys_of(KNOWN_SCHEDULES[name])) == set(SCHEDULES[name].split())


@pytest.mark.parametrize("name", ["lr", "betas", "eps", "weight_decay", "bias_correction", "torch_adam", "adam_w_mode", "amsgrad"])
def test_adam_takes_the_parameters_that_configs_use(name: str) -> None:
    assert name in KNOWN_PARAMS["adam"] and name in KNOWN_PARAMS["adamw"]


@pytest.mark.parametrize("path", DEFAULTS)
def test_default(path: str) -> None:
    config = load(BATCH, dp_world=1)
    assert value_at(config, path) == DEFAULTS[path]
    assert config.origin[path] == "default"


def test_overlap_comm_is_on_by_default_only_in_stage_3() -> None:
    for stage in range(4):
        assert load({**BATCH, "zero_optimization": {"stage": stage}}, dp_world=1).zero_optimization.overlap_comm is (stage == 3)
    assert load({**BATCH, "zero_optimization": {"stage": 3, "overlap_comm": False}}, dp_world=1).zero_optimization.overlap_comm is False


@pytest.mark.parametrize("path", DEAD)
def test_removed_feature_is_refused_when_on(path: str) -> None:
    with pytest.raises(ConfigError, match=r"this feature is gone: \w+") as caught:
        load({**BATCH, **nest(path, DEAD[path][0])}, dp_world=1)
    assert path in str(caught.value)


@pytest.mark.parametrize("path", DEAD)
@pytest.mark.parametrize("off", [None, {}, False])
def test_removed_feature_passes_with_a_note_when_off(path: str, off: Any) -> None:
    for value in (off, DEAD[path][1]):
        config = load({**BATCH, **nest(path, value)}, dp_world=1)
        assert [(note.path, note.kind) for note in config.notes if note.kind != "derived"] == [(path, "ignored_block")]
        assert any(verdict.path == path and verdict.verdict == "no effect here" for verdict in config.verdicts())


@pytest.mark.parametrize("old", DEPRECATED)
def test_old_spelling_is_mapped_and_named(old: str) -> None:
    value, present, expected = DEPRECATED[old]
    config = load({**BATCH, **nest(old, value)}, dp_world=1)
    assert value_at(config, present) == expected
    assert any(old.startswith(note.path) and note.kind in ("deprecated", "derived") for note in config.notes)
    assert config.origin[present] == "config"


def test_old_and_new_spelling_that_disagree_are_refused() -> None:
    zero = {"max_live_parameters": 5, "stage3_max_live_parameters": 6}
    with pytest.raises(ConfigError, match=r"max_live_parameters.*keep only zero_optimization.stage3_max_live_parameters"):
        load({**BATCH, "zero_optimization": zero}, dp_world=1)
    same = load({**BATCH, "zero_optimization": {**zero, "max_live_parameters": 6}}, dp_world=1)
    assert same.zero_optimization.stage3_max_live_parameters == 6


def test_pinning_follows_the_old_offload_switch() -> None:
    zero = {"stage": 2, "cpu_offload": True, "cpu_offload_use_pin_memory": False}
    offload = load({**BATCH, "zero_optimization": zero}, dp_world=1).zero_optimization.offload_optimizer
    assert (offload.device, offload.pin_memory) == ("cpu", False)


def test_bool_zero_optimization_false_is_stage_0() -> None:
    assert load({**BATCH, "zero_optimization": False}, dp_world=1).zero_optimization.stage == 0


def test_infinite_steps_per_print_means_never() -> None:
    assert load({**BATCH, "steps_per_print": math.inf}, dp_world=1).steps_per_print is None
    assert load('{"train_batch_size": 8, "steps_per_print": Infinity\n}', dp_world=1).steps_per_print is None


@pytest.mark.parametrize("name", ["OneBitAdam", "ZeroOneAdam", "onebitlamb"])
def test_removed_optimizers_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"optimizer.type: {name} is gone; use (AdamW|Lamb)"):
        load({**BATCH, "optimizer": {"type": name}}, dp_world=1)


def test_unknown_optimizers_and_schedules_are_left_to_the_engine() -> None:
    config = load(
        {
            **BATCH,
            "optimizer": {"type": "RMSprop", "params": {"lr": 0.1, "alpha": 0.9}},
            "scheduler": {"type": "StepLR", "params": {"step_size": 3}},
        },
        dp_world=1,
    )
    assert config.optimizer is not None and config.optimizer.params == {"lr": 0.1, "alpha": 0.9}
    assert config.scheduler is not None and config.scheduler.params == {"step_size": 3}


def test_absent_optimizer_and_scheduler_are_none() -> None:
    config = load(BATCH, dp_world=1)
    assert config.optimizer is None and config.scheduler is None


def test_known_schedule_gets_its_defaults_marked_as_defaults() -> None:
    config = load({**BATCH, "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 50}}}, dp_world=1)
    assert config.scheduler is not None
    assert config.scheduler.params == {
        "total_num_steps": 50,
        "warmup_min_ratio": 0.0,
        "warmup_num_steps": 1000,
        "cos_min_ratio": 1e-4,
        "warmup_type": "log",
    }
    assert config.origin["scheduler.params.warmup_type"] == "default"
    assert config.origin["scheduler.params.total_num_steps"] == "config"


def test_origin_covers_every_value() -> None:
    config = load(BATCH, dp_world=1)
    assert set(config.origin) == {".".join(map(str, path)) for path, _ in walk(config.to_dict())}
    assert (config.origin["train_batch_size"], config.origin["gradient_accumulation_steps"]) == ("config", "derived")
