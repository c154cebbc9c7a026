"""Runs one stage's instruction list: forwards, whole and split backwards, and what travels between them.

torch's own runtime (torch.distributed.pipelining, 2.13) fixes shapes at the first step, refuses dicts, keeps no tied weights
equal, and leaves the other ranks waiting when a stage raises. So the lists, among them torch's, are run here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from ..ledger.pipeline import Instruction
from .payload import Spec, put_together, take_apart
from .post import Post
from .schedules import Schedule
from .split_backward import backward_for_inputs, backward_for_weights, presentable


class Parts(Protocol):
    """A model of which this stage holds some parts."""

    def run_part(self, chunk: int, payload: Any, inputs: Any) -> Any:
        """Run this stage's part number `chunk` on what the part before it returned; the first part gets the batch's inputs."""


class Gradients(Protocol):
    """Where a backward leaves the weights' gradients."""

    def backward(self, chunk: int) -> AbstractContextManager[None]:
        """Collect what is left on the weights of a chunk while the context runs."""

    def weights(self, chunk: int) -> Sequence[nn.Parameter]:
        """Return the trained weights of a chunk."""


@dataclass
class MicroBatch:
    """What a stage needs of a micro-batch besides messages; None where it needs nothing."""

    inputs: Any = None
    labels: Any = None


@dataclass
class Span:
    """One instruction as it ran: seconds on this rank's clock; `waited` of them for messages."""

    instruction: Instruction
    start: float
    end: float
    waited: float


@dataclass
class Record:
    """What a batch cost this stage: its spans, the most activations that were held at once, and the losses if they are here."""

    spans: list[Span] = field(default_factory=list)
    held: int = 0
    losses: list[torch.Tensor] = field(default_factory=list)

    def idle_share(self) -> float:
        """Return the share of the time from first to last instruction in which this stage did not compute."""
        if not self.spans:
            return 0.0
        busy = sum(span.end - span.start - span.waited for span in self.spans)
        return 1 - busy / (self.spans[-1].end - self.spans[0].start)


@dataclass
class _Live:
    """A micro-batch in a part between its forward and its last backward."""

    inputs: list[torch.Tensor]  # those that want a gradient
    outputs: list[torch.Tensor]  # those that get one
    is_loss: bool = False
    groups: list[Any] | None = None  # between the two halves of a backward


