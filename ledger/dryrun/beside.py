"""What the calculator says of the job that a dry run has run: the same states, instants, traffic and FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..comm.axes import flows
from ..flops.layers import step_flops
from ..hardware.device import Cluster, unnamed_cluster
from ..job import Job, problems
from ..memory.life import course, tensors_of
from ..memory.rank import state_rows
from ..plan.config import layout_of
from ..problems import LedgerError
from ..records import RunningJob
from ..shapes.load import read_shape
from ..shapes.shape import ModelShape


@dataclass(frozen=True)
class Beside:
    """The calculator's figures for one rank.

    Attributes:
        states: bytes at rest. instants: bytes at each instant, without what is no tensor.
        traffic: (axis, kind, state) -> (calls, payload bytes) of a step.
        flops: of this rank in a step, attention counted in full; recomputed ones included.
        why: why there are none; "" when there are.
    """

    job: Job | None = None
    states: Mapping[str, float] = field(default_factory=dict)
    instants: Mapping[str, float] = field(default_factory=dict)
    traffic: Mapping[tuple[str, str, str], tuple[int, int]] = field(default_factory=dict)
    flops: float | None = None
    why: str = ""


def calculator_of(running: RunningJob, model: str | None = None, cluster: Cluster | None = None) -> Beside:
    """Return the calculator's figures for a running job; they say why where it has none.

    Args:
        model: a name or file that gives the shape; by default it is read off the module.
        cluster: the devices; without it bytes and FLOPs are the same, and times are not asked for.
    """
    try:
        return _figures(_job_of(running, model, cluster))
    except LedgerError as error:
        return Beside(why=str(error))


def _job_of(running: RunningJob, model: str | None, cluster: Cluster | None) -> Job:
    shape: ModelShape = read_shape(model if model is not None else running.module)
    sequences, seq = running.batch()
    if not seq:
        raise LedgerError("the engine saw no token numbers, so the calculator does not know the length of a sequence")
    layout = layout_of(running.config, running.world)
    if sequences != layout.micro_batch:
        raise LedgerError(
            f"a forward had {sequences} sequences and the config says {layout.micro_batch}: the calculator follows the config"
        )
    return Job(shape, cluster or unnamed_cluster(running.world), layout, seq, "full")


def _figures(job: Job) -> Beside:
    wrong = [text for text in problems(job) if not text.startswith("tp ")]
    if wrong:
        raise LedgerError("; ".join(wrong))
    states = {name: size for _, name, size, _ in state_rows(job, 0)}
    instants = {name: tensors_of(account) for name, account in course(job, 0).instants}
    traffic = {
        (flow.axis, flow.primitive, flow.state): (round(flow.calls), round(flow.calls * flow.payload_bytes)) for flow in flows(job, 0)
    }
    layout = job.layout
    flops = step_flops(job.shape, job.seq, layout.micro_batch * layout.accumulation, attention="full", recompute=layout.recompute)
    return Beside(job, states, instants, traffic, flops.hardware)
