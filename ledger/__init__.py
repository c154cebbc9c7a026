"""The account: what a job will cost before it starts, and what the engine predicts and measures of one that runs."""

from __future__ import annotations

import importlib
from typing import Any

from .records import LedgerRow, OptimizerRecord, RunningJob, TrafficRow, UnitRecord
from .report import Ledger
from .states import predict_states
from .traffic import predict_traffic

# names of the calculator, which the engine does without -> the module that has them
_LATER = {
    "Job": ".job",
    "Layout": ".job",
    "ModelShape": ".shapes",
    "Request": ".plan",
    "account_of": ".show",
    "compare_run": ".verdict",
    "diff_runs": ".verdict",
    "make_plan": ".plan",
    "read_cluster": ".hardware",
    "read_shape": ".shapes",
    "step_time": ".step",
}

__all__ = [
    "Job",
    "Layout",
    "Ledger",
    "LedgerRow",
    "ModelShape",
    "OptimizerRecord",
    "Request",
    "RunningJob",
    "TrafficRow",
    "UnitRecord",
    "account_of",
    "compare_run",
    "diff_runs",
    "make_plan",
    "predict_states",
    "predict_traffic",
    "read_cluster",
    "read_shape",
    "step_time",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name], __name__), name)
