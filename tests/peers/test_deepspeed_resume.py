"""A run that DeepSpeed began goes on here with the losses that DeepSpeed itself would have had."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

JOB = Path(__file__).with_name("resume_job.py")
TOLERANCE = {"fp32": 1e-5, "bf16": 4e-3}  # of a loss, relative; bf16 rounds in another order, see docs/parity.md


def case(stage: int, there: int, dtype: str = "fp32", accumulation: int = 1) -> dict[str, Any]:
    """DeepSpeed's stage and the one that goes on."""
    zero = {"zero_optimization": {"stage": stage, "memory_efficient_linear": False}} if stage == 3 else {}
    return {"model": "gpt", "stage": stage, "there": there, "dtype": dtype, "accumulation": accumulation, "config": zero}


CASES = {
    **{f"stage {stage}": case(stage, stage) for stage in (0, 1, 2)},
    "stage 1 to 3": case(1, 3),
    "stage 2 to 0, accumulation 2": case(2, 0, accumulation=2),
    "bf16, stage 2 to 3": case(2, 3, "bf16"),
    "stage 3": case(3, 3),
    "stage 3 to 1": case(3, 1),
    "bf16, stage 3": case(3, 3, "bf16"),
}


def run(python: str, package: str, ranks: int, folder: Path, resume: bool) -> dict[str, Any]:
    """Run all cases in one job; ours leave out what only DeepSpeed's config knows."""
    given = folder / f"cases-{package}.json"
    ours = {name: {**one, "config": {}} for name, one in CASES.items()}
    given.write_text(json.dumps(CASES if package == "deepspeed" else ours))
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    paths = os.pathsep.join([str(JOB.parents[1]), str(JOB.parent)])
    env = {**kept, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(JOB)]
    command = [*torchrun, "--package", package, "--cases", str(given), "--folder", str(folder), *(["--resume"] if resume else [])]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, cwd=folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
    return json.loads((folder / f"{package}.json").read_text())


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def both(request: pytest.FixtureRequest, peer: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("resume")
    theirs = run(peer, "deepspeed", request.param, folder, resume=False)
    return theirs, run(sys.executable, "stateroom", request.param, folder, resume=True)


@pytest.mark.parametrize("name", CASES)
def test_deepspeeds_run_goes_on_here(name: str, both: tuple[dict[str, Any], dict[str, Any]], record_property: Any) -> None:
    theirs, ours = both[0][name], both[1][name]
    found = max(abs(a - b) / abs(b) for a, b in zip(ours["losses"], theirs["losses"], strict=True))
    record_property("difference", found)
    print(f"{name}: losses differ by {found:.1e}")
    assert found <= TOLERANCE[CASES[name]["dtype"]], (ours, theirs)
    assert ours["lr"] == pytest.approx(theirs["lr"]) and ours["steps"] == theirs["steps"]


def test_losses_would_show_what_is_not_loaded(both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Three steps change the losses by far more than is allowed: a run that started anew would not pass."""
    losses = both[0]["stage 1"]["losses"]
    assert max(losses) - min(losses) > 100 * TOLERANCE["fp32"] * losses[0]
