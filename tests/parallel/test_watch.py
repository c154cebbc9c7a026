"""Ranks that run different modules end within seconds, with unit and rank; slow ranks are waited for."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from stateroom.parallel.watch import EXIT_STATUS, Waiting, Watch, describe_cycle, find_cycle


def waiting(rank, call, number, counts):
    return Waiting(rank, call, number, "parameters", counts)


def test_two_ranks_in_different_calls_are_a_ring():
    a = waiting(0, "all_gather/heads.0", 1, {"all_gather/heads.0": 1, "all_gather/root": 1})
    b = waiting(1, "all_gather/heads.1", 1, {"all_gather/heads.1": 1, "all_gather/root": 1})
    cycle = find_cycle({0: a, 1: b})
    assert sorted(cycle) == [0, 1]
    text = describe_cycle({0: a, 1: b}, cycle)
    assert "'heads.0'" in text and "'heads.1'" in text and "rank 0" in text and "rank 1" in text


def test_another_number_of_calls_is_a_ring():
    a = waiting(0, "all_reduce/sum", 1, {"all_reduce/sum": 1, "all_gather/b": 1})
    b = waiting(1, "all_gather/b", 2, {"all_gather/b": 2})
    assert sorted(find_cycle({0: a, 1: b})) == [0, 1]


def test_waiting_for_a_slow_rank_is_none():
    counts = {"all_gather/a": 3}
    assert find_cycle({0: waiting(0, "all_gather/a", 3, counts), 1: waiting(1, "all_gather/a", 3, counts)}) == []
    ahead = waiting(0, "all_gather/b", 1, {"all_gather/a": 3, "all_gather/b": 1})
    behind = waiting(1, "all_gather/a", 3, counts)  # its own peer is slow; rank 0 has started this call already
    assert find_cycle({0: ahead, 1: behind}) == []


def test_a_collective_of_the_script_closes_a_ring_only_with_the_ranks_of_its_group():
    counts = {"all_gather/a": 1}
    ahead = waiting(0, "all_gather/b", 1, {**counts, "all_gather/b": 1})
    barrier = Waiting(1, "barrier", 0, "train.py:7", counts, [0, 1])
    assert sorted(find_cycle({0: ahead, 1: barrier})) == [0, 1]
    assert "rank 1 waits in torch.distributed.barrier at train.py:7, which rank 0" in describe_cycle({0: ahead, 1: barrier}, [0, 1])
    others = Waiting(1, "barrier", 0, "train.py:7", counts, [1, 2])  # rank 2 is still on its way there
    assert find_cycle({0: ahead, 1: others}) == []
    both = {r: Waiting(r, "barrier", 0, "train.py:7", counts, [0, 1, 2]) for r in range(2)}
    assert find_cycle(both) == []  # rank 2 is late
    assert Waiting.from_json(barrier.to_json()) == barrier


def test_three_ranks_in_a_ring():
    ring = {r: waiting(r, f"all_gather/{r}", 1, {f"all_gather/{r}": 1, f"all_gather/{(r - 1) % 3}": 1}) for r in range(3)}
    assert sorted(find_cycle(ring)) == [0, 1, 2]


class Store(dict):
    """The part of a key-value store that a watch uses."""

    def set(self, key, value):
        self[key] = value.encode()

    def check(self, keys):
        return all(key in self for key in keys)


def test_a_ring_must_be_seen_twice_and_ends_when_it_moves_on():
    store, ended = Store(), []
    watches = [Watch(rank, 2, store, ended.append, patience_s=0.0) for rank in range(2)]
    for watch in watches:
        watch.close()  # no thread: the test looks itself
    for rank, watch in enumerate(watches):
        watch.waits(f"all_gather/{rank}", watch.started(f"all_gather/{rank}"), "parameters")
    watches[0].look()
    watches[1].look()
    assert not ended
    watches[0].look()
    assert not ended  # the first look that saw both
    watches[0].look()
    assert len(ended) == 1
    watches[0].done()
    watches[0].look()
    watches[1].look()
    watches[1].look()
    assert len(ended) == 1  # rank 0 went on


JOB = """
import sys, time
import torch, stateroom
from torch import nn

class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)) for _ in range(2))
    def forward(self, x, which):
        return self.heads[which](self.trunk(x)).square().mean()

torch.manual_seed(0)
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "units": {"min_numel": 0}}
config["zero_optimization"] = {"stage": int(sys.argv[1])}
engine, *_ = stateroom.initialize(Tasks(), config=config)
for step in range(3):
    if sys.argv[2] == "slow" and step == 1 and engine.global_rank == 1:
        time.sleep(6)
    which = engine.global_rank if sys.argv[2] == "apart" and step == 1 else step % 2
    if sys.argv[2] == "uneven" and step == 2 and engine.global_rank == 1:
        break
    engine.backward(engine(torch.ones(2, 8), which))
    engine.step()
if sys.argv[2] == "uneven":
    stateroom.comm.barrier()
print("done", flush=True)
"""


def run(tmp_path, *args):
    script = tmp_path / "job.py"
    script.write_text(JOB)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), *args]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=os.environ)
    return done, time.monotonic() - began


def test_ranks_that_use_different_units_end_with_both_names(tmp_path):
    done, seconds = run(tmp_path, "3", "apart")
    assert done.returncode != 0
    assert seconds < 40  # the process group itself would wait ten minutes
    lines = [line for line in done.stderr.splitlines() if "ranks are out of step" in line]
    assert len(lines) == 2
    for line in lines:
        assert "'heads.0'" in line and "'heads.1'" in line and "rank 0" in line and "rank 1" in line
    assert f"exitcode  : {EXIT_STATUS}" in done.stderr or f"(exitcode: {EXIT_STATUS})" in done.stderr


@pytest.mark.parametrize("stage", [pytest.param("1", marks=pytest.mark.full), "3"])
def test_a_rank_with_fewer_batches_ends_all_with_the_way_out(tmp_path, stage):
    """P05: rank 1 leaves the loop and waits in a barrier of the script's own."""
    done, seconds = run(tmp_path, stage, "uneven")
    assert done.returncode != 0
    assert seconds < 40
    lines = [line for line in done.stderr.splitlines() if "ranks are out of step" in line]
    assert len(lines) == 2
    for line in lines:
        assert "rank 1 waits in torch.distributed.barrier at" in line and "job.py:" in line and "engine.together" in line


@pytest.mark.parametrize(("stage", "case"), [("2", "apart"), pytest.param("3", "slow", marks=pytest.mark.full)])
def test_what_is_allowed_is_not_ended(tmp_path, stage, case):
    """Stages 0 to 2 let ranks differ; a rank that is slow for longer than the patience is waited for."""
    done, _ = run(tmp_path, stage, case)
    assert done.returncode == 0 and done.stdout.count("done") == 2, done.stderr[-2000:]
