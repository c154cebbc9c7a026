"""The peers are only compared with where there is an interpreter that has them; elsewhere nothing here is collected."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest


def peer_python() -> str | None:
    """The interpreter that can import deepspeed: STATEROOM_PEER_PYTHON, or this one."""
    named = os.environ.get("STATEROOM_PEER_PYTHON")
    if named:
        return named
    return sys.executable if importlib.util.find_spec("deepspeed") else None


PEER = peer_python()
collect_ignore_glob = [] if PEER else ["test_*.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if PEER is None:
        terminalreporter.write_line("tests/peers: left out, no deepspeed here; run `make test-peers`, or set STATEROOM_PEER_PYTHON")


@pytest.fixture(scope="session")
def peer() -> str:
    assert PEER is not None
    return PEER
