"""What the calculator says of the job that a dry run has run: the same states, instants, traffic and FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..comm.axes import flows
from ..comm.tiers import drive_moves
from ..flops.stage import stage_flops
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
        states: (tier, state) -> bytes at rest. instants: bytes at each instant, without what is no tensor.
        traffic: (axis, kind, state) -> (calls, payload bytes) of a step.
        moves: ("read" or "written", state) -> bytes between a drive and memory.
        flops: of this rank in a step, attention counted in full; recomputed ones included.
        why: why there are none; "" when there are.
    """

    job: Job | None = None
    states: Mapping[tuple[str, str], float] = field(default_factory=dict)
    instants: Mapping[str, float] = field(default_factory=dict)
    traffic: Mapping[tuple[str, str, str], tuple[int, int]] = field(default_factory=dict)
    moves: Mapping[tuple[str, str], int] = field(default_factory=dict)
    flops: float | None = None
    why: str = ""


def calculator_of(
    running: RunningJob, model: str | None = None, cluster: Cluster | None = None, *, batch: tuple[int, int] = (0, 0)
) -> Beside:
    """Return the calculator's figures for a running job; they say why where it has none.

    Args:
        model: a name or file that gives the shape; by default it is read off the module.
        cluster: the devices; without it bytes and FLOPs are the same, and times are not asked for.
        batch: sequences and tokens a sequence, for a pipeline stage that sees no inputs.
    """
    try:
        return _figures(_job_of(running, model, cluster, batch), running.place.stage)
    except LedgerError as error:
        return Beside(why=str(error))


def _job_of(running: RunningJob, model: str | None, cluster: Cluster | None, batch: tuple[int, int]) -> Job:
    shape: ModelShape = running.shape() if model is None else read_shape(model)
    sequences, seq = running.batch() if running.batch()[1] else batch
    if not seq:
        raise LedgerError("the engine saw no token numbers, so the calculator does not know the length of a sequence")
    layout = replace(layout_of(running.config, running.world, shape), on_host=running.on_host)
    if sequences != layout.micro_batch:
        raise LedgerError(
            f"a forward had {sequences} sequences and the config says {layout.micro_batch}: the calculator follows the config"
        )
    cut = running.place.layers
    if cut:
        if sum(cut) != shape.layers:
            raise LedgerError(f"the stages hold {sum(cut)} equal layers and {shape.name} has {shape.layers}: name the model with --model")
        layout = replace(layout, cut=cut)
    return Job(shape, cluster or unnamed_cluster(running.world), layout, seq, "full")


def _figures(job: Job, stage: int) -> Beside:
    wrong = [text for text in problems(job) if not text.startswith("tp ")]
    if wrong:
        raise LedgerError("; ".join(wrong))
    states = {(tier, name): size for tier, name, size, _ in state_rows(job, stage)}
    instants = {name: tensors_of(account) for name, account in course(job, stage).instants}
    traffic = {
        (flow.axis, flow.primitive, flow.state): (round(flow.calls), round(flow.calls * flow.payload_bytes)) for flow in flows(job, stage)
    }
    return Beside(job, states, instants, traffic, drive_moves(job, stage), stage_flops(job, stage))
