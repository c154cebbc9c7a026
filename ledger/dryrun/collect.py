"""From what a dry run has seen to its report."""

from __future__ import annotations

from ..hardware.device import Cluster
from .beside import calculator_of
from .classes import rank_classes
from .report import INSTANTS, DryRun
from .run import Record, host_bytes


def report_of(record: Record, script: str, model: str | None = None, cluster: Cluster | None = None) -> DryRun:
    """Return the report of a dry run that took at least one step.

    Args:
        model: gives the calculator its shape; by default the module does. cluster: the devices that the job must fit.
    """
    job = record.job
    assert job is not None
    notes = []
    if record.steps < 2:
        notes.append("the first step has no optimizer states before its update: take 2 steps (--steps) for those of every later one")
    if record.engines > 1:
        notes.append(
            f"the script built {record.engines} engines; the figures are those of the first, the others' states count as temporaries"
        )
    beside = calculator_of(job, model, cluster)
    if beside.job is not None and beside.job.layout.recompute == "full":
        notes.append("recomputation stops before a layer's last product, which backward does not need; the calculator counts whole layers")
    ledger = job.ledger()
    return DryRun(
        script=script,
        rank=job.rank,
        world=job.world,
        stage=job.placement.stage,
        steps=record.steps,
        instants=tuple(record.instants[name] for name in INSTANTS if name in record.instants),
        classes=rank_classes(job),
        traffic=ledger.traffic,
        own=tuple((name, ranks, calls, size) for (name, ranks), (calls, size) in record.own.items()),
        axis="dp",
        flops=record.flops,
        beside=beside,
        seconds=record.seconds,
        host_bytes=host_bytes(),
        notes=tuple(notes),
    )
