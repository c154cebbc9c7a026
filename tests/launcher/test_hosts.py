"""The life and death of a job on three hosts: whoever ends, nothing is left anywhere, and the right one is told of."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from host_jobs import WAIT, alive, all_there, run, started, wait_until
from namespaces import Hosts

pytestmark = pytest.mark.full  # minutes of processes on three hosts


def test_a_killed_rank_ends_all_on_every_host(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(WAIT)
    with started(hosts, tmp_path, "job.py") as process:
        wait_until(all_there(tmp_path, "pid"))
        os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
        begin = time.monotonic()
        wait_until(lambda: not any(alive(tmp_path, rank) for rank in range(3)), 20)
        assert time.monotonic() - begin < 5  # the promise; the ranks would sleep for 100
        _, said = process.communicate(timeout=20)
    assert process.returncode == 137
    assert said.splitlines()[-1] == "launcher: rank 1 on worker-2 failed first, with signal 9 (SIGKILL); the others were ended"


def test_ranks_that_are_deaf_to_sigterm_are_killed_in_time(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(WAIT)
    with started(hosts, tmp_path, "job.py", "deaf") as process:
        wait_until(all_there(tmp_path, "pid"))
        os.kill(int((tmp_path / "pid-2").read_text()), signal.SIGKILL)
        begin = time.monotonic()
        wait_until(lambda: not any(alive(tmp_path, rank) for rank in range(3)), 20)
        assert time.monotonic() - begin < 5
        process.communicate(timeout=20)
    assert process.returncode == 137


RAISE = """
import os, time
import stateroom
from stateroom import comm
stateroom.init_distributed()
def load_batch():
    raise ValueError("no such shard")
if comm.get_rank() == 1:
    time.sleep(0.2)
    load_batch()
comm.barrier()  # fails with an echo on the others
"""


def test_the_traceback_of_the_first_failure_comes_last_and_once(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(RAISE)
    done = run(hosts, tmp_path, "job.py")
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("launcher: rank 1 on worker-2 failed first, with status 1") :]
    assert "in load_batch" in report
    assert report.splitlines()[-1] == "ValueError: no such shard"
    assert done.stderr.count("ValueError: no such shard") == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_user_ends_the_job_and_scripts_can_save(hosts: Hosts, tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "job.py").write_text(WAIT)
    with started(hosts, tmp_path, "job.py", "save") as process:
        wait_until(all_there(tmp_path, "pid"))
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert all_there(tmp_path, "saved")()
    assert "Traceback" not in said and "all ranks were ended" in said
    assert not any(alive(tmp_path, rank) for rank in range(3))


def test_a_second_ctrl_c_kills_what_does_not_listen(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(WAIT)
    with started(hosts, tmp_path, "job.py", "deaf") as process:
        wait_until(all_there(tmp_path, "pid"))
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        for line in process.stderr:
            if "Ctrl-C received" in line:
                break
        assert alive(tmp_path, 0)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert process.returncode == 130
    assert not any(alive(tmp_path, rank) for rank in range(3))


def test_a_killed_launcher_leaves_nothing_behind(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(WAIT)
    with started(hosts, tmp_path, "job.py") as process:
        wait_until(all_there(tmp_path, "pid"))
        process.kill()
        wait_until(lambda: not any(hosts.commands(place) for place in range(3)), 20)


def test_a_killed_agent_takes_its_ranks_along(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(WAIT)
    with started(hosts, tmp_path, "job.py") as process:
        wait_until(all_there(tmp_path, "pid"))
        (agent,) = [pid for pid in hosts.pids(1) if b"launcher.agent" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[2]]
        os.kill(agent, signal.SIGKILL)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "launcher: worker-2: ssh ended with" in said
    assert not any(alive(tmp_path, rank) for rank in range(3))


def test_sigusr1_reaches_every_rank(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(WAIT)
    with started(hosts, tmp_path, "job.py") as process:
        wait_until(all_there(tmp_path, "pid"))
        process.send_signal(signal.SIGUSR1)
        wait_until(all_there(tmp_path, "usr1"), 20)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


TRAIN = """
import os, sys, time
import torch
import stateroom
from stateroom import comm

