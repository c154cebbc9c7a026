"""Start the process group from what a launcher left behind, or alone without one."""

from __future__ import annotations

import atexit
import socket
import time
import uuid
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..environment import Launch, read_launch, timeout_minutes
from ..errors import RankError
from .accelerator import backend_for, device_type, local_device

DEFAULT_TIMEOUT = timedelta(minutes=10)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Make the default process group exist; the parameters are DeepSpeed's.

    Ranks come from the arguments, else from torchrun's, OpenMPI's, MPICH's or Slurm's environment, else this is one
    process alone, which needs no port. An existing group is kept as it is.

    Raises:
        RankError: the group cannot be formed; the message names address, rank and world size.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise RankError("dist_init_required=False, but no process group exists: call torch.distributed.init_process_group first")
    launch = read_launch() if auto_mpi_discovery or init_method is None else None
    if rank >= 0 and world_size > 0:
        local = launch.local_rank if launch else 0
        address = launch.master_addr if launch else "127.0.0.1"
        port = launch.master_port if launch else None
        launch = Launch(rank, world_size, local, world_size, address, port, 0, "arguments")
    kind = device_type()
    if kind != "cpu":
        torch.accelerator.set_device_index(local_device().index or 0)
    minutes = timeout_minutes()
    limit = timeout or (timedelta(minutes=minutes) if minutes else DEFAULT_TIMEOUT)
    try:
        _start(dist_backend or backend_for(kind), launch, init_method, distributed_port, limit)
    except (RuntimeError, ValueError, dist.DistError) as error:
        who = "one process" if launch is None else f"rank {launch.rank} of {launch.world_size} ({launch.source})"
        where = "" if launch is None else f" at {launch.master_addr}:{launch.master_port or distributed_port}"
        raise RankError(f"cannot start the process group for {who}{where}: {error}") from error
    if dist.get_backend() == "gloo":
        # Threads of gloo that outlive the interpreter end it with "terminate called" and SIGABRT (seen on torch 2.13).
        atexit.register(_close_at_exit)


def _close_at_exit() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _start(backend: str, launch: Launch | None, init_method: str | None, port: int, timeout: timedelta) -> None:
    if init_method is not None:
        rank, size = (launch.rank, launch.world_size) if launch else (0, 1)
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=size, timeout=timeout)
    elif launch is None:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    elif launch.source == "torchrun":
        _start_under_agent(backend, launch, port, timeout)
    else:
        is_master = launch.rank == 0
        store = dist.TCPStore(launch.master_addr, launch.master_port or port, launch.world_size, is_master, timeout)
        dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout)


def _start_under_agent(backend: str, launch: Launch, port: int, timeout: timedelta) -> None:
    """Join through torchrun, in an agent's store under a key prefix that no earlier attempt had.

    The agents' store outlives a restart, and gloo would read the dead ranks' addresses from it (seen on torch 2.13). The
    count of restarts is no such prefix: an agent whose ranks did not fail does not count (seen on the same).
    """
    if not launch.uses_agent_store:
        dist.init_process_group(backend, rank=launch.rank, world_size=launch.world_size, timeout=timeout)
        return
    base = dist.TCPStore(launch.master_addr, launch.master_port or port, is_master=False, timeout=timeout)
    name = agree_on_attempt(base, launch.rank, launch.world_size, timeout)
    store = dist.PrefixStore(f"attempt_{name}", base)
    dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout)


def agree_on_attempt(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a name for this start of the ranks that all of them share, in a store where earlier starts left their keys.

    Each rank asks under a word that only it knows, rank 0 answers whatever it finds asked, and does so until every rank
    has thanked for this name: what dead ranks asked stays unthanked, and their questions are written over.

    Raises:
        RankError: not every rank came within `timeout`.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    word = uuid.uuid4().hex
    if rank != 0:
        store.set(f"stateroom/question/{rank}", word)
        while not store.check([f"stateroom/answer/{word}"]):
            _wait(deadline, f"rank 0 did not answer rank {rank}")
        name = store.get(f"stateroom/answer/{word}").decode()
        store.add(f"stateroom/thanks/{name}", 1)
        return name
    answered: set[bytes] = set()
    while (thanked := store.add(f"stateroom/thanks/{word}", 0)) < world_size - 1:
        for other in range(1, world_size):
            question = store.get(f"stateroom/question/{other}") if store.check([f"stateroom/question/{other}"]) else b""
            if question and question not in answered:
                answered.add(question)
                store.set(f"stateroom/answer/{question.decode()}", word)
        _wait(deadline, f"only {thanked + 1} of {world_size} ranks came")
    return word


def _wait(deadline: float, problem: str) -> None:
    if time.monotonic() > deadline:
        raise RankError(f"{problem} in time; a rank has ended before it came so far, or cannot reach the first host")
    time.sleep(0.005)


def default_store() -> dist.Store:
    """Return the default group's key-value store (a private torch name, seen on 2.11 to 2.14)."""
    return dist.distributed_c10d._get_default_store()


def free_port() -> int:
    """Return a TCP port that was free on the loopback address a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
