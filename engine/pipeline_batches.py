"""Batches of a pipelined step: who takes them, of which kind they are, and what all ranks agree on before and after."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import EngineError, RankError, StateroomError
from ..parallel import Collectives
from ..parallel.imagined import imagined_world
from ..pipe.executor import MicroBatch
from ..pipe.payload import take_apart
from .pipeline_setup import Cut

_FINE, _ENDED, _FAILED = 0, 1, 2


class EndedError(EngineError):
    """An iterator gave fewer micro-batches than a step needs."""

    def __init__(self, count: int) -> None:
        super().__init__(f"ended after {count} micro-batches")
        self.count = count


def pull(source: Any, count: int) -> Iterator[Any]:
    """Yield `count` batches.

    Raises:
        EndedError: there were fewer.
        EngineError: there is nothing to take batches from.
    """
    if source is None:
        raise EngineError("this stage takes batches: pass data_iter, or give training_data to initialize()")
    if not hasattr(source, "__next__"):
        raise EngineError(f"data_iter must be an iterator, got {type(source).__name__}; pass iter(loader)")
    for number in range(count):
        try:
            yield next(source)
        except StopIteration:
            raise EndedError(number) from None


def split_batch(batch: Any, has_loss_fn: bool, cut: Cut) -> tuple[Any, Any]:
    """Return (inputs, labels) of a batch: a pair, or a mapping with "labels".

    Raises:
        EngineError: there is a loss_fn and the batch is neither.
    """
    if isinstance(batch, Mapping):
        if not has_loss_fn:
            return batch, None
        if "labels" in batch:
            return {key: value for key, value in batch.items() if key != "labels"}, batch["labels"]
    elif isinstance(batch, (list, tuple)) and len(batch) >= 2 and (has_loss_fn or not cut.whole_batches):
        return (batch[0] if len(batch) == 2 else tuple(batch[:-1])), batch[-1]
    elif not has_loss_fn:
        return batch, None
    raise EngineError(f"with loss_fn a batch is (inputs, labels), or a dict with 'labels', got {type(batch).__name__}")


def batch_kinds(micro_batches: Sequence[MicroBatch]) -> list[int]:
    """Return a number for the kind of each micro-batch's inputs: shapes, dtypes and structure."""
    found = []
    for each in micro_batches:
        spec, _ = take_apart(each.inputs)
        digest = hashlib.blake2b(pickle.dumps((repr(spec.tree), spec.leaves)), digest_size=7).digest()
        found.append(int.from_bytes(digest, "little"))
    return found


