"""A start of the ranks after another one, in a store that the other left full: all get the same fresh name."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from stateroom.errors import RankError
from stateroom.parallel.distributed import agree_on_attempt, free_port

LIMIT = timedelta(seconds=20)


def together(store: dist.Store, world: int) -> list[str]:
    names: list[str] = [""] * world

    def join(rank: int) -> None:
        names[rank] = agree_on_attempt(store, rank, world, LIMIT)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in reversed(range(world))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return names


def test_each_start_has_a_name_of_its_own_whatever_was_left() -> None:
    store = dist.HashStore()
    store.set("stateroom/question/1", "asked-by-a-rank-that-died-before-it-was-answered")
    seen = set()
    for world in (3, 3, 2, 4, 1):  # hosts come and go
        names = together(store, world)
        assert len(set(names)) == 1 and names[0] and names[0] not in seen
        seen.add(names[0])


def test_a_rank_that_does_not_come_is_missed_in_time() -> None:
    with pytest.raises(RankError, match="only 1 of 2 ranks came"):
        agree_on_attempt(dist.HashStore(), 0, 2, timedelta(seconds=0.1))
    with pytest.raises(RankError, match="rank 0 did not answer rank 1"):
        agree_on_attempt(dist.HashStore(), 1, 2, timedelta(seconds=0.1))


JOB = """
import os, time
import torch
import stateroom
from stateroom import comm
stateroom.init_distributed()
total = torch.tensor(2.0 ** comm.get_rank())
comm.all_reduce(total)
again, rank = os.path.exists("failed"), comm.get_rank()
print(f"RESULT {int(total)} {again} {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)
if not again:
    comm.barrier()
    if rank == 1:
        open("failed", "w").close()
        os._exit(9)
    time.sleep(100)  # this one does not fail, so its agent counts no restart
"""


@pytest.mark.full
def test_after_a_restart_under_plain_torchrun_hosts_need_not_count_alike(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    env = {**os.environ, "STATEROOM_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--max-restarts=1"]
    run += [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=x", "--local-addr=127.0.0.1", "job.py"]
    agents = [subprocess.Popen(run, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for _ in range(2)]
    try:
        outs = [agent.communicate(timeout=100)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    lines = sorted(line.split() for out in outs for line in out.splitlines() if line.startswith("RESULT"))
    assert [agent.returncode for agent in agents] == [0, 0]
    assert [line[:3] for line in lines] == [["RESULT", "3", "False"]] * 2 + [["RESULT", "3", "True"]] * 2
