"""Checkpoints of a model in stages are the model's: they load at any number of stages, and without any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pipe_jobs as jobs
import pytest
import torch
from stateroom.checkpoint import verify
from stateroom.checkpoint.opener import open_source

ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
AT, STEPS, COUNT = 3, 6, 4


def config(stages: int, schedule: str = "1f1b", zero: int = 1, **more: Any) -> dict[str, Any]:
    return jobs.config(COUNT, stages, pipeline={"schedule": schedule}, zero_optimization={"stage": zero}, **ADAM, **more)


@pytest.mark.parametrize(
    ("ranks", "stages", "schedule", "zero"),
    [
        (2, 2, "1f1b", 1),
        (2, 2, "zbv", 0),
        pytest.param(4, 4, "1f1b", 1, marks=pytest.mark.full),
        pytest.param(4, 2, "interleaved-1f1b", 2, marks=pytest.mark.full),
        (1, 1, "1f1b", 0),
    ],
)
@pytest.mark.parametrize("tied", (True, False))
def test_saved_at_two_stages_loads_anywhere(pools, tmp_path, ranks, stages, schedule, zero, tied):
    specs, copies = jobs.layers(tied=tied), ranks // stages
    data = jobs.batches(STEPS, COUNT, copies)
    if copies > 1:  # the batch must be the same: more copies take fewer micro-batches each
        data = [[step[0][:2], step[0][2:]] for step in jobs.batches(STEPS, COUNT, 1)]
    whole = jobs.batches(STEPS, COUNT, 1)
    want = pools(2).run(jobs.saving_run, specs, whole, config(2), str(tmp_path), AT)[0]
    cfg = config(stages, schedule, zero)
    cfg["gradient_accumulation_steps"] = COUNT // copies
    got = pools(ranks).run(jobs.resuming_run, specs, data if copies > 1 else whole, cfg, str(tmp_path), AT)
    for rank in got:
        assert rank["losses"] == pytest.approx(want[AT:], rel=1e-5)
        assert (rank["steps"], rank["client"]) == (AT, {"seen": AT})
    assert verify(tmp_path, tag=f"global_step{AT}") == []
    weights = torch.load(tmp_path / f"weights_{stages}.pt")
    for rank in got:
        for name, value in rank["weights"].items():
            assert torch.equal(weights[name], value)
    assert set(weights) == {name for rank in got for name in rank["weights"]}


def test_stages_and_the_plain_model_load_each_other(pools, tmp_path):
    specs, data = jobs.layers(tied=False), jobs.batches(STEPS, COUNT, 1)
    want = pools(2).run(jobs.saving_run, specs, data, config(2), str(tmp_path / "piped"), AT)[0]
    got = pools(1).run(jobs.plain_resuming_run, specs, data, config(2), str(tmp_path / "piped"), AT)[0]
    assert got == pytest.approx(want[AT:], rel=1e-5)
    want = pools(1).run(jobs.plain_saving_run, specs, data, config(2), str(tmp_path / "plain"), AT)[0]
    for rank in pools(2).run(jobs.resuming_run, specs, data, config(2), str(tmp_path / "plain"), AT):
        assert rank["losses"] == pytest.approx(want[AT:], rel=1e-5)


def test_a_layer_too_few_or_too_many_is_refused_on_all_stages(pools, tmp_path):
    data = jobs.batches(STEPS, COUNT, 1)
    pools(2).run(jobs.saving_run, jobs.layers(blocks=6), data, config(2), str(tmp_path), AT)
    for blocks, part in ((7, "the checkpoint lacks"), (5, "the model lacks")):
        outcomes = pools(2).outcomes(jobs.resuming_run, jobs.layers(blocks=blocks), data, config(2), str(tmp_path), AT)
        assert all(kind == "error" and value[0] == "CheckpointError" for kind, value in outcomes)
        assert any(part in value[1] or "does not fit" in value[1] for _, value in outcomes)


def test_bf16_in_the_background(pools, tmp_path):
    specs, data = jobs.layers(), jobs.batches(STEPS, COUNT, 1)
    cfg = config(2, bf16={"enabled": True}, checkpoint={"async": True})
    want = pools(2).run(jobs.saving_run, specs, data, cfg, str(tmp_path), AT)[0]
    got = pools(2).run(jobs.resuming_run, specs, data, cfg, str(tmp_path), AT)
    assert got[0]["losses"] == got[1]["losses"] == want[AT:]
    assert Path(got[0]["path"]).name == f"global_step{AT}"


def test_what_deepspeeds_pipeline_wrote(pools):
    folder = Path(__file__).parents[1] / "checkpoint" / "fixtures" / "pipe_fp32"
    source = open_source(folder, None)
    runs = [rank for stages in (1, 2) for rank in pools(stages).run(jobs.deepspeed_run, str(folder), stages)]
    for rank in runs:
        assert (rank["steps"], rank["client"]) == (4, source.client_state())
        assert rank["losses"] == pytest.approx(runs[0]["losses"], rel=1e-5)
        for name, value in rank["weights"].items():
            assert torch.equal(value, source.tensor(name, source.best_weight(name)))
    assert set(source.parameters) == {name for rank in runs[1:] for name in rank["weights"]}
