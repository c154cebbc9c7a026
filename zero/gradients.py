"""A unit's gradients: a flat buffer that collects what this rank's backward leaves, and the interval that the optimizer owns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ..parallel.collectives import DONE, Collectives, Pending
from .small import SmallGradients, put
from .tiers.copies import copy_down
from .tiers.home import DiskHome

if TYPE_CHECKING:
    from .unit import Unit

HostMemory = Callable[[int, torch.dtype], torch.Tensor]


class Gradients:
    """Collects, reduces and hands over the gradients of one unit.

    `full` [padded] holds local sums since the last reduction; `owned` holds what has been reduced, for the interval that
    the optimizer updates. Where gradients are not sharded `owned` is a view of `full`, so nothing is copied; only a
    second reduction before the step (a second backward) moves it to a buffer of its own. Sharded gradients keep only
    `owned` between passes.
    """

    def __init__(
        self,
        unit: Unit,
        *,
        dtype: torch.dtype,
        wire: torch.dtype,
        sharded: bool,
        interval: tuple[int, int],
        home: DiskHome | HostMemory | None = None,
    ) -> None:
        self.unit = unit
        self.dtype = dtype
        self.wire = wire
        self.home = home if isinstance(home, DiskHome) else None
        self.sharded = sharded and (unit.comm.world > 1 or home is not None)
        self.interval = interval
        count = len(unit.slots)
        self.filled = bytearray(count)  # has a value in `full`
        self.touched = bytearray(count)  # got a gradient since the last step
        self.params = [slot.param for slot in unit.slots]
        self._views: list[torch.Tensor | None] | None = None
        self._small = SmallGradients(unit.slots)
        self._factor = 1.0  # of those that wait in _small
        self.full: torch.Tensor | None = None
        self.owned: torch.Tensor | None = None
        self.travelling: list[torch.Tensor] = []  # buffers whose reduction is under way
        self.reduced = False  # `owned` holds sums over ranks
        self.exposed = False
        self._everyone = interval == (0, unit.layout.padded)
        self._landing: Pending = DONE
        self.norms: list[torch.Tensor] = []  # of the pieces that count for the global norm, where the values are on a drive
        self.norm_spans: Callable[[], list[tuple[int, int]]] | None = None  # set by the optimizer
        if not self.sharded:
            self.full = self._new(unit.layout.padded)
        elif self.home is None:
            self._owned_buffer = self._new(interval[1] - interval[0], home if callable(home) else None)

    @property
    def dirty(self) -> bool:
        """Whether local sums wait to be reduced."""
        return 1 in self.filled or bool(self._small)

    def accept(self, index: int, factor: float) -> None:
        """Move the gradient that autograd left on parameter `index`, times `factor`, into the flat buffer."""
        param = self.params[index]
        grad = param.grad
        if grad is None:
            return
        param.grad = None
        if self.reduced and not self.sharded and not self.dirty:
            self._set_aside()
        self.touched[index] = 1
        if grad.requires_grad:  # create_graph: the values are enough here
            grad = grad.detach()
        if factor != self._factor:
            self._move_small()
        if self._small.take(index, grad):
            self._factor = factor
            if self._small.are_many:
                self._move_small()
            return
        if index in self._small:
            self._move_small()
        view = self._view(index)
        if grad.is_sparse and not self.filled[index]:
            view.zero_()
        put(view, grad, factor, adds=grad.is_sparse or bool(self.filled[index]))
        self.filled[index] = 1

    def _move_small(self) -> None:
        if self._small:
            self._small.move(self._buffer(), self.filled, self._factor)

    def reduce(self) -> Pending:
        """Start summing over ranks; the result is in `owned` after wait()."""
        if not self.sharded and self.reduced and not self.dirty:
            self._set_aside()
        self._move_small()
        full, views = self._buffer(), self._views
        if 0 in self.filled:
            for slot, filled in zip(self.unit.slots, self.filled, strict=True):
                if not filled and slot.numel:
                    full[slot.offset : slot.offset + slot.numel].zero_()
        # What is on its way must not be touched: a gradient that still lands (a reentrant checkpoint gives one for each
        # segment) finds a buffer of its own.
        self.full = self._views = None
        self.filled = bytearray(len(self.filled))
        self.travelling.append(full)
        self.unit.note("reduction of its gradient starts")
        comm, bounds = self.unit.comm, self.unit.layout.bounds
        pending = comm.reduce_scatter(full, bounds, state="gradients", unit=self.unit.name, wire=self.wire)

        def finish() -> None:
            pending.wait()
            if not self._everyone or comm.world == 1:
                arrived()  # at once: until then the whole buffer stays
                return
            # The second half of an all-reduce; it travels while the units before this one compute, until land().
            self.land()
            gathering = comm.all_gather(full, bounds, state="gradients", unit=self.unit.name)
            self._landing = Pending(lambda: arrived(gathering))

        def arrived(after: Pending = DONE) -> None:
            after.wait()
            self.travelling = [buffer for buffer in self.travelling if buffer is not full]
            self._take_over(full, views)
            self.unit.note("its gradient is reduced")

        return Pending(finish)

    def _take_over(self, full: torch.Tensor, views: list[torch.Tensor | None] | None) -> None:
        low, high = self.interval
        part = full[low:high]
        if self.home is not None:
            self._send_home(part)
        elif self.sharded:
            if self.reduced:
                self.land()
                self._owned_buffer.add_(part.to(self._owned_buffer.device))
            else:
                self._landing = copy_down(self._owned_buffer, part)
            self.owned = self._owned_buffer
        else:
            if self.owned is None:
                self.owned = part
            else:
                self.owned.add_(part)
            if self.full is None and not self._small:  # what waits has not been reduced, and must not land on what has
                self.full, self._views = full, views
        self.reduced = True

    def land(self) -> None:
        """Return when what was collected is in the flat buffer, and what is under way is there: in host memory, or on every rank."""
        self._move_small()
        landing, self._landing = self._landing, DONE
        landing.wait()

    def _send_home(self, part: torch.Tensor) -> None:
        """Add what waits on the drive to `part`, and put the sum there."""
        assert self.home is not None
        if self.reduced:
            before = torch.empty_like(part)
            self.home.load(before).wait()
            part.add_(before)
        self.put(part)

    def put(self, values: torch.Tensor) -> None:
        """Let `values`, the reduced gradient of the interval, wait on the drive; only its norms stay."""
        assert self.home is not None
        self.norms = self.measure(values, None)
        self.home.store(values)

    def measure(self, values: torch.Tensor, dtype: torch.dtype | None) -> list[torch.Tensor]:
        """Return the L2 norms of those pieces of `values`, the gradient of the interval, that count for the global norm.

        Computed in `dtype`, or in fp32 and wider for what is wider.
        """
        low = self.interval[0]
        spans = [] if self.norm_spans is None else self.norm_spans()
        if not spans:
            return []
        wide = self.dtype if self.dtype.itemsize > 4 else torch.float32
        return list(torch._foreach_norm([values[a - low : b - low] for a, b in spans], 2, dtype or wide))

    def expose(self) -> None:
        """Show reduced gradients as `param.grad` where this rank holds them whole, in the parameter's dtype."""
        if self.sharded or not self._everyone or self.dtype != self.unit.dtype or self.owned is None:
            return
        in_place = self.full is not None and self.full.data_ptr() == self.owned.data_ptr()
        for index, slot in enumerate(self.unit.slots):
            if self.touched[index]:
                part = self._view(index) if in_place else self.owned[slot.offset : slot.offset + slot.numel].view(slot.shape)
                slot.param.grad = part
        self.exposed = True

    def hide(self) -> None:
        """Take exposed gradients off the parameters, so that autograd does not add to them in place."""
        if self.exposed:
            self.exposed = False
            for slot in self.unit.slots:
                slot.param.grad = None

    def clear(self) -> None:
        """Forget everything collected since the last step."""
        self.hide()
        self._small.forget()
        count = len(self.filled)
        self.filled, self.touched = bytearray(count), bytearray(count)
        self.owned, self.reduced = None, False
        self.travelling, self._landing = [], DONE
        if self.sharded:
            self.full = self._views = None

    def at_rest(self) -> list[torch.Tensor]:
        """Return the buffer that is there between passes too."""
        buffer = self.full if not self.sharded else None if self.home is not None else self._owned_buffer
        return [] if buffer is None else [buffer]

    def tensors(self) -> list[torch.Tensor]:
        """Return the buffers that hold memory now."""
        kept = [self._owned_buffer] if self.sharded and self.home is None else []
        return kept + self.travelling + [buffer for buffer in (self.full, self.owned) if buffer is not None]

    def _set_aside(self) -> None:
        """Move reduced sums out of `full`, because a further backward will collect there before the step."""
        if self.owned is not None and self.full is not None and self.owned.data_ptr() == self.full[self.interval[0] :].data_ptr():
            self.hide()
            self.owned = self.owned.clone()

    def _view(self, index: int) -> torch.Tensor:
        """Return one parameter's part of the full buffer; made once for each buffer, since it costs as much as a small copy."""
        if self._views is None:
            self._views = [None] * len(self.params)
        view = self._views[index]
        if view is None:
            slot, full = self.unit.slots[index], self._buffer()
            view = self._views[index] = full[slot.offset : slot.offset + slot.numel].view(slot.shape)
        return view

    def _buffer(self) -> torch.Tensor:
        if self.full is None:
            self.full = self._new(self.unit.layout.padded)
        return self.full

    def _new(self, numel: int, empty: HostMemory | None = None) -> torch.Tensor:
        """Return an uninitialised buffer; only its padding is zero, since it is summed and measured too."""
        buffer = torch.empty(numel, dtype=self.dtype, device=self.unit.comm.device) if empty is None else empty(numel, self.dtype)
        used = self.unit.layout.numel
        if numel == self.unit.layout.padded and used < numel:
            buffer[used:].zero_()
        return buffer


def first_bad_parameter(units: Sequence[Unit], comm: Collectives, job: Collectives) -> str:
    """Return the name of the first parameter whose reduced gradient is not finite, the same on every rank of the job.

    Args:
        comm: the ranks that share these units. job: all ranks; those of other stages have other units.
    """
    found = math.inf
    base = 0
    for unit in units:
        gradients = unit.gradients
        low, high = gradients.interval  # type: ignore[union-attr]
        with unit.at_hand():
            for part in unit.layout.slices(low, high):
                piece = gradients.owned[part.at : part.at + part.stop - part.start]  # type: ignore[union-attr, index]
                if base + part.extent < found and not bool(torch.isfinite(piece).all()):
                    found = base + part.extent
        base += len(unit.slots)
    rows = comm.gather_rows(torch.tensor([found], dtype=torch.float64, device=comm.device))
    first = rows.min().item()
    names = [slot.name for unit in units for slot in unit.slots]
    name = names[int(first)] if math.isfinite(first) else ""
    if job is not comm:
        name = next(filter(None, job.gather_objects(name)), "")
    return name or "none (the norm itself overflows)"
