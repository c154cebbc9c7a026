"""Rank classes: ranks whose states take the same bytes at rest, for all ranks of a job, by layout arithmetic alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...zero.layout import Layout
from ..records import OptimizerRecord, RunningJob
from ..states import predict_states
from .memory import DEVICE

_STATES = ("parameters", "gradients", "master weights", "optimizer states")


@dataclass(frozen=True)
class RankClass:
    """Ranks, as inclusive spans, and the bytes of their states at rest by (tier, state); None is what the ledger cannot predict."""

    spans: tuple[tuple[int, int], ...]
    states: Mapping[tuple[str, str], int | None]
    stage: int = 0

    @property
    def count(self) -> int:
        """Number of ranks."""
        return sum(last - first + 1 for first, last in self.spans)

    def total(self, tier: str = DEVICE) -> int:
        """Bytes on a tier of the states that are known."""
        return sum(size for (where, _), size in self.states.items() if where == tier and size is not None)

    def words(self) -> str:
        """Return the spans as people write them, the first few where there are many."""
        texts = [f"{first:,}" if first == last else f"{first:,} to {last:,}" for first, last in self.spans]
        return ", ".join(texts[:4]) + (f" and {len(texts) - 4} more spans" if len(texts) > 4 else "")


def rank_classes(job: RunningJob) -> tuple[RankClass, ...]:
    """Return the classes of the ranks that hold the job's pipeline stage, the largest first; files on a drive without their padding."""
    tiers, copies = job.tiers(), job.place.copies
    parts = [(state, tier) for state in _STATES for tier in dict.fromkeys(each[state] for each in tiers)]
    counts = {part: tuple(each[part[0]] == part[1] for each in tiers) for part in parts}
    units, groups, optimizer = job.units(), job.groups(), job.optimizer()
    chosen = {
        among: (
            [unit for unit, yes in zip(units, among, strict=True) if yes],
            [group for group, yes in zip(groups, among, strict=True) if yes],
        )
        for among in counts.values()
    }
    found: dict[tuple[int | None, ...], list[int]] = {}
    ranks = range(len(copies)) if job.placement.optimizer.sharded else range(1)
    for rank in ranks:
        sizes = {}
        for among, (here, members) in chosen.items():
            # where nothing is cut every rank updates what this one does
            cut = job.placement.optimizer.sharded
            records = [_with_runs(record, index, here, members, rank, job) if cut else record for index, record in enumerate(optimizer)]
            sizes[among] = predict_states(here, job.placement, rank, records)
        found.setdefault(tuple(sizes[counts[part]][part[0]] for part in parts), []).append(rank)
    if len(ranks) < len(copies):  # nothing is cut by rank: every rank has the same
        found = {sizes: list(range(len(copies))) for sizes in found}
    keys = [(tier, state) for state, tier in parts]
    classes = [
        RankClass(_spans(sorted(copies[rank] for rank in members)), dict(zip(keys, sizes, strict=True)), job.place.stage)
        for sizes, members in found.items()
    ]
    return tuple(sorted(classes, key=lambda each: (-each.count, each.spans)))


def _with_runs(record: OptimizerRecord, group: int, units: Sequence, groups: Sequence, rank: int, job: RunningJob) -> OptimizerRecord:
    numels: list[int] = []
    for unit, members in zip(units, groups, strict=True):
        if unit.trainable:
            low, high = unit.layout.interval(rank)
            numels += runs_of(unit.layout, low, high, members, group, whole=job.whole)
    return OptimizerRecord(record.name, record.options, tuple(numels), record.itemsize)


def runs_of(layout: Layout, low: int, high: int, members: Sequence[int | None], group: int, *, whole: bool) -> list[int]:
    """Return the sizes of the tensors that an optimizer updates in [low, high): neighbours of one group are one, unless `whole`."""
    found: list[int] = []
    end = -1  # where the last one ended
    for part in layout.slices(low, high):
        start, size = low + part.at, part.stop - part.start
        if members[part.extent] != group:
            end = -1
        elif start == end and not whole:
            found[-1] += size
            end += size
        else:
            found.append(size)
            end = start + size
    return found


def _spans(ranks: Sequence[int]) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for rank in ranks:
        if found and found[-1][1] == rank - 1:
            found[-1] = (found[-1][0], rank)
        else:
            found.append((rank, rank))
    return tuple(found)
