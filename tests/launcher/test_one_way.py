"""Jobs whose agents the launcher cannot talk to, or does not start: pdsh, srun, mpirun, and a launcher on every host."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from namespaces import install

ENV = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "SLURM_JOB_ID")}
ENV |= {"STATEROOM_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
LAUNCHER = [sys.executable, "-m", "stateroom.launcher"]

# Runs its command once for each task, as srun and mpirun do, and passes SIGTERM on. What it is called says which it is.
FAKE = """#!/bin/bash
for word in "$@"; do
  case "$word" in --ntasks=*) count="${word#*=}" ;; esac
done
while [ "$1" != "$PYTHON" ]; do [ "$1" = -np ] || [ "$1" = -n ] && count="$2"; shift; done
for ((i = 0; i < count; i++)); do
  SLURM_NODEID=$i OMPI_COMM_WORLD_RANK=$i PMI_RANK=$i "$@" </dev/null &
  pids+=($!)
done
trap 'kill -TERM "${pids[@]}" 2>/dev/null' TERM
status=0
for pid in "${pids[@]}"; do
  while :; do wait "$pid"; code=$?; kill -0 "$pid" 2>/dev/null || break; done
  [ $code -gt $status ] && status=$code
done
exit $status
"""
ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)"}


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def way(name: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return options and environment that start two agents on this machine by the runner called `name`."""
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    for program in ("srun", "mpirun"):
        (bin_folder / program).write_text(FAKE)
        (bin_folder / program).chmod(0o755)
    env = {**ENV, "PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHON": sys.executable}
    options = ["--master_addr", "127.0.0.1", "--master_port", free_port()]
    if name == "slurm":
        return options, {**env, **ALLOCATION}
    (folder / "hosts").write_text("n1 slots=1\nn2 slots=1\n")
    more = ["--launcher_args", "-R exec"] if name == "pdsh" else []
    return [*options, "--hostfile", "hosts", "--launcher", name, *more], env


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    if request.param == "pdsh" and shutil.which("pdsh") is None:
        install("pdsh")
        if shutil.which("pdsh") is None:
            pytest.skip("pdsh is not installed, and apt-get could not install it")
    return request.param


def by(first: str, *others: str) -> pytest.MarkDecorator:
    """One runner in every run of the tests, the others with the exhaustive matrix."""
    return pytest.mark.parametrize("name", [first, *(pytest.param(name, marks=pytest.mark.full) for name in others)], indirect=True)


MEET = """
import os, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(2.0 ** dist.get_rank())
dist.all_reduce(total)
print(int(total), *sys.argv[1:], flush=True)
dist.destroy_process_group()
"""


@by("pdsh", "slurm")
def test_ranks_meet_and_their_lines_come_back(name: str, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(MEET)
    options, env = way(name, tmp_path)
    words = [*LAUNCHER, *options, "job.py", "100%h", "it's"]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[n1:0] 3 100%h it's", "[n2:1] 3 100%h it's"]
    assert "launcher: 2 ranks on 2 hosts" in done.stderr


FAIL = """
import os, time
open(f"pid-{os.environ['RANK']}", "w").write(str(os.getpid()))
if os.environ["RANK"] == "1":
    raise ValueError("rank one says no")
time.sleep(100)
"""


@by("openmpi", "slurm", "mpich", "pdsh")
def test_a_failure_ends_all_and_is_told_last(name: str, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(FAIL)
    options, env = way(name, tmp_path)
    done = subprocess.run([*LAUNCHER, *options, "job.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "launcher: rank 1 on n2 failed first, with status 1" in done.stderr
    assert done.stderr.splitlines()[-1] == "ValueError: rank one says no" and done.stderr.count("ValueError: rank") == 1
    assert not alive(tmp_path / "pid-0") and not alive(tmp_path / "pid-1")


def alive(path: Path) -> bool:
    import psutil

    try:
        return psutil.Process(int(path.read_text())).status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, FileNotFoundError):  # ended, or before it could say which it is
        return False


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 60
    while not all(path.exists() and path.read_text() for path in paths):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@by("slurm", "pdsh")
def test_sigterm_ends_all(name: str, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(FAIL.replace('"1"', '"9"'))
    options, env = way(name, tmp_path)
    process = subprocess.Popen([*LAUNCHER, *options, "job.py"], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    pids = [tmp_path / "pid-0", tmp_path / "pid-1"]
    wait_for(*pids)
    process.terminate()
    process.communicate(timeout=40)
    assert process.returncode == 143
    deadline = time.monotonic() + 10  # pdsh ends at once, and what it started ends for that
    while any(map(alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


AGAIN = """
import os, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")  # plain torch: what it finds in the store must be this attempt's
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), dist.get_rank()
total = torch.ones(1)
dist.all_reduce(total)
print(f"attempt {attempt} has {int(total)}", flush=True)
open(f"pid-{attempt}-{rank}", "w").write(str(os.getpid()))
if attempt == 0:
    if rank == int(sys.argv[1]):
        os._exit(9)
    time.sleep(100)
dist.destroy_process_group()
"""


@contextlib.contextmanager
def launchers(folder: Path, count: int, options: list[str], script: list[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """Start one launcher for each node, as on hosts that share nothing but a network."""
    common = [*LAUNCHER, "--no_ssh", "--num_nodes", str(count), "--num_gpus", "1", "--master_addr", "127.0.0.1", *options]
    made = [
        subprocess.Popen(
            [*common, "--node_rank", str(node), *script], cwd=folder, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for node in range(count)
    ]
    try:
        yield made
    finally:
        for process in made:
            process.kill()
            process.communicate()


@pytest.mark.full
@pytest.mark.parametrize("failing", [0, 1])
def test_launchers_on_each_host_start_again_together(tmp_path: Path, failing: int) -> None:
    """Whichever fails, both count the same attempt, also the one whose rank only slept."""
    (tmp_path / "job.py").write_text(AGAIN)
    options = ["--master_port", free_port(), "--max_restarts", "1"]
    with launchers(tmp_path, 2, options, ["job.py", str(failing)]) as processes:
        outs = [process.communicate(timeout=90) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outs
    for out, _ in outs:
        assert "attempt 0 has 2" in out and "attempt 1 has 2" in out
    assert f"rank {failing} on" in outs[failing][1] and "started again" in outs[failing][1]


def test_a_launcher_that_dies_ends_the_others(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(FAIL.replace('"1"', '"9"'))
    with launchers(tmp_path, 2, ["--master_port", free_port(), "--heartbeat_timeout", "4"], ["job.py"]) as processes:
        wait_for(tmp_path / "pid-0", tmp_path / "pid-1")
        processes[0].send_signal(signal.SIGKILL)  # with it goes the store that the others meet at
        _, said = processes[1].communicate(timeout=60)
    assert processes[1].returncode == 1
    assert "the first host (127.0.0.1:" in said and "is gone" in said
    assert not alive(tmp_path / "pid-1")


@pytest.mark.full
def test_an_elastic_job_goes_on_without_a_launcher_that_dies(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(AGAIN.replace("os._exit(9)", "time.sleep(100)"))
    options = ["--master_port", free_port(), "--max_restarts", "1", "--elastic_training", "--heartbeat_timeout", "3"]
    with launchers(tmp_path, 2, options, ["job.py", "0"]) as processes:
        wait_for(tmp_path / "pid-0-0", tmp_path / "pid-0-1")
        processes[1].send_signal(signal.SIGKILL)
        out, said = processes[0].communicate(timeout=60)
    assert processes[0].returncode == 0, said
    assert "attempt 0 has 2" in out and "attempt 1 has 1" in out
