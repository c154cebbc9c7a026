"""The optimizer's update, sub-group by sub-group: one is read from the drive and one written back while one is updated."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from ..runs import Run
from ..update import scale
from .disk import aligned_buffer
from .drive import Drive, Transfer, wait_for_all
from .options import DEVICE, NVME, TierOptions
from .residence import Residence
from .space import SubGroup, sub_groups
from .tiers import GRADIENTS, MASTER, PARAMETERS, Tiers

if TYPE_CHECKING:
    from ..unit import Unit


@dataclass
class Field:
    """One state of a sub-group: where it lies in the buffer, and whether it is read and written."""

    state: str
    dtype: torch.dtype
    drive: Drive
    at: int  # first byte in the buffer
    reads: bool
    writes: bool


@dataclass
class Work:
    """Runs that are stepped together; `group` None means that all their states are in memory."""

    runs: list[Run]
    group: SubGroup | None = None
    fields: dict[tuple[str, torch.dtype], Field] = field(default_factory=dict)
    num_bytes: int = 0


class Room:
    """A buffer for the states of one sub-group, and what is on its way into or out of it."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.extra: list[torch.Tensor] = []
        self.transfers: list[Transfer] = []

    def ensure(self, num_bytes: int) -> None:
        """Have at least so many bytes; waits until the buffer is free."""
        self.wait()
        if self.buffer.numel() < num_bytes:
            self.buffer = torch.empty(0, dtype=torch.uint8)  # let go of the old one first
            self.buffer = aligned_buffer(num_bytes, self._pinned)

    def wait(self) -> None:
        """Return when nothing is on its way."""
        transfers, self.transfers = self.transfers, []
        try:
            wait_for_all(transfers)
        finally:
            self.extra = []


