"""What launchers leave in the environment is read right, and enough to start a group."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from stateroom.environment import read_launch, world_size_hint
from stateroom.parallel.distributed import free_port

CASES = {
    "torchrun": (
        {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "5"},
        (3, 8, 1, 2, "h", 5),
    ),
    "openmpi": (
        {
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        },
        (1, 4, 1, 2, "127.0.0.1", None),
    ),
    "slurm": (
        {
            "SLURM_PROCID": "5",
            "SLURM_NTASKS": "8",
            "SLURM_LOCALID": "1",
            "SLURM_NTASKS_PER_NODE": "4(x2)",
            "SLURM_STEP_ID": "0",
            "SLURM_JOB_NODELIST": "gpu[07-08,11]",
        },
        (5, 8, 1, 4, "gpu07", None),
    ),
}


@pytest.mark.parametrize("source", CASES)
def test_launch_facts(source):
    env, expected = CASES[source]
    launch = read_launch(env)
    found = (launch.rank, launch.world_size, launch.local_rank, launch.local_world_size, launch.master_addr, launch.master_port)
    assert launch.source == source and found == expected
    assert world_size_hint(env) == expected[1]


def test_a_slurm_batch_shell_is_no_rank():
    env = {**CASES["slurm"][0]}
    del env["SLURM_STEP_ID"]
    assert read_launch(env) is None
    assert read_launch({}) is None and world_size_hint({}) is None


def test_a_number_that_is_none_is_named():
    with pytest.raises(ValueError, match="WORLD_SIZE='x'"):
        read_launch({"RANK": "0", "WORLD_SIZE": "x"})


CODE = """
import torch, stateroom
stateroom.init_distributed()
stateroom.init_distributed()  # a second call keeps the group
value = torch.ones(1) * (stateroom.comm.get_rank() + 1)
stateroom.comm.all_reduce(value)
print(stateroom.comm.get_world_size(), stateroom.comm.get_local_rank(), value.item())
"""


def test_mpi_variables_start_a_group():
    base = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_"))}
    base |= {"OMPI_COMM_WORLD_SIZE": "2", "MASTER_PORT": str(free_port())}
    jobs = []
    for rank in range(2):
        env = {**base, "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank)}
        jobs.append(subprocess.Popen([sys.executable, "-c", CODE], env=env, stdout=subprocess.PIPE, text=True))
    assert [job.communicate(timeout=60)[0].split() for job in jobs] == [["2", "0", "3.0"], ["2", "1", "3.0"]]


def test_one_process_needs_no_launcher():
    base = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_"))}
    done = subprocess.run([sys.executable, "-c", CODE], env=base, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["1", "0", "1.0"]
