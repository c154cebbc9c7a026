"""Each schedule gives DeepSpeed's rate, and momentum, before the first step, at every step and after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stateroom.engine.optim.curves import CycleShape
from stateroom.engine.schedules import VALID_LR_SCHEDULES, WarmupLR, build_scheduler
from stateroom.errors import ConfigError

GOLDEN = json.loads((Path(__file__).parent / "golden" / "schedules.json").read_text())["cases"]
TOLERANCE = 1e-12


def make_optimizer(case: dict[str, Any]) -> Any:
    """Not a torch optimizer: schedulers may rely on `param_groups` only."""
    options = {"betas": (0.9, 0.999)} if case["optimizer"] != "SGD" else {}
    return SimpleNamespace(param_groups=[{"lr": 0.01 * (i + 1), **options} for i in range(case["groups"])])


def assert_at(case: dict[str, Any], optimizer: Any, step: int) -> None:
    for key in ("lr", "betas"):
        if key in case:
            for group, value in zip(optimizer.param_groups, case[key][step], strict=True):
                expected = tuple(value) if key == "betas" else value
                assert group[key] == pytest.approx(expected, rel=0, abs=TOLERANCE), (case["params"], step)


@pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
def test_rates_equal_deepspeed_before_and_after_every_step(name: str) -> None:
    cases = [case for case in GOLDEN if case["name"] == name]
    assert len(cases) >= 5
    for case in cases:
        optimizer = make_optimizer(case)
        scheduler = build_scheduler(name, case["params"], optimizer)
        assert_at(case, optimizer, 0)
        assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
        for step in range(1, len(case["lr"])):
            scheduler.step()
            assert_at(case, optimizer, step)
            assert scheduler.get_lr() == scheduler.get_last_lr()


@pytest.mark.parametrize("cut", [0, 1, 9, 20])
def test_resume_sets_the_saved_rate_at_once_and_goes_on(cut: int) -> None:
    for case in GOLDEN[::3]:
        optimizer = make_optimizer(case)
        first = build_scheduler(case["name"], case["params"], optimizer)
        for _ in range(cut):
            first.step()
        assert first.state_dict() == {"last_batch_iteration": cut - 1}
        optimizer = make_optimizer(case)  # as after a restart that did not load optimizer states
        resumed = build_scheduler(case["name"], case["params"], optimizer)
        resumed.load_state_dict(first.state_dict())
        assert_at(case, optimizer, cut)
        for step in range(cut + 1, len(case["lr"])):
            resumed.step()
            assert_at(case, optimizer, step)


def test_step_can_jump_to_a_given_iteration() -> None:
    for case in GOLDEN[::7]:
        optimizer = make_optimizer(case)
        scheduler = build_scheduler(case["name"], case["params"], optimizer)
        for step in (5, 30, 2):
            scheduler.step(step - 1)
            assert_at(case, optimizer, step)


def test_linear_warmup_hand_trace() -> None:
    optimizer = SimpleNamespace(param_groups=[{"lr": 7.0}])
    scheduler = WarmupLR(optimizer, 0.1, 0.5, 4, "linear")
    seen = [optimizer.param_groups[0]["lr"]]
    for _ in range(6):
        scheduler.step()
        seen.append(optimizer.param_groups[0]["lr"])
    assert seen == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5], abs=TOLERANCE)


def test_a_scheduler_built_in_the_middle_leaves_rates_until_its_step() -> None:
    optimizer = SimpleNamespace(param_groups=[{"lr": 7.0}])
    scheduler = WarmupLR(optimizer, 0.0, 1.0, 10, "linear", last_batch_iteration=4)
    assert scheduler.get_last_lr() == [7.0]
    scheduler.step()
    assert scheduler.get_last_lr() == [0.5]


def test_a_tensor_rate_is_filled_in_place_and_not_aliased() -> None:
    rate = torch.tensor(0.5, dtype=torch.float64)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=rate)
    scheduler = build_scheduler("WarmupLR", {"warmup_num_steps": 2, "warmup_type": "linear"}, optimizer)
    assert rate.item() == 0
    scheduler.step(), scheduler.step(), scheduler.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5


def test_cycle_peaks_exactly_at_the_end_of_its_rise() -> None:
    for rise in range(1, 40):
        for fall in (1, 3, 7):
            for stairs in (0, 3, 4):
                shape = CycleShape(float(rise), float(fall), stairs, stairs)
                assert shape.height(rise - 1) == pytest.approx(1.0, abs=TOLERANCE)
                assert shape.height(-1) == 0.0


def test_torch_schedulers_are_built_by_their_class_name() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = build_scheduler("StepLR", {"step_size": 2, "gamma": 0.1}, optimizer)
    assert type(scheduler) is torch.optim.lr_scheduler.StepLR
    assert type(build_scheduler("warmuplr", {}, optimizer)) is WarmupLR


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("WarmpLR", {}, "did you mean 'WarmupLR'"),
        ("steplr", {"step_size": 1}, "did you mean 'StepLR'"),
        ("Optimizer", {}, "is not one of"),
        ("LRScheduler", {}, "is not one of"),
        ("ReduceLROnPlateau", {}, "metric"),
        ("WarmupLR", {"warmup_max_lrr": 1}, r"scheduler.params.warmup_max_lrr: unknown parameter; did you mean 'warmup_max_lr'"),
        ("WarmupDecayLR", {}, "scheduler.params.total_num_steps: required"),
        ("WarmupLR", {"warmup_num_steps": 0}, "positive integer, got 0"),
        ("WarmupLR", {"warmup_num_steps": 2.5}, "positive integer, got 2.5"),
        ("WarmupLR", {"warmup_type": "cubic"}, "'cubic' is not"),
        ("WarmupLR", {"warmup_max_lr": [1, 2]}, "2 values for 1 parameter groups"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0}, "must be positive"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "positive integer"),
        ("StepLR", {"step_sise": 2}, "did you mean 'step_size'"),
        ("CyclicLR", {"base_lr": 0.1, "max_lr": 1.0, "mode": "no"}, "scheduler CyclicLR: mode is invalid"),
    ],
)
def test_what_makes_no_schedule_is_refused_with_the_way_out(name: str, params: dict[str, Any], message: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0, momentum=0.5)
    with pytest.raises(ConfigError, match=message):
        build_scheduler(name, params, optimizer)


def test_integral_floats_pass_and_foreign_objects_do_not() -> None:
    optimizer = SimpleNamespace(param_groups=[{"lr": 7.0}])
    assert WarmupLR(optimizer, warmup_num_steps=5.0).warmup_num_steps == 5
    with pytest.raises(TypeError, match="param_groups"):
        WarmupLR(object())
