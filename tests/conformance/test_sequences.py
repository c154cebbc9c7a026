"""Every order of forwards and backwards on models with a mechanism of their own: the same numbers as in plain PyTorch."""

from __future__ import annotations

import pytest
from catalogue import COMBINATIONS
from lanes import Job


@pytest.mark.full
@pytest.mark.parametrize("job", [Job(name, steps=4) for name in COMBINATIONS], ids=str)
def test_sequence(lanes, job):
    for stage, figures in lanes.result(job)["stages"].items():
        assert max(figures["loss"], figures["weights"]) <= 2e-5, (stage, figures)
        assert figures["moved"] > 1e-4, (stage, figures)
        assert not figures["held"], (stage, figures)
