"""What of a unit rests on a drive, and how all of it comes to memory when something other than the step wants it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from ...parallel.imagined import imagined_world
from .drive import Transfer, wait_for_all
from .home import DiskHome, Stored
from .space import Tile

if TYPE_CHECKING:
    from ..runs import Run
    from ..unit import Unit
    from .tiers import Tiers


def _nothing(dtype: torch.dtype) -> torch.Tensor:
    world = imagined_world()  # its tensors have no values and do not mix with others
    return _made(dtype) if world is None else world.keep(("nothing", dtype), lambda: _new(dtype))


@cache
def _made(dtype: torch.dtype) -> torch.Tensor:
    return _new(dtype)


def _new(dtype: torch.dtype) -> torch.Tensor:
    return torch.full((), float("nan") if dtype.is_floating_point else 0, dtype=dtype)


def stand_in(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return what stands for values that rest on a drive: of their shape and dtype, NaN, without memory."""
    return _nothing(dtype).expand(shape)


def is_stand_in(value: torch.Tensor) -> bool:
    """Whether the values of a tensor are on a drive."""
    return value.untyped_storage()._cdata == _nothing(value.dtype).untyped_storage()._cdata


class Residence:
    """The homes of one unit on a drive, and the optimizer's tensors whose values are there.

    Between uses these tensors keep identity, shape and dtype and hold NaN without memory; while a use lasts they are views of
    its buffers. So the optimizer's `state` stays the optimizer's own.

    Attributes:
        shard, master, gradients: homes, or None for what rests in memory. With fp32 parameters on the drive the master is the shard.
        shares_master: it is.
        takes_states: optimizer states rest on the drive.
    """

    def __init__(self, unit: Unit, tiers: Tiers) -> None:
        self.unit, self.tiers = unit, tiers
        self.takes_states = self._reserved = False
        self.shard: DiskHome | None = None
        self.master: DiskHome | None = None
        self.gradients: DiskHome | None = None
        self.shares_master = False
        self._states: dict[tuple[str, torch.dtype], DiskHome] = {}
        self._empty: dict[tuple[str, torch.dtype], DiskHome] = {}  # room for states that the optimizer has not made yet
        self._at_rest: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._holds = 0
        self._writes = False

    # ---- what is where

    @property
    def kind(self) -> tuple[Any, ...]:
        """What must be equal for units to be moved together."""
        homes = (self.shard, self.master, self.gradients)
        return (self.takes_states, self.shares_master, *(None if home is None else home.dtype for home in homes))

    def state_home(self, key: str, dtype: torch.dtype) -> DiskHome:
        """Return the home of an optimizer state, made when first asked for."""
        if (key, dtype) not in self._states:
            home = self._empty.pop((key, dtype), None)
            self._states[key, dtype] = self.tiers.home(key, dtype, self.unit.index) if home is None else home
        return self._states[key, dtype]

    def reserve(self) -> None:
        """Make room for the optimizer states that are known to come: a drive that others fill stops the start, and no step.

        Raises:
            EngineError: the drive is full.
        """
        if self.takes_states and self.unit.master is not None and not self._reserved:
            self._reserved, dtype = True, self.unit.master.dtype
            self._empty = {(key, dtype): self.tiers.home(key, dtype, self.unit.index) for key in self.tiers.options.states}

    @property
    def state_dtypes(self) -> list[tuple[str, torch.dtype]]:
        """Names and dtypes of the optimizer states that have a home."""
        return list(self._states)

    def takes(self, run: Run, value: Any) -> bool:
        """Whether an optimizer state of a run rests on the drive: a tensor with an element for each of the run's."""
        return self.takes_states and isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == run.stop - run.start

    def record(self, run: Run, key: str, value: torch.Tensor) -> None:
        """Note that the values of a state are on the drive."""
        self._at_rest.setdefault(run.tensor, {})[key] = value

    def at_rest(self, run: Run, key: str, value: torch.Tensor) -> bool:
        """Whether the values of this very tensor are on the drive."""
        return self._at_rest.get(run.tensor, {}).get(key) is value

    def states_of(self, run: Run) -> dict[str, torch.Tensor]:
        """Return the tensors of a run whose values are on the drive."""
        states = run.unit.optimizer.inner.state.get(run.tensor, {})
        return {key: value for key, value in self._at_rest.get(run.tensor, {}).items() if states.get(key) is value}

    def tile_of(self, run: Run) -> Tile:
        """Return the tile that a run lies in."""
        return next(tile for tile in self.tiers.tiles_of(self.unit.index) if tile.start <= run.start < tile.stop)

    def stored(self, run: Run, key: str, value: torch.Tensor) -> Stored | None:
        """Return a state as a checkpoint reads it, or None for one that is in memory."""
        if self._holds or not self.at_rest(run, key, value):
            return None
        home = self.state_home(key, value.dtype)
        return Stored(home, run.start - home.start, run.stop - home.start)

    def stored_weights(self) -> Stored | None:
        """Return the unit's own interval of master weights, or of parameters where nobody trains them, as a checkpoint reads it.

        None where they are in memory.
        """
        unit = self.unit
        home = self.shard if unit.master is None or self.shares_master else self.master
        if home is None or self._holds:
            return None
        base = unit.lo if unit.master is None else unit.master_interval[0]
        return Stored(home, unit.lo - base, unit.hi - base)

    # ---- all of it in memory

    @contextmanager
    def hold(self, write: bool) -> Iterator[None]:
        """A context in which the unit's shard, master, gradients and states are in memory; with `write` changes are kept."""
        if not self._holds:
            self._bring()
        self._holds += 1
        self._writes |= write
        try:
            yield
        finally:
            self._holds -= 1
            if not self._holds:
                self._send_back()

    def _runs(self) -> list[Run]:
        optimizer = self.unit.optimizer
        return [] if optimizer is None else [run for run in optimizer.runs if run.unit is self.unit]

    def _bring(self) -> None:
        unit = self.unit
        if self.shard is not None:
            unit.shard = _loaded(self.shard)
            if self.shares_master:
                unit.master = unit.shard
        if self.master is not None:
            unit.master = _loaded(self.master)
        if self.gradients is not None and unit.gradients is not None and unit.gradients.reduced:
            unit.gradients.owned = _loaded(self.gradients)
        flats = {key: _loaded(home) for key, home in self._states.items()}
        for run in self._runs():
            self._bind_master(run)
            for name, value in self.states_of(run).items():
                flat = flats[name, value.dtype]
                value.data = flat[run.start - unit.master_interval[0] :][: run.stop - run.start].view(value.shape)

    def _bind_master(self, run: Run) -> None:
        unit = self.unit
        if unit.master is not None and (self.shares_master or self.master is not None):
            low = unit.master_interval[0]
            run.tensor.data = unit.master[run.start - low : run.stop - low].view(run.tensor.shape)

    def _send_back(self) -> None:
        """Write what may have changed, and let go of the memory."""
        unit, write, self._writes = self.unit, self._writes, False
        if write:
            for home, values in ((self.shard, unit.shard), (self.master, unit.master)):
                if home is not None and values is not None:
                    home.store(values)
        if self.gradients is not None and unit.gradients is not None and unit.gradients.owned is not None:
            if write:
                unit.gradients.put(unit.gradients.owned)
            unit.gradients.owned = None
        if write:
            self.settle()
        for run in self._runs():
            self.unbind(run)
        self.empty()
        self.flush()

    def settle(self) -> None:
        """Bring the states of the unit's runs that are in memory to the drive."""
        self.reserve()
        low, high = self.unit.master_interval
        flats: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        runs = self._runs()
        for run in runs:
            for key, value in run.unit.optimizer.inner.state.get(run.tensor, {}).items():
                if not self.takes(run, value):
                    continue
                kind = (key, value.dtype)
                if kind not in flats:
                    flats[kind] = _loaded(self._states[kind]) if kind in self._states else torch.zeros(high - low, dtype=value.dtype)
                if not is_stand_in(value):
                    flats[kind][run.start - low : run.stop - low].copy_(value.detach().reshape(-1))
                self.record(run, key, value)
        for (key, dtype), flat in flats.items():
            self.state_home(key, dtype).store(flat)
        known = {run.tensor for run in runs}
        self._at_rest = {tensor: states for tensor, states in self._at_rest.items() if tensor in known}
        for run in runs:
            self.unbind(run)

    def unbind(self, run: Run) -> None:
        """Let a run's tensors stand for values on the drive again."""
        if self.shares_master or self.master is not None:
            run.tensor.data = stand_in(run.tensor.shape, run.tensor.dtype)
        for value in self.states_of(run).values():
            value.data = stand_in(value.shape, value.dtype)

    def empty(self) -> None:
        """Let shard and master stand for values on the drive."""
        unit = self.unit
        if self.shard is not None:
            unit.shard = stand_in((self.shard.numel,), self.shard.dtype)
        if self.shares_master and unit.master is not None:
            unit.master = unit.shard
        if self.master is not None:
            unit.master = stand_in((self.master.numel,), self.master.dtype)

    def flush(self) -> None:
        """Return when all that was stored has been written.

        Raises:
            EngineError: the drive failed.
        """
        wait_for_all(self.take_writing())

    def take_writing(self) -> list[Transfer]:
        """Return the writes of all states that may still be on their way; whoever takes them waits for them."""
        return [transfer for home in self._homes() for transfer in home.take_writing()]

    def _homes(self) -> list[DiskHome]:
        found = [home for home in (self.shard, self.master, self.gradients) if home is not None]
        return found + list(self._states.values())


def _loaded(home: DiskHome) -> torch.Tensor:
    out = torch.empty(home.numel, dtype=home.dtype)
    home.load(out).wait()
    return out
