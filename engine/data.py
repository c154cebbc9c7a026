"""The engine's data loader: every sample once an epoch over the ranks, in an order that the seed repeats."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from ..errors import ConfigError


class EpochSampler(Sampler[int]):
    """This rank's share of a shuffled epoch, equal in length on all ranks; may start in the middle."""

    def __init__(self, length: int, rank: int, world: int, seed: int, *, drop_last: bool, shuffle: bool = True) -> None:
        self.length, self.rank, self.world, self.seed = length, rank, world, seed
        self.shuffle, self.drop_last = shuffle, drop_last
        self.epoch = 0
        self.start = 0  # samples of the epoch that all ranks together have had, once
        self.share = self._share_of(length)

    def _share_of(self, num_samples: int) -> int:
        return num_samples // self.world if self.drop_last else -(-num_samples // self.world)

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.length))
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed * 1_000_003 + self.epoch)
            order = torch.randperm(self.length, generator=generator).tolist()
        start, self.start = min(self.start, self.length), 0
        total = start + self._share_of(self.length - start) * self.world
        while len(order) < total:  # at most world - 1 samples are repeated
            order += order[: total - len(order)]
        yield from order[start + self.rank : total : self.world]

    def __len__(self) -> int:
        return self.share


class RankIterable(IterableDataset):
    """Deals the items of an iterable dataset out to the ranks in rounds, so that all get equally many."""

    def __init__(self, source: Any, rank: int, world: int, drop_last: bool) -> None:
        self.source, self.rank, self.world, self.drop_last = source, rank, world, drop_last
        self.start = 0  # items that all ranks together have had, once

    def __iter__(self) -> Iterator[Any]:
        round_: list[Any] = []
        start, self.start = self.start, 0
        for item in itertools.islice(self.source, start, None):
            round_.append(item)
            if len(round_) == self.world:
                yield round_[self.rank]
                round_ = []
        if round_ and not self.drop_last:
            yield round_[self.rank % len(round_)]


class EngineLoader:
    """Batches of this rank for one epoch per iteration; the order changes with each epoch and repeats with the seed.

    `state_dict()` says where training stands, `load_state_dict()` makes the next iteration go on there. `position()` and
    `go_to()` do the same in samples of all ranks together, so that another number of ranks or another batch size goes on
    at the same sample.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        rank: int,
        world: int,
        *,
        seed: int,
        drop_last: bool,
        collate_fn: Callable[..., Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        sampler: Any = None,
        shuffle: bool = True,
    ) -> None:
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.epoch = 0
        self.batches = 0  # delivered in this epoch
        self._world = world
        self._begun_at = 0  # samples of the epoch, over all ranks, that were had when its iteration began
        self._begun_batches = 0  # what `batches` was then
        self._skip = False
        options: dict[str, Any] = {"batch_size": batch_size, "collate_fn": collate_fn, "num_workers": num_workers, "drop_last": drop_last}
        options["pin_memory"] = pin_memory
        # of its own: a loader that is started again in mid-epoch must not draw from the generator that dropout uses
        self._seed, self._generator = seed, torch.Generator()
        options["generator"] = self._generator
        self._deals: EpochSampler | RankIterable | None = None  # what can start in the middle
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            self.sampler: Any = None
            self._deals = RankIterable(dataset, rank, world, drop_last)
            self.loader = DataLoader(self._deals, **options)
        else:
            _require_map_style(dataset)
            self.sampler = sampler or EpochSampler(len(dataset), rank, world, seed, drop_last=drop_last, shuffle=shuffle)
            self._deals = self.sampler if isinstance(self.sampler, EpochSampler) else None
            self.loader = DataLoader(dataset, sampler=self.sampler, **options)

    @property
    def dataset(self) -> Any:
        """The dataset that batches are drawn from."""
        return self.loader.dataset

    def __len__(self) -> int:
        """Return the number of batches an epoch delivers."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        resumes, self._skip = self._skip, False
        if not resumes:
            self.batches = self._begun_batches = self._begun_at = 0
        if self.sampler is not None and hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(self.epoch)
        self._generator.manual_seed(self._seed * 1_000_003 + self.epoch)  # of the workers
        leave_out = 0
        if self._deals is not None:
            self._deals.start = self._begun_at
            if isinstance(self._deals, EpochSampler):
                self._deals.epoch = self.epoch
        else:
            leave_out = self._begun_batches
        for index, batch in enumerate(self.loader):
            if index < leave_out:
                continue
            self.batches += 1
            yield batch
        self.epoch += 1
        self.batches = self._begun_batches = self._begun_at = 0

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch number `epoch`."""
        self.epoch, self._skip = epoch, False
        self.batches = self._begun_batches = self._begun_at = 0

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the batches delivered in it."""
        return {"epoch": self.epoch, "batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on behind the given batch of the given epoch."""
        self._go(state["epoch"], state["batches"], state["batches"] * self.batch_size * self._world)

    def position(self) -> dict[str, int]:
        """Return the epoch and the samples that all ranks together have had of it."""
        since = (self.batches - self._begun_batches) * self.batch_size * self._world
        return {"epoch": self.epoch, "samples": self._begun_at + since}

    def go_to(self, position: dict[str, int]) -> None:
        """Go on behind the given sample of the given epoch; a sampler of the script's own is moved on by whole batches."""
        per_batch = self.batch_size * self._world
        self._go(position["epoch"], -(-position["samples"] // per_batch), position["samples"])

    def _go(self, epoch: int, batches: int, samples: int) -> None:
        self.epoch, self.batches = epoch, batches
        self._begun_batches, self._begun_at = batches, samples
        self._skip = True


class RepeatingLoader:
    """An endless iterator over a loader: starts it again when it ends."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._iterator = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self.loader)
            return next(self._iterator)


def _require_map_style(dataset: Dataset[Any]) -> None:
    if len(dataset) == 0:  # type: ignore[arg-type]
        raise ConfigError("training_data is empty: it has length 0")
