"""A model whose states are several times the memory of the process trains from a drive, and takes what the ledger predicts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "tier_budget.py"
DIM = 512


def run(folder, layers, budget, *, place="nvme", params="nvme", steps=2):
    zero = {"stage": 3, "sub_group_size": 1 << 20}
    if place != "device":
        zero["offload_optimizer"] = {"device": place, "nvme_path": str(folder)}
    if params != "device":
        zero["offload_param"] = {"device": params, "nvme_path": str(folder), "max_in_cpu": 0}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "seed": 1,
    }
    job = {"dim": DIM, "layers": layers, "budget": budget, "config": config, "steps": steps}
    # freed buffers go back to the system at once, so that what is resident is what is in use
    env = {**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, str(PROGRAM), json.dumps(job)], capture_output=True, text=True, timeout=300, env=env)


def states_of(layers):
    per_layer = 2 * DIM + 6 * DIM * DIM + 6 * DIM + 6 * DIM * DIM + DIM
    return 16 * (layers * per_layer + 2 * 256 * DIM)


def check(folder, layers, share):
    budget = states_of(layers) // share
    done = run(folder, layers, budget)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["states"] == states_of(layers)
    assert found["grown"] <= budget
    predicted = found["base"] + found["predicted"]
    assert abs(found["peak"] - predicted) <= 0.05 * found["peak"], found
    without = run(folder, layers, budget, place="device", params="device")
    assert without.returncode != 0
    assert "memory" in without.stderr
    return found


@pytest.mark.full
def test_states_of_four_times_the_budget_train(tmp_path):
    check(tmp_path, 22, 4)


@pytest.mark.full
def test_states_of_four_times_the_whole_process_train_to_the_same_losses(tmp_path):
    """The process counts as a whole here, the interpreter and torch included."""
    found = check(tmp_path, 44, 6)
    assert found["states"] >= 4 * found["peak"]
    plain = run(tmp_path, 44, 0, place="device", params="device")
    assert json.loads(plain.stdout.splitlines()[-1])["losses"] == found["losses"]


@pytest.mark.parametrize(
    ("place", "params"),
    [("cpu", "device"), *(pytest.param(*pair, marks=pytest.mark.full) for pair in (("cpu", "cpu"), ("nvme", "device"), ("cpu", "nvme")))],
)
def test_resident_memory_is_what_the_ledger_predicts(tmp_path, place, params):
    done = run(tmp_path, 22, 0, place=place, params=params)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert abs(found["peak"] - found["base"] - found["predicted"]) <= 0.05 * found["peak"], found
