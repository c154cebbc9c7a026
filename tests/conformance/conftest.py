"""Runs the cases ahead of their tests, on several pools of ranks at once, and writes the table when asked."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from lanes import Job, Lanes  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-table", action="store_true", help="write docs/conformance.md from this run")


@pytest.fixture(scope="module")
def lanes(request: pytest.FixtureRequest) -> Iterator[Lanes]:
    """Return the outcomes of all selected tests of the file that name a job, already under way in the order of the tests."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]  # others may run elsewhere
    made = Lanes([Job(*found) for item in items if (found := item.callspec.params.get("job"))])
    yield made
    made.close()


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, str], dict[str, Any]]]:
    """Collect (case, dtype) -> what conform() returned, and write the table from it at the end."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    yield found
    if request.config.getoption("--write-table"):
        import table

        table.write(found)
