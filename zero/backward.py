"""One backward pass over the units: collect gradients, reduce each unit when its last one lands, in an order all ranks share."""

from __future__ import annotations

import operator
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from ..errors import EngineError
from ..parallel.collectives import Collectives, Pending
from .unit import Unit

_SECOND_BACKWARD = (
    "a second loss.backward() before step() reached parameters around the engine's outputs, and autograd has added to gradients "
    "that were reduced already; call engine.backward(loss) for it"
)
_REQUIRES_GRAD: Callable[[nn.Parameter], bool] = operator.attrgetter("requires_grad")
IN_FLIGHT = 2  # reductions that may be under way while the next unit computes


def in_backward() -> bool:
    """Return whether autograd is running in this thread (a private torch name, seen on 2.11 to 2.14)."""
    return torch._C._current_graph_task_id() != -1


class BackwardPass:
    """Watches gradients land and reduces units in a fixed order.

    The order is the same on every rank whatever each of them computed: a unit that one rank skipped is reduced with
    zeros, in its turn. It starts as the reverse of the module order and becomes what rank 0 saw in its first pass.

    Attributes:
        sync: whether this pass reduces; set before the pass.
        factor: what each gradient is multiplied by as it is collected.
        announced: the loss went through engine.backward(), so its scale is known to be right.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        comm: Collectives,
        on_unit_done: Callable[[Unit], None],
        on_end: Callable[[], None],
        *,
        in_flight: int = IN_FLIGHT,
    ) -> None:
        self.units = [unit for unit in units if unit.gradients is not None]
        self.comm = comm
        self.sync = True
        self.factor = 1.0
        self.announced = False
        self.plain_refusal: str | None = None  # why a step may not follow a backward outside engine.backward()
        self.tainted: str | None = None  # such a backward has left gradients
        self.total_passes = 0
        self.passes = 0  # completed passes that collected gradients, since the last step
        self._on_unit_done = on_unit_done
        self._on_end = on_end
        self._in_flight_limit = in_flight
        self._order = list(reversed(self.units))
        self._seen: list[Unit] | None = []  # completion order of the first pass, until it is shared
        self._active = False
        self._collected = False
        self._waits_for: dict[int, int] = {}
        self._complete: set[int] = set()
        self._cursor = 0
        self._in_flight: deque[Pending] = deque()
        self._handles: list[Any] = []
        for unit in self.units:
            self._watch_gradients(unit)

    def add(self, unit: Unit) -> None:
        """Collect the gradients of one more unit; its place in the order is found anew in the next pass."""
        self.units.append(unit)
        self._order.append(unit)
        self._seen = []
        self._watch_gradients(unit)

    def _watch_gradients(self, unit: Unit) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # released parameters need not be asked about each
            hooks = (slot.param.register_post_accumulate_grad_hook(self._collector(unit, slot.index)) for slot in unit.slots)
            self._handles += hooks

    # ---- life of a pass

    def begin(self) -> None:
        """Start a pass; within autograd its end is queued behind the last gradient.

        Called by the first of: engine.backward(), a hook on an output of the engine, the first gradient that lands.
        """
        if self._active:
            return
        self._active = True
        self._collected = False
        self._waits_for.clear()
        self._complete.clear()
        self._cursor = 0
        for unit in self.units:
            unit.gradients.hide()  # type: ignore[union-attr]
        if in_backward() and not self.announced:
            Variable._execution_engine.queue_callback(self.end)

    def end(self) -> None:
        """Reduce what is left, in order, and wait for all of it."""
        if not self._active:
            return
        self._active = False
        announced, self.announced = self.announced, False
        if self._collected or announced:
            self.passes += 1
            self.total_passes += 1
            if self.sync:
                self._reduce_up_to(len(self._order))
            self._drain(0)
            self._land()
            if self.sync:
                for unit in self.units:
                    unit.gradients.expose()  # type: ignore[union-attr]
        self._on_end()

    def abandon(self) -> None:
        """Forget a pass that raised, so that the next one starts clean."""
        self._active = self.announced = False
        self._in_flight.clear()
        for unit in self.units:
            unit.gradients.clear()  # type: ignore[union-attr]
            for slot in unit.slots:  # what autograd left where the error stopped it
                slot.param.grad = None
        self._on_end()

    def flush(self, dirty: Sequence[bool]) -> None:
        """Reduce the units that any rank still holds local sums for (`dirty` is agreed between ranks)."""
        for unit, needed in zip(self.units, dirty, strict=True):
            if needed:
                self._start(unit)
        self._drain(0)
        self._land()

    def _land(self) -> None:
        for unit in self.units:
            unit.gradients.land()  # type: ignore[union-attr]

    def after_step(self) -> None:
        """Forget gradients; once, adopt the order of rank 0's first pass."""
        self.forget()
        if self._seen is not None:
            self._share_order()

    def forget(self) -> None:
        """Drop the gradients collected since the last step."""
        self.passes = 0
        self.tainted = None
        for unit in self.units:
            unit.gradients.clear()  # type: ignore[union-attr]

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def active(self) -> bool:
        """Whether a pass has begun and not ended."""
        return self._active

    # ---- inside a pass

    def _collector(self, unit: Unit, index: int) -> Callable[[nn.Parameter], Any]:
        # A hook lives in C++, where the garbage collector does not see the circle back to its parameter.
        pass_of, unit_of = weakref.ref(self), weakref.ref(unit)

        def collect(param: nn.Parameter) -> None:
            backward, owner = pass_of(), unit_of()
            if backward is not None and owner is not None:
                backward._collect(owner, index)

        return collect

    def _collect(self, unit: Unit, index: int) -> None:
        gradients = unit.gradients
        assert gradients is not None
        if not self._active:
            if gradients.exposed:
                raise EngineError(_SECOND_BACKWARD)
            self.begin()
        if not self._collected:
            self._collected = True
            if not self.announced and self.plain_refusal:
                # No error yet: another engine's loss may run through this model, and zero_grad() may follow.
                self.tainted = self.plain_refusal
        gradients.accept(index, self.factor)
        left = self._waits_for.get(unit.index)
        if left is None:
            left = sum(map(_REQUIRES_GRAD, gradients.params))
        self._waits_for[unit.index] = left = left - 1
        if left == 0:
            self._unit_complete(unit)

    def collect_left(self, units: Sequence[Unit]) -> None:
        """Collect gradients that were left on the parameters of `units` by other means than a backward over them."""
        for unit in units:
            for slot in unit.slots:
                if slot.param.grad is not None:
                    self._collect(unit, slot.index)

    def passed(self, unit: Unit) -> None:
        """Take note that the backward needs a unit no more: what has no gradient gets none, and its reduction need not wait.

        Other ranks may have had all its gradients long ago, and wait for this one. A backward that only differentiates with
        respect to inputs or other tensors (autograd.grad) collects nothing, so it reduces nothing.
        """
        if self._active and (self._collected or self.announced) and unit.gradients is not None and unit.index not in self._complete:
            self._unit_complete(unit)

    def _unit_complete(self, unit: Unit) -> None:
        self._complete.add(unit.index)
        unit.note("its last gradient is there")
        if self._seen is not None:
            self._seen.append(unit)
        if self.sync:
            upto = self._cursor
            while upto < len(self._order) and self._order[upto].index in self._complete:
                upto += 1
            self._reduce_up_to(upto)
        self._on_unit_done(unit)

    def _reduce_up_to(self, end: int) -> None:
        while self._cursor < end:
            self._start(self._order[self._cursor])
            self._cursor += 1

    def _start(self, unit: Unit) -> None:
        self._drain(max(self._in_flight_limit - 1, 0))
        self._in_flight.append(unit.gradients.reduce())  # type: ignore[union-attr]
        self._drain(self._in_flight_limit)

    def _drain(self, allowed: int) -> None:
        while len(self._in_flight) > allowed:
            self._in_flight.popleft().wait()

    def _share_order(self) -> None:
        seen, self._seen = self._seen or [], None
        unique = list(dict.fromkeys(unit.index for unit in seen))
        rest = [unit.index for unit in self._order if unit.index not in set(unique)]
        by_index = {unit.index: unit for unit in self.units}
        self._order = [by_index[index] for index in self.comm.numbers_of_first(unique + rest, unit="order")]
