"""Several pools of ranks side by side: a rank of a tiny model mostly waits for the other's message, and another pool can use the time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import conform
from ranks import Pool

LANES = 2


class Job(NamedTuple):
    """One call of conform.conform on a pool of `ranks`."""

    name: str
    stages: tuple[int, ...] = (0, 1, 2, 3)
    dtype: str = "fp32"
    optimizer: str = ""
    ranks: int = 2
    steps: int = conform.STEPS

    def __str__(self) -> str:
        rest = [self.dtype if self.dtype != "fp32" else "", self.optimizer, f"{self.ranks} ranks" if self.ranks != 2 else ""]
        return "-".join([self.name, *filter(None, rest)])


class Lanes:
    """Runs jobs in the given order, a few at a time, and hands out their results."""

    def __init__(self, jobs: Sequence[Job], lanes: int = LANES) -> None:
        self._pools: list[Pool] = []
        self._here = threading.local()
        self._workers = ThreadPoolExecutor(lanes, thread_name_prefix="lane")
        self._futures: dict[Job, Future[dict[str, Any]]] = {job: self._workers.submit(self._run, job) for job in jobs}

    def result(self, job: Job) -> dict[str, Any]:
        """Return what conform() returned on rank 0; raises what it raised."""
        return self._futures[job].result()

    def close(self) -> None:
        """Forget what has not begun, and end the pools."""
        self._workers.shutdown(wait=True, cancel_futures=True)
        for pool in self._pools:
            pool.close()

    def _run(self, job: Job) -> dict[str, Any]:
        pool = getattr(self._here, "pool", None)
        if pool is None or not pool.alive or pool.world != job.ranks:
            if pool is not None:
                pool.close()
            pool = self._here.pool = Pool(job.ranks)
            self._pools.append(pool)
        return pool.run(conform.conform, job.name, job.stages, job.dtype, job.optimizer, job.steps)[0]
