"""Shared fixtures: pools of rank processes, and the cases of real users."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
sys.path.insert(0, str(HERE))
if hasattr(os, "SCHED_BATCH"):
    # A rank holds gloo's lock while it sends. If the receiver it wakes takes its core, gloo's own thread spins on that lock until the
    # rank runs again: on two cores that was half of all time. Batch processes, and whatever they start, are not interrupted so.
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

from ranks import Pools  # noqa: E402


@pytest.fixture(scope="session")
def pools():
    made = Pools()
    yield made
    made.close()
