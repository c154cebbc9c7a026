"""Memory that a step frees is not paged in again by the next one, unless the user steers malloc."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from stateroom.environment import malloc_is_steered
from stateroom.parallel.host_memory import give_back_freed_memory, keep_freed_memory

PROGRAM = """
import resource, sys, torch
from stateroom.parallel.host_memory import give_back_freed_memory, keep_freed_memory
COUNT = 12_000_000

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def cycle():
    flat = torch.zeros(COUNT)
    storage = flat.untyped_storage()
    for _ in range(3):
        storage.resize_(0)
        storage.resize_(4 * COUNT)
        flat.fill_(1.0)

if "keep" in sys.argv:
    assert keep_freed_memory()
for _ in range(3):  # small allocations find their places beside the large one
    cycle()
before = faults()
cycle()
print(faults() - before)
kept = resident()
give_back_freed_memory()
print(kept - resident())
"""


def _run(*arguments: str) -> list[int]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=120, check=True)
    return [int(line) for line in done.stdout.split()]


@pytest.mark.skipif(not hasattr(os, "confstr") or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""), reason="only glibc knows how")
def test_buffers_that_come_and_go_are_paged_in_once_and_given_back_when_told() -> None:
    pages = 48_000_000 // os.sysconf("SC_PAGESIZE")
    default, kept = _run(), _run("keep")
    assert default[0] > 2 * pages  # or the default has learnt it and this is not needed any more
    assert kept[0] < pages // 10
    assert kept[1] > 40_000_000


def test_another_c_library_changes_nothing() -> None:
    assert not keep_freed_memory(object())
    give_back_freed_memory(object())


@pytest.mark.parametrize(
    "env",
    [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"MALLOC_MMAP_THRESHOLD_": "1"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=65536"}],
)
def test_the_users_own_settings_of_malloc_are_seen(env: dict[str, str]) -> None:
    assert malloc_is_steered(env)
    assert not malloc_is_steered({"MALLOC_ARENA_MAX": "1", "GLIBC_TUNABLES": "glibc.rtld.nns=4"})
