"""Jobs on the hosts of namespaces.py: how they are started, what their scripts do, and what is waited for."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from namespaces import Hosts

ENV = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
ENV |= {"STATEROOM_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
LAUNCHER = [sys.executable, "-m", "stateroom.launcher"]


def wait_until(true: Callable[[], object], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.05)


def command(hosts: Hosts, folder: Path, *options: str, names: list[str] | None = None) -> list[str]:
    (folder / "hosts").write_text("".join(f"{name} slots=1\n" for name in names or hosts.names))
    return [*LAUNCHER, "--hostfile", "hosts", "--launcher_args", f"-F {hosts.ssh_config}", *options]


def run(hosts: Hosts, folder: Path, *words: str, names: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    whole = command(hosts, folder, *words, names=names)
    return subprocess.run(whole, cwd=folder, env=ENV, capture_output=True, text=True, timeout=120)


@contextlib.contextmanager
def started(hosts: Hosts, folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command(hosts, folder, *words), cwd=folder, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for place in range(hosts.count):
            hosts.mend(place)


WAIT = """
import os, signal, sys, time
def note(name, text=""):
    open(f"{name}-{os.environ['RANK']}.part", "w").write(text)
    os.rename(f"{name}-{os.environ['RANK']}.part", f"{name}-{os.environ['RANK']}")
if "save" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: (note("saved"), sys.exit(0)))
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGUSR1, lambda *_: note("usr1"))
note("pid", str(os.getpid()))
for _ in range(2000):
    time.sleep(0.05)
"""


def all_there(folder: Path, name: str, count: int = 3) -> Callable[[], bool]:
    return lambda: all((folder / f"{name}-{rank}").exists() for rank in range(count))


def alive(folder: Path, rank: int) -> bool:
    try:
        return psutil.Process(int((folder / f"pid-{rank}").read_text())).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


SHOW = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NCCL_DEBUG", "MINE", "FILED")
print(json.dumps({"argv": sys.argv, "cwd": os.getcwd(), "python": sys.executable, **{n: os.environ.get(n) for n in names}}))
"""


MEET = """
import os
import torch
import stateroom
from stateroom import comm
stateroom.init_distributed()
total = torch.tensor(2.0 ** comm.get_rank())
comm.all_reduce(total)
print(int(total), os.environ["TORCHELASTIC_RESTART_COUNT"])
"""