stateroom.init_distributed()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 2},
    "checkpoint": {"keep_last": 2},
    "steps_per_print": 100000,
}
engine, _, _, _ = stateroom.initialize(model=model, config=config)
engine.load_checkpoint("saves")
begin = engine.global_steps
world = comm.get_world_size()
print(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']} begins at {begin} with {world}", flush=True)
for step in range(begin, 40):
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    if comm.get_rank() == 0:
        open("log.txt", "a").write(f"{step} {world}\\n")
    engine.save_checkpoint("saves")
    time.sleep(0.1)
engine.destroy()
"""


def steps_of(folder: Path) -> list[tuple[int, int]]:
    path = folder / "log.txt"
    return [(int(a), int(b)) for a, b in (line.split() for line in path.read_text().splitlines())] if path.exists() else []


@pytest.mark.parametrize("place", [0, 2])
def test_a_host_that_is_cut_off_is_left_behind(hosts: Hosts, tmp_path: Path, place: int) -> None:
    """The first host, which keeps the rendezvous, may be lost like any other."""
    (tmp_path / "job.py").write_text(TRAIN)
    options = ["--max_restarts", "1", "--elastic_training", "--min_elastic_nodes", "2", "--heartbeat_timeout", "6"]
    with started(hosts, tmp_path, *options, "job.py") as process:
        wait_until(lambda: len(steps_of(tmp_path)) > 4)
        hosts.cut(place)
        out, said = process.communicate(timeout=100)
    assert process.returncode == 0, said
    assert f"launcher: {hosts.names[place]} has been silent for" in said
    assert f"launcher: {hosts.names[place]}: nothing heard of it for" in said
    assert "launcher: restart 1 of 1" in said
    begins = [line for line in out.splitlines() if "attempt 1 begins" in line]
    assert len(begins) == 2 and all(line.endswith(" with 2") and " at 0 " not in line for line in begins)
    done = steps_of(tmp_path)
    assert done[0][1] == 3 and done[-1] == (39, 2)
    assert {step for step, _ in done} == set(range(40))


def test_without_a_restart_a_host_that_is_cut_off_ends_the_job(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(WAIT)
    with started(hosts, tmp_path, "--heartbeat_timeout", "4", "job.py") as process:
        wait_until(all_there(tmp_path, "pid"))
        hosts.cut(1)
        begin = time.monotonic()
        _, said = process.communicate(timeout=60)
        assert time.monotonic() - begin < 30
        # Cut off as it is, that host ends its own ranks.
        wait_until(lambda: not alive(tmp_path, 1), 30)
    assert process.returncode == 1
    assert said.splitlines()[-1].startswith("launcher: worker-2: nothing heard of it for")


def test_a_rank_that_fails_once_is_started_again_on_all_hosts(hosts: Hosts, tmp_path: Path) -> None:
    source = TRAIN.replace("    time.sleep(0.1)", "    if step == 5 and not begin and comm.get_rank() == 1: os._exit(9)")
    (tmp_path / "job.py").write_text(source)
    done = run(hosts, tmp_path, "--max_restarts", "2", "job.py")
    assert done.returncode == 0, done.stderr
    assert "launcher: rank 1 on worker-2 failed first, with status 9" in done.stderr
    assert done.stdout.count("attempt 1 begins at 6 with 3") == 3
    assert [world for _, world in steps_of(tmp_path)] == [3] * 40


def test_a_spare_host_steps_in(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(TRAIN)
    options = ["--max_restarts", "1", "--elastic_training", "--max_elastic_nodes", "2", "--heartbeat_timeout", "6"]
    with started(hosts, tmp_path, *options, "job.py") as process:
        wait_until(lambda: len(steps_of(tmp_path)) > 4)
        assert not hosts.commands(2) or all("child" not in words for words in hosts.commands(2))
        hosts.cut(1)
        out, said = process.communicate(timeout=100)
    assert process.returncode == 0, said
    assert "[worker-3:1] attempt 1 begins" in out
    assert {world for _, world in steps_of(tmp_path)} == {2}
