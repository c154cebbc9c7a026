"""The one place that reads environment variables: launch facts (torchrun, Slurm, OpenMPI) and Stateroom's own switches."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

# Variables that steer the libraries of a job: every host gets them, and a bug report shows them.
STEERING = (
    "NCCL_",
    "RCCL_",
    "UCX_",
    "GLOO_",
    "PYTHON",
    "TORCH",
    "PYTORCH_",
    "OMP_",
    "MKL_",
    "MLFLOW",
    "MV2_",
    "STATEROOM_",
    "DEEPSPEED_",
    "DS_",
)
_OF_THIS_HOST = ("CUDA_", "HIP_", "ROCR_", "ZE_", "SLURM_", "OMPI_", "PMI_", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV")
_OF_THIS_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HOSTNAME")
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSW", "CREDENTIAL")


@dataclass(frozen=True)
class Launch:
    """Who this process is among those that were started together; `source` names what said so."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int | None
    restart_count: int
    source: str
    uses_agent_store: bool = False  # torchrun's agent keeps the store, for one attempt after the other


# (source, rank, world size, local rank, local world size): the first row whose first two names are set is believed.
_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)


def read_launch(env: Mapping[str, str] | None = None) -> Launch | None:
    """Return what the launcher left in the environment, or None when no launcher started this process.

    A Slurm allocation without `srun` sets SLURM_NTASKS in the batch shell too; a step id marks a real task.

    Raises:
        ValueError: a launch variable is not an integer.
    """
    env = os.environ if env is None else env
    for source, rank, world, local, local_world in _LAUNCHERS:
        if rank not in env or world not in env:
            continue
        if source == "slurm" and not env.get("SLURM_STEP_ID", "").isdigit():
            continue
        world_size = _integer(env, world, 1)
        return Launch(
            rank=_integer(env, rank, 0),
            world_size=world_size,
            local_rank=_integer(env, local, _integer(env, rank, 0) if source == "torchrun" else 0),
            local_world_size=_integer(env, local_world, world_size),
            master_addr=env.get("MASTER_ADDR") or _first_slurm_host(env) or "127.0.0.1",
            master_port=_integer(env, "MASTER_PORT", 0) or None,
            restart_count=_integer(env, "TORCHELASTIC_RESTART_COUNT", 0),
            source=source,
            uses_agent_store=source == "torchrun" and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
    return None


def world_size_hint(env: Mapping[str, str] | None = None) -> int | None:
    """Return the number of ranks that a launcher announced, before any process group exists."""
    launch = read_launch(env)
    return None if launch is None else launch.world_size


def timeout_minutes(env: Mapping[str, str] | None = None) -> float | None:
    """Return the collective timeout set by STATEROOM_TIMEOUT (or DEEPSPEED_TIMEOUT), in minutes."""
    env = os.environ if env is None else env
    text = env.get("STATEROOM_TIMEOUT") or env.get("DEEPSPEED_TIMEOUT")
    return float(text) if text else None


def accelerator_override(env: Mapping[str, str] | None = None) -> str | None:
    """Return the device type that STATEROOM_ACCELERATOR (or DS_ACCELERATOR) asks for, such as "cpu"."""
    env = os.environ if env is None else env
    return env.get("STATEROOM_ACCELERATOR") or env.get("DS_ACCELERATOR") or None


def malloc_is_steered(env: Mapping[str, str] | None = None) -> bool:
    """Return whether the user has told glibc when to map and when to hand back memory."""
    env = os.environ if env is None else env
    by_variable = any(name in env for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_"))
    return by_variable or any(f"glibc.malloc.{what}" in env.get("GLIBC_TUNABLES", "") for what in ("mmap_", "trim_"))


def set_for_children(name: str, value: str) -> None:
    """Set a variable that processes started from here will inherit."""
    os.environ[name] = value


def unset_for_children(name: str) -> None:
    """Take a variable out of what processes started from here inherit."""
    os.environ.pop(name, None)


def inherited(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a copy of the environment for child processes."""
    return dict(os.environ if env is None else env)


def reportable(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that matter for how a job runs, sorted; of those that look like secrets only that they are set."""
    env = os.environ if env is None else env
    names = sorted(n for n in env if n.startswith((*STEERING, *_OF_THIS_HOST)) or n in _OF_THIS_RANK)
    return {name: "(set, not shown)" if any(word in name.upper() for word in _SECRET) else env[name] for name in names}


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    if not text:
        return default
    if name == "SLURM_NTASKS_PER_NODE":  # "4(x2)" when nodes differ
        text = text.split("(")[0]
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"environment variable {name}={text!r} is not an integer; unset it or set a number") from None


def _first_slurm_host(env: Mapping[str, str]) -> str | None:
    hosts = env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    if not hosts:
        return None
    head, bracket, tail = hosts.partition("[")
    if not bracket or "," in head:
        return hosts.split(",")[0]
    return head + tail.split("]")[0].split(",")[0].split("-")[0]
