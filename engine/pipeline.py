"""PipelineEngine: a whole optimizer step of a model cut into stages; every rank runs its stage's part of the schedule."""

from __future__ import annotations

from typing import Any

import torch

from ..checkpoint.parts import Part
from ..errors import EngineError
from ..ledger import TrafficRow
from ..ledger.records import PIPELINE_AXIS
from ..parallel.collectives import Traffic
from ..parallel.links import Links
from ..pipe.executor import MicroBatch, Record
from ..pipe.post import ACTIVATIONS, GRADIENTS, Post
from ..pipe.routes import messages, received_bytes, sent_bytes
from ..pipe.schedules import Schedule, schedule
from ..pipe.ties import Ties
from .batches import cast_floating, loss_of, to_device
from .pipeline_batches import Agreement, batch_kinds, pull, split_batch
from .pipeline_setup import Cut
from .pipeline_stage import run_stage
from .pipeline_surface import PipelineSurface
from .recording import count_tokens
from .reporting import step_traffic


class PipelineEngine(PipelineSurface):
    """Runs a model that is cut into stages. Built by stateroom.initialize().

    Attributes:
        cut: which ranks are which stages, and the model's parts. last_batch: what the last batch cost this stage.
    """

    def __init__(self, *args: Any, cut: Cut, links: Links, ties: Ties, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cut, self.links, self.ties = cut, links, ties
        if self.loss_fn is None:
            self.loss_fn = cut.loss_fn
        self.last_batch: Record | None = None
        self._schedules: dict[tuple[int, bool], Schedule] = {}
        self._known: dict[Any, Any] = {}
        self._kinds: set[Any] = set()
        self._iterator: Any = None
        self._batch_fn: Any = None
        self._broken = ""
        self._batch_kinds: list[Any] = []
        self._sent: dict[Any, Traffic] = {}  # to and from other stages, in the last step
        if self.optimizer is not None:
            self.optimizer.on_reduced = ties.share

    # ---- a step

    def train_batch(self, data_iter: Any = None) -> torch.Tensor:  # type: ignore[override]
        """Run one optimizer step: as many micro-batches as accumulation steps, through all stages.

        Every rank calls it. The stages that hold the first and the last part of the model take batches (inputs, labels) from
        `data_iter`, which must be the same on both; the others may pass None.

        Returns:
            the mean loss over micro-batches and data-parallel ranks, on every rank: a scalar tensor.

        Raises:
            StopIteration: every rank that takes batches had none left.
            EngineError, RankError: something failed on some rank; on every rank, with the first cause.
        """
        self._check_usable()
        if self.optimizer is None:
            raise EngineError("this engine has no optimizer: pass optimizer= to initialize, or an 'optimizer' section in the config")
        if self.config.pipeline.schedule == "inference":
            raise EngineError("pipeline.schedule is inference, which has no backward: choose another one to train, 1f1b for example")
        self.train()
        self._thaw()
        began = self.timers.now()
        count = self.gradient_accumulation_steps()
        before = {key: Traffic(t.calls, t.num_bytes, t.sent_bytes) for key, t in self.links.traffic.items()}
        losses, _ = self._run(self._source(data_iter), count, trains=True)
        self._sent = step_traffic(before, self.links.traffic, (ACTIVATIONS, GRADIENTS))
        self.timers.add("schedule", began)
        loss = losses.mean()
        self._window_loss, self._window_count = loss.float().to(self.device), 1
        self.losses = self._window_loss
        self._seen_passes = self.sharded.backward.total_passes
        self.micro_steps += count
        self._step_applied = False
        self._update({})
        return self.losses

    def eval_batch(  # type: ignore[override]
        self,
        data_iter: Any = None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Run batches forward, without gradients; every rank calls it.

        Args:
            return_logits: also return the last part's outputs, a list with one item a micro-batch; None on other stages.
            compute_loss: False: return these outputs alone.
            reduce_output: "avg" or "sum" over micro-batches; None: a loss for each micro-batch, [num_micro_batches].
            bcast_loss: has no effect: the loss is on every rank anyway.
            num_micro_batches: default the accumulation steps.

        Returns:
            the loss, averaged over data-parallel ranks, on every rank.
        """
        self._check_usable()
        if reduce_output not in ("avg", "sum", None):
            raise EngineError(f"eval_batch(reduce_output={reduce_output!r}): use 'avg', 'sum' or None")
        was_training = self.training
        self.eval()
        try:
            with torch.no_grad():
                count = num_micro_batches or self.gradient_accumulation_steps()
                wants_outputs = return_logits or not compute_loss
                losses, outputs = self._run(self._source(data_iter), count, trains=False, outputs=wants_outputs, compute_loss=compute_loss)
        finally:
            self.train(was_training)
        shown = outputs if self.is_last_stage() else None
        if not compute_loss:
            return shown
        loss = losses.float().to(self.device)
        loss = loss if reduce_output is None else loss.sum() if reduce_output == "sum" else loss.mean()
        return (loss, shown) if return_logits else loss

    # ---- parts of the model for checkpoints

    @property
    def part(self) -> Part:
        """Which part of the model this rank has, for checkpoints."""
        copies = self.cut.grid.ranks[self.cut.stage]
        stored = {id(param): name for tie in self.ties.ties for name, param in tie.params if tie.stages[0] != self.cut.stage}
        foreign = tuple(f"{tie.name}." for tie in self.ties.ties if tie.params and tie.stages[0] != self.cut.stage)
        foreign += tuple(getattr(self.cut.parts, "foreign_buffers", ()))
        return Part(self.dp, copies, stored, foreign, is_whole=self.cut.stages == 1)

    def stage_traffic(self) -> list[TrafficRow]:
        """Return what the last step sent to other stages and received from them, and what its schedule and shapes predict."""
        if not self._sent or len(self._batch_kinds) != self.gradient_accumulation_steps():
            return []
        plan, kinds = self._plan(len(self._batch_kinds), True), self._batch_kinds
        rows = []
        for way, of in (("send", sent_bytes), ("receive", received_bytes)):
            predicted = of(plan, self.cut.stage, lambda part, number: self._known[part, kinds[number]])
            for kind, state in (("F", ACTIVATIONS), ("G", GRADIENTS)):
                seen = self._sent.get((way, state), Traffic())
                calls, num_bytes = predicted[kind]
                if calls or seen.calls:
                    rows.append(TrafficRow(way, state, calls, seen.calls, num_bytes, seen.num_bytes, seen.sent_bytes, PIPELINE_AXIS))
        return rows

    # ---- one run of a schedule

    def _run(
        self, source: Any, count: int, *, trains: bool, outputs: bool = False, compute_loss: bool = True
    ) -> tuple[torch.Tensor, list[Any] | None]:
        """Run `count` micro-batches; return the losses [count], averaged over data-parallel ranks, and outputs where they are.

        All ranks agree before (has everybody batches?) and after (did everybody come through?), so that no rank waits for one
        that raised.
        """
        plan = self._plan(count, trains)
        agreement = Agreement(self.comm, self.cut)
        micro_batches = agreement.start(lambda: self._pull(source, count), count)
        kinds = [(self.training, trains, kind) for kind in agreement.kinds]
        self._settle_kinds(kinds)
        self._batch_kinds = kinds
        post = Post(
            self.links,
            self.cut.chain,
            self.cut.stage,
            messages(plan),
            kinds.__getitem__,
            self._known,
            always_tell=self.config.pipeline.dynamic_shape or self.cut.dynamic_shape,
        )
        found: Any = None
        with agreement.guard(self._sever):
            found = run_stage(self, plan, post, micro_batches, trains=trains, outputs=outputs, compute_loss=compute_loss)
        try:
            losses = agreement.end(found, count)
        except Exception as error:  # on all ranks alike, those too whose own stages came through
            if not self._broken:
                self._sever(f"{type(error).__name__}: {error}")
            if agreement.all_know:
                self._mend()
            raise
        self.last_batch = found.record
        return losses, [found.outputs[number] for number in sorted(found.outputs)] if outputs else None

    def _plan(self, count: int, trains: bool) -> Schedule:
        key = (count, trains)
        if key not in self._schedules:
            section = self.config.pipeline
            self._schedules[key] = schedule(section.schedule, self.cut.stages, count, self.cut.chunks, forward_only=not trains)
        return self._schedules[key]

    def _pull(self, source: Any, count: int) -> tuple[list[MicroBatch], list[int]]:
        """Take this stage's micro-batches, and say of which kinds their inputs are."""
        cut = self.cut
        if not (cut.takes_inputs or cut.takes_labels):
            return [MicroBatch() for _ in range(count)], []
        found = []
        for batch in pull(source, count):
            inputs, labels = split_batch(batch if self._batch_fn is None else self._batch_fn(batch), self.loss_fn is not None, cut)
            inputs = to_device(inputs, self.device) if cut.takes_inputs else None
            if self.config.fp16.enabled and self.config.fp16.auto_cast:
                inputs = cast_floating(inputs, torch.float16)
            found.append(MicroBatch(inputs, to_device(labels, self.device) if cut.takes_labels else None))
            if cut.stage == 0 and self.training:
                count_tokens(self, (inputs,), {})
        return found, batch_kinds(found) if cut.takes_inputs else []

    def _settle_kinds(self, kinds: list[Any]) -> None:
        """Forget shapes when there are too many kinds of batches; every stage sees the same kinds, so all forget together."""
        self._kinds.update(kinds)
        if len(self._kinds) > 256:
            self.reset_activation_shape()
            self._kinds.update(kinds)

    def loss_of_part(self, output: Any, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss as backward needs it, and the loss itself, of the last part's output.

        Raises:
            EngineError: it is no scalar.
        """
        loss = loss_of(output) if self.loss_fn is None else self.loss_fn(output, micro_batch.labels)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise EngineError(f"loss_fn must return a scalar tensor, got {what}; reduce it first, for example loss.mean()")
        shown = loss.detach().float().reshape(())
        bad = torch.isnan(shown)
        if torch.is_grad_enabled():
            self._bad_loss = bad if self._bad_loss is None else self._bad_loss | bad
        return (loss if self.scaler.scale == 1.0 else loss.float() * self.scaler.scale), shown

    def _sever(self, reason: str) -> None:
        """Cut this rank's connections, so that ranks that wait for it raise instead."""
        self._broken = reason
        self.links.close()
        if self._copies_meet:
            for unit in self.sharded.units:
                unit.drop_pending()
            self.dp.sever()
            self.cut.close_copies()

    @property
    def _copies_meet(self) -> bool:
        """Whether the copies of a stage exchange gradients (and weights) within the schedule."""
        return self.sharded.placement.gradients.sharded and self.dp is not self.comm

    def _mend(self) -> None:
        """Connect the stages again after a batch that failed, and forget what it left; every rank must call it."""
        try:
            self.links.open()
            if self._copies_meet:
                self.dp.renew(self.cut.connect_copies())
        except RuntimeError:  # another rank is gone since: what is raised already says why the batch failed
            return
        self.sharded.backward.abandon()
        self.zero_grad()
        self.reset_activation_shape()
        self.tokens = 0
        self._broken = ""

    def _check_usable(self) -> None:
        self._check_alive()
        if self._broken:
            raise EngineError(
                f"this engine's stages are disconnected since a rank was lost in a batch ({self._broken}); destroy() it, start the job "
                "anew and go on from a checkpoint"
            )

    def reset_activation_shape(self) -> None:
        """Forget the shapes that stages told each other; every rank must call it. Needed only where shapes change by value."""
        self._known.clear()
        self._kinds.clear()

    def destroy(self) -> None:
        """Take all hooks off and free what the engine holds; no rank waits for another."""
        if self._destroyed:
            return
        super().destroy()
        self.links.close()
        self.ties.close()
        self.cut.close()
