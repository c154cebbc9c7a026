"""The loss scale follows DeepSpeed's step for step, says when it is at its end, and survives a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from stateroom.engine.loss_scale import HISTORY_LENGTH, DynamicLossScale, StaticLossScale

GOLDEN = json.loads((Path(__file__).parent / "golden" / "loss_scales.json").read_text())["cases"]


def test_scale_and_minimum_equal_deepspeed_at_every_step() -> None:
    assert len(GOLDEN) == 72
    for case in GOLDEN:
        scaler = DynamicLossScale(**case["settings"])
        for overflow, scale, fatal in zip(case["overflows"], case["scales"], case["fatal"], strict=True):
            assert scaler.at_minimum is fatal, case["settings"]
            scaler.update(overflow)
            assert scaler.scale == scale, case["settings"]


def test_golden_data_reaches_the_minimum_and_growth() -> None:
    assert any(any(case["fatal"]) for case in GOLDEN)
    assert any(case["scales"][-1] > 2 ** case["settings"]["initial_scale_power"] for case in GOLDEN)


def test_hand_trace_of_three_overflows_with_window_two() -> None:
    scaler = DynamicLossScale(initial_scale_power=4, window=2, hysteresis=2)
    scales = []
    for step in range(8):
        scaler.update(step in (1, 2, 3))
        scales.append(scaler.scale)
    assert scales == [16, 16, 8, 4, 4, 4, 8, 8]
    assert scaler.history == [(0, 16.0), (3, 8.0), (4, 4.0), (7, 8.0)]


@pytest.mark.parametrize("cut", [0, 1, 17, 40])
def test_resume_in_the_middle_gives_the_same_tail(cut: int) -> None:
    for case in GOLDEN[::5]:
        first = DynamicLossScale(**case["settings"])
        for overflow in case["overflows"][:cut]:
            first.update(overflow)
        state = json.loads(json.dumps(first.state_dict()))
        resumed = DynamicLossScale(**case["settings"])
        resumed.load_state_dict(state)
        assert resumed.history == first.history
        tail = []
        for overflow in case["overflows"][cut:]:
            resumed.update(overflow)
            tail.append(resumed.scale)
        assert tail == case["scales"][cut:]


def test_overflow_at_every_step_ends_at_the_minimum_with_its_history() -> None:
    scaler = DynamicLossScale(initial_scale_power=3, hysteresis=1, min_scale=2)
    seen = []
    while not scaler.at_minimum:
        scaler.update(True)
        seen.append(scaler.scale)
    assert seen == [4, 2]
    assert scaler.history == [(0, 8.0), (1, 4.0), (2, 2.0)]
    scaler.update(True)
    assert scaler.scale == 2 and scaler.at_minimum


def test_history_is_bounded_and_keeps_the_latest() -> None:
    scaler = DynamicLossScale(initial_scale_power=0, window=1, min_scale=1)
    for _ in range(HISTORY_LENGTH + 20):
        scaler.update(False)
    assert len(scaler.history) == HISTORY_LENGTH
    assert scaler.history[-1] == (HISTORY_LENGTH + 20, scaler.scale)


def test_static_scale_ignores_overflows_and_saved_scales() -> None:
    scaler = StaticLossScale(128)
    scaler.update(True)
    scaler.load_state_dict(DynamicLossScale().state_dict())
    assert (scaler.scale, scaler.at_minimum, scaler.dynamic) == (128.0, False, False)
    dynamic = DynamicLossScale(initial_scale_power=5)
    dynamic.load_state_dict(scaler.state_dict())
    assert dynamic.scale == 32


@pytest.mark.parametrize("bad", [{"window": 0}, {"min_scale": 0}])
def test_settings_that_cannot_work_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="got 0"):
        DynamicLossScale(**bad)
    with pytest.raises(ValueError, match="positive"):
        StaticLossScale(0)
