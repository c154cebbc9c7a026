"""One stage's mail: payloads and gradients to and from its neighbours, with shapes told once for each kind of batch."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import EngineError
from ..parallel.collectives import Pending
from ..parallel.links import Links
from .payload import Leaf, Spec, put_together, take_apart
from .routes import Message

ACTIVATIONS, GRADIENTS = "activations", "activation gradients"


@dataclass
class _Arriving:
    message: Message
    spec: Spec | None
    tensors: list[torch.Tensor]
    pending: list[Pending]


class Post:
    """Sends and receives for one stage during one batch.

    The first payload of a kind (same part, same shapes of the batch's inputs, same mode) goes with a description; further
    ones of the kind are taken to be like it, which the sender checks. So shapes may change from batch to batch and from
    micro-batch to micro-batch, and are told only where they are new.

    Args:
        links: the chain. ranks: its global ranks by stage.
        known: (part, kind of batch) -> description; lives as long as the engine.
        always_tell: describe every payload: for models whose shapes depend on values.
    """

    def __init__(
        self,
        links: Links,
        ranks: Sequence[int],
        stage: int,
        expected: dict[tuple[int, int], list[Message]],
        kind_of: Callable[[int], Any],
        known: dict[Any, Spec],
        *,
        always_tell: bool = False,
    ) -> None:
        self._links, self._ranks, self._stage = links, ranks, stage
        self._kind_of, self._known, self._always_tell = kind_of, known, always_tell
        self._expected = {source: deque(found) for (source, to), found in expected.items() if to == stage}
        self._posted: dict[int, deque[_Arriving]] = {source: deque() for source in self._expected}
        self._arrived: dict[Message, Any] = {}
        self._sent_specs: dict[tuple[int, int], Spec] = {}  # (part of the receiver, micro-batch) -> what was sent there

    # ---- sending

    def send_payload(self, part: int, micro_batch: int, to: int, payload: Any) -> None:
        """Send the inputs of `part` to stage `to`.

        Raises:
            EngineError: their shapes are not those of the last payload for batches of the same kind.
        """
        spec, tensors = take_apart(payload)
        key = (part, self._kind_of(micro_batch))
        told = None if self._always_tell else self._known.get(key)
        if told is None:
            self._known[key] = spec
            self._links.tell(pickle.dumps(spec), self._ranks[to], ACTIVATIONS)
        elif told != spec:
            raise EngineError(
                f"the inputs of part {part} changed although the batch's shapes did not: {_said(told)} before, {_said(spec)} now. Shapes "
                "that depend on values need PipelineModule(dynamic_shape=True), or pipeline.dynamic_shape in the config"
            )
        self._sent_specs[part, micro_batch] = spec
        for tensor in tensors:
            self._links.send(tensor.detach().contiguous(), self._ranks[to], ACTIVATIONS)

    def send_gradients(self, to: int, gradients: Sequence[torch.Tensor]) -> None:
        """Send the gradients of what `to` had sent, in order."""
        for gradient in gradients:
            self._links.send(gradient.contiguous(), self._ranks[to], GRADIENTS)

    # ---- receiving

    def payload(self, part: int, micro_batch: int, source: int) -> tuple[Spec, Any]:
        """Return the inputs of `part`: their description, and the payload made of received tensors."""
        arrived = self._take(Message("F", part, micro_batch), source)
        assert arrived.spec is not None
        return arrived.spec, put_together(arrived.spec, arrived.tensors)

    def gradients(self, part: int, micro_batch: int, source: int) -> list[torch.Tensor]:
        """Return the gradients of the outputs of `part` that want one, in order."""
        return self._take(Message("G", part, micro_batch), source).tensors

    def _take(self, message: Message, source: int) -> _Arriving:
        while message not in self._arrived:
            if not self._posted[source]:
                self._post(source)
            arriving = self._posted[source].popleft()
            for pending in arriving.pending:
                pending.wait()
            self._arrived[arriving.message] = arriving
        if not self._posted[source] and self._expected[source] and self._is_known(self._expected[source][0]):
            self._post(source)  # what comes next travels while this stage computes
        return self._arrived.pop(message)

    def _is_known(self, message: Message) -> bool:
        """Whether the shapes of a message are known without reading a description first."""
        if message.kind == "G":
            return (message.part + 1, message.micro_batch) in self._sent_specs
        return not self._always_tell and (message.part, self._kind_of(message.micro_batch)) in self._known

    def _post(self, source: int) -> None:
        message = self._expected[source].popleft()
        spec: Spec | None = None
        leaves: Sequence[Leaf]
        if message.kind == "G":
            leaves, state = self._sent_specs.pop((message.part + 1, message.micro_batch)).wanting, GRADIENTS
        else:
            spec, state = self._spec_of(message, source), ACTIVATIONS
            leaves = spec.leaves
        tensors = [torch.empty(leaf.shape, dtype=leaf.dtype, device=self._links.device) for leaf in leaves]
        pending = [self._links.receive(tensor, self._ranks[source], state) for tensor in tensors]
        self._posted[source].append(_Arriving(message, spec, tensors, pending))

    def _spec_of(self, message: Message, source: int) -> Spec:
        key = (message.part, self._kind_of(message.micro_batch))
        if key in self._known and not self._always_tell:
            return self._known[key]
        spec = self._known[key] = pickle.loads(self._links.told(self._ranks[source], ACTIVATIONS))
        return spec


def _said(spec: Spec) -> str:
    return ", ".join(f"{list(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}" for leaf in spec.leaves) or "no tensors"
