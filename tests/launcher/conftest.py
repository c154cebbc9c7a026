"""Three hosts for all tests that need some; none of a job's processes may be left on them after a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from host_jobs import wait_until
from namespaces import Hosts, unavailable


@pytest.fixture(scope="session")
def three_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    why_not = unavailable()
    if why_not:
        pytest.skip(why_not)
    made = Hosts(tmp_path_factory.mktemp("hosts"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def hosts(three_hosts: Hosts) -> Iterator[Hosts]:
    yield three_hosts
    wait_until(lambda: not any(three_hosts.commands(place) for place in range(three_hosts.count)), 10)