class Agreement:
    """What the ranks of a job tell each other around one run of a schedule.

    Attributes:
        kinds: of the micro-batches of this rank's copy of the model.
        all_know: every rank has come to `end`, and knows that the batch failed.
    """

    def __init__(self, comm: Collectives, cut: Cut) -> None:
        self._comm, self._cut = comm, cut
        self.kinds: list[int] = []
        self.all_know = False
        self._error: BaseException | None = None

    # ---- before

    def start(self, take: Callable[[], tuple[list[MicroBatch], list[int]]], count: int) -> list[MicroBatch]:
        """Take batches on every rank that needs them, and return this rank's.

        Raises:
            StopIteration: every rank that takes batches was at its end.
            EngineError: some rank could not take its batches; on every rank.
        """
        status, had = _FINE, count
        batches: list[MicroBatch] = []
        kinds: list[int] = []
        try:
            batches, kinds = take()
        except EndedError as error:
            status, had = _ENDED, error.count
        except Exception as error:
            status, self._error = _FAILED, error
        row = [status, had, *(kinds or [0] * count)]
        rows = self._known_rows(row, bool(kinds))
        if any(row[0] for row in rows):
            self._refuse(rows, count)
        self.kinds = rows[self._cut.chain[0]][2:]
        return batches

    def _known_rows(self, row: list[int], has_kinds: bool) -> list[list[int]]:
        """Return every rank's row; in an imagined world all ranks are as this one, and the first stage says the kinds."""
        rows = self._gathered(torch.tensor(row, dtype=torch.int64, device=self._comm.device))
        world = imagined_world()
        if world is None:
            return rows.tolist()
        key = ("kinds", len(row))
        if has_kinds:
            world.said[key] = row[2:]
        elif row[0] == _FINE:
            row = [*row[:2], *world.hear(key)]
        return [row] * self._comm.world

    def _refuse(self, rows: list[list[int]], count: int) -> None:
        if any(row[0] == _FAILED for row in rows):
            self._raise_first(self._comm.gather_objects(_told(self._error)))
        takers = self._cut.takers
        ended = {rank: row[1] for rank, row in enumerate(rows) if row[0] == _ENDED}
        if all(ended.get(rank) == 0 for rank in takers):
            raise StopIteration
        told = ", ".join(f"rank {rank} after {had} of {count} micro-batches" for rank, had in ended.items())
        raise EngineError(
            f"data iterators ended on some ranks: {told}. Nothing was computed. Give every rank that holds a first or last stage the same "
            "number of micro-batches, a multiple of the accumulation steps (drop_last, or a RepeatingLoader)"
        )

    # ---- around

    @contextmanager
    def guard(self, sever: Callable[[str], None]) -> Iterator[None]:
        """Keep an error for `end`, after cutting the connections of this rank so that nobody waits for it."""
        try:
            yield
        except RankError as error:
            self._error = RankError(str(error))  # the traceback of the error itself would hold connections that are to close
            sever(_short(error))
        except Exception as error:
            self._error = error
            sever(_short(error))
        except BaseException as error:
            sever(_short(error))
            raise

    # ---- after

    def end(self, found: Any, count: int) -> torch.Tensor:
        """Return the losses [count] (fp64, host memory), averaged over copies of the model.

        Raises:
            the error of this rank, where it was the first cause; RankError with the first cause elsewhere.
        """
        row = torch.zeros(1 + count, dtype=torch.float64, device=self._comm.device)
        row[0] = _FINE if self._error is None else _FAILED
        if self._error is None and found.record.losses:
            row[1:] = torch.stack(found.record.losses).double()
        try:
            rows = self._gathered(row).cpu()
            failed = self._error is not None or bool(rows[:, 0].any())
            told = self._comm.gather_objects(_told(self._error)) if failed else []
        except RankError as error:
            if self._error is not None and not isinstance(self._error, RankError):
                raise self._error from None
            raise error
        if failed:
            self.all_know = True
            self._raise_first(told)
        return rows[self._cut.last_ranks, 1:].mean(dim=0)

    def _gathered(self, row: torch.Tensor) -> torch.Tensor:
        try:
            return self._comm.gather_rows(row)
        except RankError as error:
            raise RankError(
                f"a rank of this job ended, or runs something else than this batch, so that the stages cannot go on: {error}"
            ) from error

    def _raise_first(self, told: list[tuple[str, bool]]) -> None:
        """Raise the first cause: on its own rank as it is, elsewhere by name."""
        if self._error is not None and not isinstance(self._error, RankError):
            raise self._error
        causes = [(rank, text) for rank, (text, is_cause) in enumerate(told) if is_cause]
        if not causes:
            raise RankError(f"the stages lost each other: {'; '.join(text for text, _ in told if text)}")
        text = "; ".join(f"rank {rank} ({self._cut.where(rank)}) failed: {text}" for rank, text in causes)
        raise RankError(
            f"{text}. This rank stopped with it: nothing was updated, the weights are those of the last step, and training can go on with "
            "another batch"
        ) from None


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _told(error: BaseException | None) -> tuple[str, bool]:
    """Return what other ranks are told of an error, and whether it is a cause and no consequence."""
    if error is None:
        return "", False
    text = str(error) if isinstance(error, StateroomError) else _short(error)
    return text, not isinstance(error, RankError)
