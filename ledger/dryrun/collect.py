"""From what a dry run has seen to its report."""

from __future__ import annotations

from ..hardware.device import Cluster
from .beside import calculator_of
from .classes import rank_classes
from .report import INSTANTS, DryRun, StageFigures
from .run import host_bytes
from .watcher import Record


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
    records = record.stages or [record]
    batch = next((each.job.batch() for each in records if each.job is not None and each.job.batch()[1]), (0, 0))
    stages = tuple(_figures(each, model, cluster, batch) for each in records)
    own = stages[job.place.stage if record.stages else 0]
    if own.beside.job is not None and own.beside.job.layout.recompute == "full":
        notes.append("recomputation stops before a layer's last product, which backward does not need; the calculator counts whole layers")
    return DryRun(
        script=script,
        rank=job.rank,
        world=job.world,
        zero=job.placement.stage,
        steps=record.steps,
        own=own,
        stages=stages,
        seconds=record.seconds,
        host_bytes=host_bytes(),
        notes=tuple(notes),
    )


def _figures(record: Record, model: str | None, cluster: Cluster | None, batch: tuple[int, int]) -> StageFigures:
    job = record.job
    assert job is not None and record.account is not None
    return StageFigures(
        stage=job.place.stage,
        rank=job.rank,
        instants=tuple(record.instants[name] for name in INSTANTS if name in record.instants),
        on_drive=record.on_drive,
        classes=rank_classes(job),
        traffic=record.account.traffic,
        own=tuple((name, ranks, calls, size) for (name, ranks), (calls, size) in record.own.items()),
        flops=record.flops,
        beside=calculator_of(job, model, cluster, batch=batch),
    )
