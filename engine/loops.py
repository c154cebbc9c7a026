"""Loops over batches that an engine runs for its user: a whole optimizer step, an evaluation, an epoch that all ranks end together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..errors import EngineError
from .batches import call_with_batch, loss_of
from .data import EngineLoader, RepeatingLoader

if TYPE_CHECKING:
    from ..parallel import Collectives
    from .progress import Progress

Batch = TypeVar("Batch")
_NO_MORE = object()


class WholeBatches:
    """Mixed into Engine; reads the parts that Engine owns."""

    comm: Collectives
    device: torch.device
    loss_fn: Any
    progress: Progress
    training: bool
    training_dataloader: EngineLoader | None
    _repeating: RepeatingLoader | None

    def train_batch(self, data_iter: Any = None) -> torch.Tensor:
        """Run one optimizer step: as many micro-batches as accumulation steps, from `data_iter` or the engine's loader.

        Returns:
            the mean loss over micro-batches and ranks, a scalar tensor.
        """
        if data_iter is None:
            if self.training_dataloader is None:
                raise EngineError("train_batch() without data_iter needs training_data in initialize()")
            self._repeating = self._repeating or RepeatingLoader(self.training_dataloader)
            data_iter = self._repeating
        self.train()  # type: ignore[attr-defined]
        steps = self.gradient_accumulation_steps()  # type: ignore[attr-defined]
        total = torch.zeros((), device=self.device)
        for _ in range(steps):
            loss = loss_of(call_with_batch(self, next(data_iter), self.loss_fn, self.device))
            self.backward(loss)  # type: ignore[attr-defined]
            self.step()  # type: ignore[attr-defined]
            total += loss.detach()
        return self._mean(total / steps)

    def eval_batch(self, data_iter: Any, num_micro_batches: int | None = None) -> torch.Tensor:
        """Return the mean loss over micro-batches and ranks, without gradients."""
        was_training = self.training
        self.eval()  # type: ignore[attr-defined]
        count = num_micro_batches or self.gradient_accumulation_steps()  # type: ignore[attr-defined]
        total = torch.zeros((), device=self.device)
        with torch.no_grad():
            for _ in range(count):
                total += loss_of(call_with_batch(self, next(data_iter), self.loss_fn, self.device)).float()
        self.train(was_training)  # type: ignore[attr-defined]
        return self._mean(total / count)

    def together(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield this rank's batches until the first rank has no more, so that all ranks end their epoch after the same number.

        Every rank must iterate; each batch costs one small message between ranks. What a rank has left is not used, and
        is said: the rank that ran out, and after how many batches.
        """
        count = 0
        source = iter(batches)
        while True:
            batch = next(source, _NO_MORE)
            there = self.comm.known_numbers(int(batch is not _NO_MORE))
            if not all(there):
                if any(there):
                    ended = [rank for rank, more in enumerate(there) if not more]
                    self.progress.warn(f"the epoch ends on all ranks after {count} batches: rank(s) {ended} had no more")
                return
            count += 1
            yield batch  # type: ignore[misc]

    def _mean(self, value: torch.Tensor) -> torch.Tensor:
        return self.comm.sum_(value.reshape(1).clone()).reshape(()) / self.comm.world
