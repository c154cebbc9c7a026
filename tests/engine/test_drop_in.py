"""A script written for DeepSpeed runs with one line changed, at every ZeRO stage."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from drop_in import LR, STEPS, changed, config_for, run


def check(found: dict[str, Any]) -> None:
    losses = found["losses"]
    assert len(losses) == STEPS and losses[-1] < 0.8 * losses[0] and found["at_end"] < found["at_save"] < losses[0]
    assert found["after_load"] == found["at_save"] and found["after_load"] != found["at_end"]
    assert found["index"] == 2 * 6 - 1 and found["steps_after_load"] == 6 and found["is_engine"]
    assert all(norm > 0 for norm in found["norms"])


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 1, 2)), 3])
def test_the_script_runs_with_one_line_changed(tmp_path: Path, stage: int) -> None:
    found, printed = run(tmp_path, changed(), config_for(stage, bf16={"enabled": True}))
    check(found)
    assert "step 4 | loss" in printed and "step 12 | loss" in printed and "local rank 1, cpu" in printed
    assert found["lrs"][:4] == pytest.approx([0, LR / 3, 2 * LR / 3, LR]) and all(a > b for a, b in pairwise(found["lrs"][3:]))
    assert found["inside"]["gathered"] == pytest.approx(found["inside"]["master"], abs=0.5)


def test_fp16_checkpointed_activations_and_the_scripts_own_fused_adam(tmp_path: Path) -> None:
    config = config_for(3, fp16={"enabled": True, "initial_scale_power": 8}, activation_checkpointing={"partition_activations": True})
    del config["optimizer"], config["scheduler"]
    found, printed = run(tmp_path, changed(), config, "--fused_adam", "--checkpoint_activations")
    check(found)
    assert "without effect here: partition_activations" in printed
    assert set(found["lrs"]) == {LR}
