"""Rank processes of their own: the alias must be on before transformers is imported, and stays on."""

from __future__ import annotations

import pytest
from ranks import Pools


@pytest.fixture(scope="session")
def hf_ranks():
    """Two ranks in which `deepspeed` means Stateroom."""
    made = Pools()
    yield made
    made.close()
