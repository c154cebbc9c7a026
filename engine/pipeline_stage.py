"""One stage's work on one batch: the executor between the user's layers and the engine's gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..pipe.executor import Executor, MicroBatch, Record
from ..pipe.post import Post
from ..pipe.schedules import Schedule
from ..zero.unit import Unit

if TYPE_CHECKING:
    from .pipeline import PipelineEngine


@dataclass
class Outcome:
    """What a stage's run left: its record, and outputs of the last part where they were asked for."""

    record: Record
    outputs: dict[int, Any]


def run_stage(
    engine: PipelineEngine,
    plan: Schedule,
    post: Post,
    micro_batches: Sequence[MicroBatch],
    *,
    trains: bool,
    outputs: bool,
    compute_loss: bool,
) -> Outcome:
    """Run one batch through this stage; gradients are left in the units, reduced by none or, if they are sharded, by all."""
    stage = StageWork(engine, len(micro_batches), compute_loss=compute_loss)
    executor = Executor(plan, engine.cut.stage, stage, post, micro_batches, stage.loss_of, stage if trains else None)
    executor.keep_outputs = outputs
    try:
        record = executor.run(lambda: engine.links.wait_s)
        engine.links.flush()
    except Exception as error:
        now = executor.now
        if now is not None:
            note = getattr(error, "add_note", None)  # Python 3.11 on
            if note is not None:
                note(f"(stage {engine.cut.stage}, {now.kind} of micro-batch {now.microbatch}, schedule {plan.name})")
        raise
    return Outcome(record, executor.outputs)


class StageWork:
    """Runs parts under the engine's precision, and collects what their backward leaves."""

    def __init__(self, engine: PipelineEngine, count: int, *, compute_loss: bool) -> None:
        self._engine, self._compute_loss = engine, compute_loss
        self._weights: dict[int, list[nn.Parameter]] = {}  # by chunk; within one batch nothing is frozen, put in or taken out
        self._units: dict[int, list[Unit]] = {}
        backward = engine.sharded.backward
        ranks = 1 if engine.config.gradient_allreduce_op == "sum" else engine.dp.world
        backward.factor = 1.0 / (ranks * count)
        backward.sync = False  # each unit is reduced once, by the step, or after each backward where gradients are sharded
        backward.plain_refusal = None
        self._reduces = engine.sharded.placement.gradients.sharded and engine.dp.world > 1

    def run_part(self, chunk: int, payload: Any, inputs: Any) -> Any:
        """Run one chunk of the model."""
        with self._engine._context:
            return self._engine.cut.parts.run_part(chunk, payload, inputs)

    def loss_of(self, output: Any, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scaled loss and the loss of the last part's output."""
        if not self._compute_loss:
            nothing = torch.zeros((), device=self._engine.device)
            return nothing, nothing
        with self._engine._context:
            return self._engine.loss_of_part(output, micro_batch)

    def weights(self, chunk: int) -> Sequence[nn.Parameter]:
        """Return the trained weights of a chunk."""
        if chunk not in self._weights:
            self._weights[chunk] = self._engine.cut.weights(chunk)
        return self._weights[chunk]

    def _units_of(self, chunk: int) -> list[Unit]:
        if chunk not in self._units:
            self._units[chunk] = self._engine.cut.units(chunk, self._engine.sharded.backward.units)
        return self._units[chunk]

    @contextmanager
    def backward(self, chunk: int) -> Iterator[None]:
        """Collect the gradients of one backward, in full or for weights alone."""
        backward = self._engine.sharded.backward
        backward.announced = True
        backward.begin()
        try:
            yield
            units = self._units_of(chunk)
            backward.collect_left(units)
        except BaseException:
            backward.abandon()
            raise
        backward.end()
        if self._reduces:
            mine = {id(unit) for unit in units}
            backward.flush([id(unit) in mine for unit in backward.units])