class BySubGroups:
    """Steps the inner optimizer over sub-groups of runs; the tensors of each are bound to a buffer while it is updated.

    Args:
        separable: the optimizer treats every tensor on its own, so that it may be stepped with some of them at a time.
    """

    publishes = True

    def __init__(self, inner: torch.optim.Optimizer, tiers: Tiers, *, separable: bool) -> None:
        self._inner, self._tiers, self._separable = inner, tiers, separable
        options: TierOptions = tiers.options
        self._limit = options.sub_group_numel
        self._expected = options.states
        self._rooms = [Room(tiers.pinned) for _ in range(options.sub_groups if options.optimizer == NVME else 0)]
        self._before: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._after: OrderedDict[int, Callable[..., Any]] = OrderedDict()

    @property
    def held_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(room.buffer.nbytes for room in self._rooms)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The buffers."""
        return [room.buffer for room in self._rooms]

    @property
    def rooms(self) -> int:
        """Sub-groups whose states are in memory at once."""
        return len(self._rooms)

    def register_pre_hook(self, hook: Callable[..., Any]) -> Any:
        """Run before the first sub-group; gradients that are in memory are in place, states on a drive are not."""
        handle = RemovableHandle(self._before)
        self._before[handle.id] = hook
        return handle

    def register_post_hook(self, hook: Callable[..., Any]) -> Any:
        """Run after the last sub-group."""
        handle = RemovableHandle(self._after)
        self._after[handle.id] = hook
        return handle

    # ---- the loop

    def __call__(self, used: Sequence[Run], factor: float) -> None:
        """Step all used runs; read, update and write of three sub-groups overlap.

        Raises:
            EngineError: the drive failed.
        """
        scale(used, factor)
        self._call_hooks(self._before, used)
        in_memory, on_drive = self._plan(used)
        for work in in_memory:
            self._step(work, None, factor)
        if on_drive:
            self._stream(on_drive, factor)
        for hook in list(self._after.values()):
            hook(self._inner, (), {})

    def _call_hooks(self, hooks: dict[int, Callable[..., Any]], used: Sequence[Run]) -> None:
        if not hooks:
            return
        held = [run for run in used if run.unit.gradients.owned is not None]  # type: ignore[union-attr]
        for run in held:
            run.tensor.grad = run.gradient()
        for hook in list(hooks.values()):
            hook(self._inner, (), {})
        for run in held:
            run.tensor.grad = None

    def _stream(self, works: Sequence[Work], factor: float) -> None:
        rooms, count = self._rooms, len(self._rooms)
        for home in {id(run.unit): _residence(run) for work in works for run in work.runs}.values():
            home.flush()
        try:
            self._fetch(works[0], rooms[0])
            for index, work in enumerate(works):
                room, following = rooms[index % count], index + 1
                arriving, room.transfers = room.transfers, []
                wait_for_all(arriving)
                if following < len(works) and count > 1:
                    self._fetch(works[following], rooms[following % count])
                self._step(work, room, factor)
                self._send(work, room)
                if following < len(works) and count == 1:
                    self._fetch(works[following], room)
        finally:
            wait_for_all(rooms)  # nothing may move in the buffers once this has returned

    # ---- what goes together

    def _plan(self, used: Sequence[Run]) -> tuple[list[Work], list[Work]]:
        """Return the sub-groups whose states are in memory, and those that come from a drive."""
        resident: dict[str, list[Run]] = {}
        homes: dict[tuple[Any, ...], list[Run]] = {}
        for run in used:
            home = run.unit.residence
            if home is not None and home.takes_states:
                homes.setdefault((home.kind, run.tensor.dtype), []).append(run)
            else:
                resident.setdefault(self._tiers.optimizer_tier(run.unit), []).append(run)
        works = [
            Work(runs) for tier, group in sorted(resident.items(), key=lambda item: item[0] != DEVICE) for runs in self._cut(tier, group)
        ]
        return works, [work for runs in homes.values() for work in self._on_drive(runs)]

    def _cut(self, tier: str, runs: list[Run]) -> list[list[Run]]:
        if tier == DEVICE or not self._separable:
            return [runs]
        groups: list[list[Run]] = []
        room = 0
        for run in runs:
            numel = run.stop - run.start
            if not groups or numel > room:
                groups.append([])
                room = self._limit
            groups[-1].append(run)
            room -= numel
        return groups

    def _on_drive(self, runs: list[Run]) -> list[Work]:
        tiles = {tile: run.unit for run in runs for tile in [_residence(run).tile_of(run)]}
        found = []
        for group in sub_groups(list(tiles), self._limit):
            members = {(tile.unit, tile.start): tile for tile in group.tiles}
            mine = [run for run in runs if (run.unit.index, _residence(run).tile_of(run).start) in members]
            found.append(self._work(group, mine))
        return found

    def _work(self, group: SubGroup, runs: list[Run]) -> Work:
        """Lay the states of a sub-group out in a buffer."""
        work = Work(runs, group)
        home = _residence(runs[0])
        units = {id(run.unit): run.unit for run in runs}.values()
        tiers = self._tiers

        def add(state: str, dtype: torch.dtype, reads: bool = True, writes: bool = True) -> None:
            if (state, dtype) not in work.fields:
                work.fields[state, dtype] = Field(state, dtype, tiers.drive_of(state), work.num_bytes, reads, writes)
                work.num_bytes += group.numel * dtype.itemsize

        if home.gradients is not None:
            add(GRADIENTS, home.gradients.dtype, writes=False)
        if home.master is not None:
            add(MASTER, home.master.dtype)
        if home.shard is not None:
            add(PARAMETERS, home.shard.dtype, reads=home.shares_master or _has_gaps(group, runs))
        for unit in units:
            for run in unit.optimizer.runs:
                if run.unit is unit:
                    for key, value in _residence(run).states_of(run).items():
                        add(key, value.dtype)
        for key in self._expected:
            add(key, runs[0].tensor.dtype, reads=False, writes=False)
        return work

    # ---- the steps of one sub-group

    def _fetch(self, work: Work, room: Room) -> None:
        assert work.group is not None
        room.ensure(work.num_bytes)
        for each in work.fields.values():
            if each.reads:
                room.transfers.append(each.drive.read(each.state, each.dtype, work.group.base, _bytes_of(work, each, room)))

    def _step(self, work: Work, room: Room | None, factor: float) -> None:
        for run in work.runs:
            if room is not None:
                self._bind(work, run, room)
            run.tensor.grad = self._gradient(work, run, room, factor)
        self._inner.step()
        for run in work.runs:
            run.tensor.grad = None
            if room is not None:
                self._collect(work, run, room)
            self._publish(work, run, room)
        if room is not None:
            for run in work.runs:
                _residence(run).unbind(run)

    def _bind(self, work: Work, run: Run, room: Room) -> None:
        home = _residence(run)
        name = MASTER if home.master is not None else PARAMETERS if home.shares_master else None
        if name is not None:
            run.tensor.data = _part(work, (name, run.tensor.dtype), run, room).view(run.tensor.shape)
        for key, value in home.states_of(run).items():
            value.data = _part(work, (key, value.dtype), run, room).view(value.shape)

    def _gradient(self, work: Work, run: Run, room: Room | None, factor: float) -> torch.Tensor:
        home = run.unit.residence
        if room is None or home is None or home.gradients is None:
            return run.gradient()
        flat = _part(work, (GRADIENTS, home.gradients.dtype), run, room)
        if factor != 1.0:
            flat.mul_(factor)
        return flat.view(run.tensor.shape).to(run.tensor.dtype)

    def _collect(self, work: Work, run: Run, room: Room) -> None:
        """Take states that the optimizer has made or exchanged into the buffer."""
        home = _residence(run)
        for key, value in self._inner.state.get(run.tensor, {}).items():
            if not home.takes(run, value):
                continue
            kind = (key, value.dtype)
            if kind not in work.fields:
                self._extend(work, kind, room)
            home.state_home(*kind)  # makes room on the drive
            work.fields[kind].writes = True
            part = _part(work, kind, run, room)
            if value.data_ptr() != part.data_ptr():
                part.copy_(value.detach().reshape(-1))
                value.data = part.view(value.shape)
            home.record(run, key, value)

    def _extend(self, work: Work, kind: tuple[str, torch.dtype], room: Room) -> None:
        """Make a buffer for a state that nobody expected."""
        assert work.group is not None
        work.fields[kind] = Field(*kind, self._tiers.drive_of(kind[0]), -1 - len(room.extra), reads=False, writes=True)
        room.extra.append(aligned_buffer(work.group.numel * kind[1].itemsize, self._tiers.pinned))

    def _publish(self, work: Work, run: Run, room: Room | None) -> None:
        """Bring the new master weights of a run to the parameters."""
        unit: Unit = run.unit
        home: Residence | None = unit.residence
        if room is None or home is None or home.shard is None:
            unit.take_up(run.tensor.detach().reshape(-1), run.start, stays=room is None)
        elif not home.shares_master:
            _part(work, (PARAMETERS, home.shard.dtype), run, room).copy_(run.tensor.detach().reshape(-1))

    def _send(self, work: Work, room: Room) -> None:
        assert work.group is not None
        for each in work.fields.values():
            if each.writes:
                room.transfers.append(each.drive.write(each.state, each.dtype, work.group.base, _bytes_of(work, each, room)))


def _residence(run: Run) -> Residence:
    assert run.unit.residence is not None
    return run.unit.residence


def _bytes_of(work: Work, each: Field, room: Room) -> torch.Tensor:
    assert work.group is not None
    if each.at < 0:
        return room.extra[-1 - each.at]
    return room.buffer[each.at : each.at + work.group.numel * each.dtype.itemsize]


def _part(work: Work, kind: tuple[str, torch.dtype], run: Run, room: Room) -> torch.Tensor:
    """Return a run's elements of a state in the buffer, flat."""
    assert work.group is not None
    at = _residence(run).tile_of(run).at(run.start) - work.group.base
    return _bytes_of(work, work.fields[kind], room).view(kind[1])[at : at + run.stop - run.start]


def _has_gaps(group: SubGroup, runs: Sequence[Run]) -> bool:
    return sum(run.stop - run.start for run in runs) < sum(tile.stop - tile.start for tile in group.tiles)
