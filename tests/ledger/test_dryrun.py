"""The dry run: a script on fake tensors takes the bytes and collectives that the engine takes for real, and the calculator says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from dryrun_job import config_of, measured  # noqa: E402
from stateroom.ledger.dryrun.collect import report_of  # noqa: E402
from stateroom.ledger.dryrun.run import dry_run  # noqa: E402

JOB = str(HERE / "dryrun_job.py")
CONFIGS = [(stage, precision, gas) for stage in range(4) for precision, gas in (("fp32", 1), ("bf16", 1), ("bf16", 3))]


def dry(config, ranks, rank=0, **options):
    record = dry_run(JOB, [json.dumps(config)], ranks, rank, **options)
    return report_of(record, JOB)


@pytest.mark.parametrize(("stage", "precision", "gas"), CONFIGS)
def test_dry_run_takes_what_the_engine_takes(pools, stage, precision, gas):
    config = config_of(stage, precision, gas)
    (real, peak), _ = pools(2).run(measured, config)
    found = dry(config, 2, backend="gloo")
    rest = found.instants[0].states
    for row in real.states:
        assert rest.get(row.state, 0) == row.measured_bytes == row.predicted_bytes, row
    assert [(r.kind, r.state, r.counted_calls, r.counted_bytes, r.sent_bytes) for r in found.traffic] == [
        (r.kind, r.state, r.counted_calls, r.counted_bytes, r.sent_bytes) for r in real.traffic
    ]
    assert abs(found.peak.total / peak - 1) < 0.03, (found.peak, peak)
