"""Shared fixtures: pools of rank processes, and the cases of real users."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
sys.path.insert(0, str(HERE))

from ranks import Pools  # noqa: E402


@pytest.fixture(scope="session")
def pools():
    made = Pools()
    yield made
    made.close()
