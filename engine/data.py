"""The engine's data loader: every sample once an epoch over the ranks, in an order that the seed repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from ..errors import ConfigError


class EpochSampler(Sampler[int]):
    """This rank's share of a shuffled epoch, equal in length on all ranks; may start in the middle."""

    def __init__(self, length: int, rank: int, world: int, seed: int, *, drop_last: bool, shuffle: bool = True) -> None:
        self.length, self.rank, self.world, self.seed = length, rank, world, seed
        self.shuffle = shuffle
        self.epoch = 0
        self.start = 0  # samples of this rank's share to leave out, once
        self.share = length // world if drop_last else -(-length // world)

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.length))
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed * 1_000_003 + self.epoch)
            order = torch.randperm(self.length, generator=generator).tolist()
        total = self.share * self.world
        while len(order) < total:  # at most world - 1 samples are repeated
            order += order[: total - len(order)]
        start, self.start = self.start, 0
        yield from order[self.rank : total : self.world][start:]

    def __len__(self) -> int:
        return self.share


class RankIterable(IterableDataset):
    """Deals the items of an iterable dataset out to the ranks in rounds, so that all get equally many."""

    def __init__(self, source: Any, rank: int, world: int, drop_last: bool) -> None:
        self.source, self.rank, self.world, self.drop_last = source, rank, world, drop_last

    def __iter__(self) -> Iterator[Any]:
        round_: list[Any] = []
        for item in self.source:
            round_.append(item)
            if len(round_) == self.world:
                yield round_[self.rank]
                round_ = []
        if round_ and not self.drop_last:
            yield round_[self.rank % len(round_)]


class EngineLoader:
    """Batches of this rank for one epoch per iteration; the order changes with each epoch and repeats with the seed.

    `state_dict()` says where training stands, `load_state_dict()` makes the next iteration go on there.
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
        self._skip = 0
        options: dict[str, Any] = {"batch_size": batch_size, "collate_fn": collate_fn, "num_workers": num_workers, "drop_last": drop_last}
        options["pin_memory"] = pin_memory
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            self.sampler: Any = None
            self.loader = DataLoader(RankIterable(dataset, rank, world, drop_last), **options)
        else:
            _require_map_style(dataset)
            self.sampler = sampler or EpochSampler(len(dataset), rank, world, seed, drop_last=drop_last, shuffle=shuffle)
            self.loader = DataLoader(dataset, sampler=self.sampler, **options)

    @property
    def dataset(self) -> Any:
        """The dataset that batches are drawn from."""
        return self.loader.dataset

    def __len__(self) -> int:
        """Return the number of batches an epoch delivers."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        self.batches = skip
        if self.sampler is not None and hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(self.epoch)
        if isinstance(self.sampler, EpochSampler):
            self.sampler.epoch = self.epoch
            self.sampler.start = skip * self.batch_size
            skip = 0
        for index, batch in enumerate(self.loader):
            if index < skip:
                continue
            self.batches += 1
            yield batch
        self.epoch += 1
        self.batches = 0

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch number `epoch`."""
        self.epoch, self._skip = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the batches delivered in it."""
        return {"epoch": self.epoch, "batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on behind the given batch of the given epoch."""
        self.epoch = state["epoch"]
        self.batches = self._skip = state["batches"]


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
