"""The one interface to tiers: says where each state of each unit rests, and makes the memory or the home for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...parallel.imagined import imagined_world
from ..layout import Layout
from .drive import Drive
from .home import DiskHome
from .imagined import ImaginedDrive
from .options import CPU, DEVICE, NVME, TierOptions
from .residence import Residence, stand_in
from .space import Space, Span, Tile
from .staging import Staging

if TYPE_CHECKING:
    from ..unit import Unit

HostMemory = Callable[[int, torch.dtype], torch.Tensor]
HOST = torch.device("cpu")
MASTER, PARAMETERS, GRADIENTS = "master", "parameters", "gradients"  # files; optimizer states have their own names
_HALF = (torch.float16, torch.bfloat16)


class Tiers:
    """Where the states of one engine rest on this rank.

    Args:
        device: where the model computes.
        say: prints a line from the first rank.
        tell: lets the other ranks know why this one cannot go on.
    """

    def __init__(
        self,
        options: TierOptions,
        rank: int,
        device: torch.device,
        say: Callable[[str], None],
        tell: Callable[[str], None] = lambda trouble: None,
    ) -> None:
        self.options, self.rank, self.device, self._say, self._tell = options, rank, device, say, tell
        self._agreed_on = False
        self.pinned = options.pinned and device.type != "cpu"
        self.space = Space(max(options.sub_group_numel, 1))
        self._drives: dict[Path, Drive] = {}
        self._staging: Staging | None = None
        self.param_tiers: dict[int, str] = {}  # by unit; whole ones are on the device
        self._params_in_host = 0
        self._device_side: set[int] = set()  # units whose optimizer states stay on the device: see `divide`

    # ---- which tier

    def _next_param_tier(self, numel: int) -> str:
        """Return where a shard of `numel` elements rests; asked once for each unit, in order."""
        if self.options.params == NVME and self._params_in_host + numel <= self.options.max_params_in_host:
            self._params_in_host += numel
            return CPU
        return self.options.params

    def optimizer_tier(self, unit: Unit) -> str:
        """Return where master weights and optimizer states of a unit rest."""
        return DEVICE if unit.index in self._device_side else self.options.optimizer

    def divide(self, units: Sequence[Unit]) -> None:
        """Choose the units whose optimizer states stay on the device, so that the share that leaves is nearest to the ratio."""
        if self.options.ratio >= 1 or self.options.optimizer == DEVICE:
            return
        sizes = [unit.master_interval[1] - unit.master_interval[0] for unit in units]
        stay, kept = round((1 - self.options.ratio) * sum(sizes)), 0
        for unit, size in sorted(zip(units, sizes, strict=True), key=lambda pair: -pair[1]):
            if kept + size / 2 <= stay:
                self._device_side.add(unit.index)
                kept += size
        share = 1 - kept / max(sum(sizes), 1)
        self._say(f"offload: {share:.0%} of the optimizer states leave the device (ratio {self.options.ratio:g}, in whole units)")

    @property
    def moves_params(self) -> bool:
        """Whether parameters are released between their uses even where this rank owns them whole."""
        return self.options.params != DEVICE

    # ---- what a unit keeps

    def keep_shard(self, unit: Unit, own: torch.Tensor) -> torch.Tensor:
        """Take a unit's own parameters to where they rest and return what is its shard from now on."""
        tier = self.param_tiers[unit.index] = self._next_param_tier(own.numel())
        if tier == NVME:
            residence = self._residence_of(unit)
            residence.shard = self.home(PARAMETERS, unit.dtype, unit.index)
            residence.shard.store(own)
            return stand_in((own.numel(),), unit.dtype)
        if tier == CPU and self.device != HOST:
            return self.host_empty(own.numel(), own.dtype).copy_(own)
        return own.clone()

    def give_master(self, unit: Unit, master: torch.dtype | None) -> None:
        """Give a trainable unit the tensor that the optimizer updates: its own bytes, or a copy in the master dtype.

        Its own bytes serve where they have the right dtype and rest where the update takes place.
        """
        tier = self.optimizer_tier(unit)
        low, high = unit.master_interval
        dtype = unit.dtype if master is None or unit.dtype not in _HALF else master
        on_drive = unit.residence is not None and unit.residence.shard is not None
        if tier == NVME:
            self._residence_of(unit).takes_states = True
        own = unit.shard if unit.sharded else unit.full[low:high]
        near = (tier == NVME) if on_drive else own.device == (self.device if tier == DEVICE else HOST)
        if dtype == unit.dtype and near:
            unit.master, unit.master_is_shard = own.detach(), True
            if on_drive:
                unit.residence.shares_master = True  # type: ignore[union-attr]
            return
        with unit.at_hand():
            own = unit.shard if unit.sharded else unit.full[low:high]
            if tier == DEVICE:
                unit.master = own.to(self.device, dtype, copy=True)
            elif tier == CPU:
                unit.master = self.host_empty(high - low, dtype).copy_(own)
            else:
                residence = self._residence_of(unit)
                residence.master = self.home(MASTER, dtype, unit.index)
                residence.master.store(own.to(dtype))
                unit.master = stand_in((high - low,), dtype)

    def gradient_home(self, unit: Unit, dtype: torch.dtype, sharded: bool) -> DiskHome | HostMemory | None:
        """Return where reduced gradients of a unit wait for the update: a home, what makes host memory, or None: where they are."""
        tier = self.optimizer_tier(unit)
        if not sharded or tier == DEVICE:
            return None
        if tier == CPU:
            return self.host_empty
        residence = self._residence_of(unit)
        residence.gradients = self.home(GRADIENTS, dtype, unit.index)
        return residence.gradients

    def _residence_of(self, unit: Unit) -> Residence:
        if unit.residence is None:
            unit.residence = Residence(unit, self)
        return unit.residence

    # ---- memory and homes

    def host_empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised host memory [numel], page-locked where an accelerator copies from it."""
        return torch.empty(numel, dtype=dtype, device=HOST, pin_memory=self.pinned)

    def place(self, unit: int, layout: Layout, interval: tuple[int, int], groups: Sequence[int | None], whole: bool) -> None:
        """Give the interval of a unit that this rank owns its place in the files; `groups` has one entry per parameter."""
        if not self.options.moves_nothing:
            self.space.add(unit, *interval, spans_of(layout, interval, groups, whole))

    def tiles_of(self, unit: int) -> tuple[Tile, ...]:
        """Return a unit's tiles; none where everything rests on the device."""
        return self.space.tiles.get(unit, ())

    def edges_of(self, unit: Unit) -> list[int]:
        """Return the elements at which a unit is cut into tiles."""
        return [tile.start for tile in self.tiles_of(unit.index)]

    def home(self, state: str, dtype: torch.dtype, unit: int) -> DiskHome:
        """Return the home of a unit's state on the drive.

        Raises:
            EngineError: the drive is full.
        """
        return DiskHome(self.drive_of(state), self.staging, state, dtype, self.tiles_of(unit))

    def drive_of(self, state: str) -> Drive:
        """Return the drive that holds a state."""
        path = self.options.params_path if state == PARAMETERS else self.options.optimizer_path
        assert path is not None
        return self._drive(path)

    def _drive(self, path: Path) -> Drive:
        if path not in self._drives:
            kind, options = Drive if imagined_world() is None else ImaginedDrive, self.options
            self._drives[path] = kind(path, self.rank, options.request_bytes, options.requests, self.pinned, self._on_failure)
        return self._drives[path]

    def _on_failure(self, message: str) -> None:
        if not self._agreed_on:
            self._tell(message)

    @contextmanager
    def agreed_on(self) -> Iterator[None]:
        """A context at whose end all ranks hear of one that failed in it: the failure need not be told apart from that."""
        before, self._agreed_on = self._agreed_on, True
        try:
            yield
        finally:
            self._agreed_on = before

    @property
    def drives(self) -> list[Drive]:
        """All drives in use."""
        return list(self._drives.values())

    @property
    def staging(self) -> Staging:
        """Buffers for what does not go by sub-groups: parameters that are gathered, gradients that land."""
        if self._staging is None:
            size = min(self.options.param_buffer_numel * 2, self.options.request_bytes)
            self._staging = Staging(self.options.param_buffers, size, self.pinned)
        return self._staging

    @property
    def staging_buffers(self) -> list[torch.Tensor]:
        """The staging buffers that exist."""
        return [] if self._staging is None else self._staging.buffers

    def check(self, num_bytes: dict[str, int], ranks: int) -> None:
        """See before anything is built that the drives can hold the bytes for `optimizer` and `params` of each of a host's ranks.

        Raises:
            EngineError: a folder is missing, read-only or too small.
        """
        needed: dict[Path, int] = {}
        for kind, path in (("optimizer", self.options.optimizer_path), ("params", self.options.params_path)):
            if path is not None:
                needed[path] = needed.get(path, 0) + num_bytes.get(kind, 0)
        for path, size in needed.items():
            line = self._drive(path).check(size, ranks)
            if line:
                self._say(f"offload: {line}")

    def close(self) -> None:
        """Give back what is held on drives."""
        for drive in self._drives.values():
            drive.close()


def spans_of(layout: Layout, interval: tuple[int, int], groups: Sequence[int | None], whole: bool) -> list[Span]:
    """Return the pieces of an interval that one optimizer tensor can cover: neighbours of one group, or single parameters."""
    spans: list[Span] = []
    last: int | None = None
    for part in layout.slices(*interval):
        start = interval[0] + part.at
        stop, group = start + part.stop - part.start, groups[part.extent]
        if group is not None:
            if spans and not whole and group == last and spans[-1].stop == start:
                spans[-1] = Span(spans[-1].start, stop)
            else:
                spans.append(Span(start, stop, whole))
        last = group
    return spans