class Executor:
    """Runs batches through one stage.

    Args:
        parts: the model. loss_of: (output of the last part, micro-batch) -> scalar loss, scaled as the backward needs it, and the
            loss itself, detached.
    """

    def __init__(
        self,
        schedule: Schedule,
        stage: int,
        parts: Parts,
        post: Post,
        micro_batches: Sequence[MicroBatch],
        loss_of: Callable[[Any, MicroBatch], tuple[torch.Tensor, torch.Tensor]],
        gradients: Gradients | None,
    ) -> None:
        self._schedule, self._stage, self._parts, self._post = schedule, stage, parts, post
        self._micro_batches, self._loss_of, self._gradients = micro_batches, loss_of, gradients
        self._live: dict[tuple[int, int], _Live] = {}
        self._near: dict[tuple[int, int], Any] = {}  # payloads between two parts of this stage
        self._near_gradients: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.record = Record()
        self.now: Instruction | None = None
        self.outputs: dict[int, Any] = {}  # of the last part, when asked for
        self.keep_outputs = False
        self._losses: dict[int, torch.Tensor] = {}

    def run(self, waited: Callable[[], float]) -> Record:
        """Run the list to its end.

        Args:
            waited: seconds spent waiting for messages so far.
        """
        work = {"F": self._forward, "B": self._backward, "I": self._backward_inputs, "W": self._backward_weights}
        for instruction in self._schedule.rows[self._stage]:
            self.now = instruction
            start, before = time.perf_counter(), waited()
            work[instruction.kind](instruction)
            self.record.spans.append(Span(instruction, start, time.perf_counter(), waited() - before))
            self.record.held = max(self.record.held, len(self._live))
        self.now = None
        self.record.losses = [self._losses[number] for number in sorted(self._losses)]
        return self.record

    # ---- forward

    def _forward(self, each: Instruction) -> None:
        part, number = self._schedule.part(self._stage, each.chunk), each.microbatch
        micro_batch = self._micro_batches[number]
        payload, wanting = self._inputs(part, number)
        output = self._parts.run_part(each.chunk, payload, micro_batch.inputs)
        trains = self._gradients is not None
        if part + 1 == self._schedule.parts:
            scaled, loss = self._loss_of(output, micro_batch)
            self._losses[number] = loss
            if self.keep_outputs:
                self.outputs[number] = output
            if trains:
                self._live[each.chunk, number] = _Live(wanting, [scaled] if scaled.requires_grad else [], is_loss=True)
            return
        if trains:
            spec, tensors = take_apart(output)
            shown = [presentable(tensor) if tensor.requires_grad else tensor for tensor in tensors]
            self._live[each.chunk, number] = _Live(wanting, [tensor for tensor in shown if tensor.requires_grad])
            output = put_together(spec, shown)
        self._pass_on(part + 1, number, output)

    def _inputs(self, part: int, number: int) -> tuple[Any, list[torch.Tensor]]:
        if part == 0:
            return self._micro_batches[number].inputs, []
        before = self._schedule.home(part - 1)
        if before == self._stage:
            spec, tensors = self._near.pop((part, number))
            payload: Any = put_together(spec, tensors)
        else:
            spec, payload = self._post.payload(part, number, before)
        return (payload, []) if self._gradients is None else _entering(spec, payload)

    def _pass_on(self, part: int, number: int, payload: Any) -> None:
        to = self._schedule.home(part)
        if to == self._stage:
            spec, tensors = take_apart(payload)
            self._near[part, number] = (spec, [tensor.detach().clone() for tensor in tensors])  # layers may write into what they get
        else:
            self._post.send_payload(part, number, to, payload)

    # ---- backward

    def _gradients_of(self, live: _Live, part: int, number: int) -> list[torch.Tensor] | None:
        """Return the gradients of a part's outputs; None for a loss."""
        if live.is_loss:
            return None
        if not live.outputs:
            return []
        after = self._schedule.home(part + 1)
        if after == self._stage:
            return self._near_gradients.pop((part, number))
        return self._post.gradients(part, number, after)

    def _backward(self, each: Instruction) -> None:
        part, number = self._schedule.part(self._stage, each.chunk), each.microbatch
        live = self._live.pop((each.chunk, number))
        gradients = self._gradients_of(live, part, number)
        assert self._gradients is not None
        with self._gradients.backward(each.chunk):
            if live.outputs:
                torch.autograd.backward(live.outputs, gradients)
        self._return(part, number, live.inputs)

    def _backward_inputs(self, each: Instruction) -> None:
        live = self._live[each.chunk, each.microbatch]
        if not live.inputs or not live.outputs:  # nobody waits for a gradient: nothing to split off
            self._backward(each)
            return
        part, number = self._schedule.part(self._stage, each.chunk), each.microbatch
        gradients = self._gradients_of(live, part, number)
        assert self._gradients is not None
        live.groups = backward_for_inputs(live.outputs, gradients, live.inputs, self._gradients.weights(each.chunk))
        self._return(part, number, live.inputs)
        live.inputs = live.outputs = []

    def _backward_weights(self, each: Instruction) -> None:
        live = self._live.pop((each.chunk, each.microbatch), None)
        if live is None:
            return
        assert self._gradients is not None and live.groups is not None
        with self._gradients.backward(each.chunk):
            backward_for_weights(self._gradients.weights(each.chunk), live.groups)

    def _return(self, part: int, number: int, inputs: Sequence[torch.Tensor]) -> None:
        """Give the gradients of a part's inputs to whoever made them."""
        if not inputs:
            return
        gradients = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in inputs]
        to = self._schedule.home(part - 1)
        if to == self._stage:
            self._near_gradients[part - 1, number] = gradients
        else:
            self._post.send_gradients(to, gradients)


def _entering(spec: Spec, payload: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return a payload for layers to work on, and those of its tensors that take a gradient."""
    wanting: list[torch.Tensor] = []
    entered = []
    for leaf, tensor in zip(spec.leaves, take_apart(payload)[1], strict=True):
        if leaf.wants_grad:
            wanting.append(tensor.detach().requires_grad_())
            tensor = _Enter.apply(wanting[-1], tensor)
        entered.append(tensor)
    return put_together(spec, entered), wanting


class _Enter(torch.autograd.Function):
    """Passes the gradient of what layers work on to the tensor that arrived: they may write into the former, not into a leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, arrived: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return the memory that arrived as a tensor of its own, no view of anything."""
        own = torch.empty(0, dtype=arrived.dtype, device=arrived.device)
        return own.set_(arrived.untyped_storage(), arrived.storage_offset(), arrived.size(), arrived.stride())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """Pass it on."""
        return gradient, None
