"""Rank processes that stay alive between tests, forked from a server that has imported torch: importing it costs seconds."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMEOUT_S = 120
# What every rank needs and what no test changes the import of; none of it may start a thread, which a fork would lose.
PRELOAD = ["pytest", "torch", "torch._dynamo", "torch.distributed", "stateroom.engine.engine", "stateroom.config_schemas.loading", "ranks"]


def forking() -> Any:
    """Return what makes processes that begin with everything in PRELOAD imported; there is one such server in each pytest process."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


class RankFailure(AssertionError):
    """At least one rank raised; the message holds every rank's traceback."""


def _serve(connection: Any, rank: int, world: int, rendezvous: str) -> None:
    """Run tasks until told to stop; each task sees an initialised process group of `world` ranks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()  # what came with the fork is no test's garbage
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    from datetime import timedelta

    store = dist.FileStore(rendezvous, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    while True:
        task = connection.recv()
        if task is None:
            break
        module, name, args, kwargs = task
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                function = getattr(importlib.import_module(module), name)
                result = function(*args, **kwargs)
            # by value: the pipe's own pickling would share each tensor through a file descriptor for as long as a test keeps it
            connection.send_bytes(pickle.dumps(("ok", result, out.getvalue())))
        except BaseException as error:
            connection.send_bytes(pickle.dumps(("error", (type(error).__name__, str(error), traceback.format_exc()), out.getvalue())))
    dist.destroy_process_group()


class Pool:
    """`world` processes with one process group."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.stdout: list[str] = []
        context = forking()
        self._rendezvous = tempfile.mktemp(prefix="ranks-")
        os.environ["OMP_NUM_THREADS"] = "1"
        self._pipes, self._processes = [], []
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, world, self._rendezvous), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run a module-level function on every rank and return what each returned.

        Raises:
            RankFailure: a rank raised, or did not answer in TIMEOUT_S; the pool is then gone.
        """
        outcomes = self.outcomes(function, *args, **kwargs)
        bad = [f"rank {rank}: {value[2]}" for rank, (kind, value) in enumerate(outcomes) if kind == "error"]
        if bad:
            raise RankFailure("\n".join(bad))
        return [value for _, value in outcomes]

    def outcomes(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[tuple[str, Any]]:
        """Return ("ok", result) or ("error", (type name, message, traceback)) of every rank."""
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__qualname__, args, kwargs))
        found, self.stdout = [], []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(TIMEOUT_S):
                self.close()
                raise RankFailure(f"rank {rank} of {self.world} did not answer in {TIMEOUT_S} s")
            try:
                kind, value, out = pickle.loads(pipe.recv_bytes())
            except EOFError:
                self.close()
                raise RankFailure(f"rank {rank} of {self.world} died") from None
            found.append((kind, value))
            self.stdout.append(out)
        if any(kind == "error" for kind, _ in found):
            self.close()  # collectives may be half done: the next test gets fresh processes
        return found

    @property
    def alive(self) -> bool:
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(3)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes = [], []
        Path(self._rendezvous).unlink(missing_ok=True)


class Pools:
    """One pool for each number of ranks, made when first asked for."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def __call__(self, world: int) -> Pool:
        pool = self._pools.get(world)
        if pool is None or not pool.alive:
            pool = self._pools[world] = Pool(world)
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def in_tests_path() -> None:
    """Make the tests folder importable in rank processes."""
    here = str(Path(__file__).parent)
    if here not in sys.path:
        sys.path.insert(0, here)
