"""A unit: parameters that are gathered, updated and released together, as views of one flat buffer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import EngineError
from ..parallel.collectives import DONE, Collectives, Pending
from .gradients import Gradients
from .layout import Layout
from .parameter import SLOT, Slot, hide, show, slot_of

AccessHandler = Callable[["Unit", Slot], None]
UPDATED = "updated by the optimizer"
LIFE = 512  # events of a unit that are kept; a micro-batch has about eight


class Unit:
    """Parameters of one dtype, one trainability and one life cycle.

    While gathered, every parameter is a view of `full`. Sharded units rest as `shard`, this rank's interval; their full
    storage is resized to nothing and back, so that views which autograd saved see the weights again.
    """

    def __init__(
        self,
        name: str,
        named_params: Sequence[tuple[str, nn.Parameter]],
        layout: Layout,
        comm: Collectives,
        *,
        dtype: torch.dtype,
        sharded: bool,
        trainable: bool = True,
        full: torch.Tensor | None = None,
    ) -> None:
        self.name = name
        self.layout = layout
        self.comm = comm
        self.dtype = dtype
        self.sharded = sharded and comm.world > 1
        self.trainable = trainable
        self.index = 0
        self.lo, self.hi = layout.interval(comm.rank)
        self.pinned = False  # stays gathered from the start of a forward to the end of its backward
        self.lost = False  # the engine was destroyed while only shards existed
        self.holds = 0  # contexts that need the values to stay
        self.access_handler: AccessHandler | None = None
        self.copy_handler: AccessHandler | None = None
        self.before_write: Callable[[], None] | None = None  # called before values change from outside: waits for who still reads them
        self.optimizer: Any = None  # the ShardedOptimizer that updates this unit, for reading its states
        self.gradients: Gradients | None = None
        self.master: torch.Tensor | None = None  # set by the optimizer: the dtype and interval that it updates
        self.master_interval = (0, layout.padded)
        self.life: deque[tuple[float, str, str]] = deque(maxlen=LIFE)  # moment on the host's clock, during what, what
        self._pending: Pending | None = None
        self._nan = torch.full((), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=comm.device)
        self.full = torch.zeros(layout.padded, dtype=dtype, device=comm.device) if full is None else full
        self.slots = [Slot(self, i, name, param) for i, (name, param) in enumerate(named_params)]
        self._adopt()
        comm.broadcast(self.full, state="parameters", unit=name)  # every rank starts from rank 0's values
        self.gathered = True
        self.acknowledge()
        own = self.full[self.lo : self.hi]
        self.shard = own.clone() if self.sharded else own

    def _adopt(self) -> None:
        """Copy each parameter into the flat buffer and make it a view of it, one at a time, freeing the original."""
        for slot in self.slots:
            old = slot_of(slot.param)
            if old is not None and old.unit is not self:
                old.unit.gather()
                slot.cls = old.cls
            end = slot.offset + slot.numel
            slot.view = self.full[slot.offset : end].view(slot.shape)
            with torch.no_grad():
                if slot.param.data_ptr() != slot.view.data_ptr():  # else it came to life there
                    slot.view.copy_(slot.param.detach())
            slot.param.grad = None
            # .data keeps the parameter's own version counter: refilling the buffer does not look like a user's write
            slot.param.data = slot.view
            setattr(slot.param, SLOT, slot)
            if old is not None and old.unit is not self and len(old.unit.slots) == 1:
                old.unit.discard()  # or its buffer would stay, whole, until the garbage collector looks at the circle that it is in
            if self.sharded:  # the attributes by which other libraries recognise a sharded parameter
                slot.param.ds_id, slot.param.ds_shape, slot.param.ds_numel = id(slot), slot.shape, slot.numel  # type: ignore[attr-defined]

    @property
    def full_bytes(self) -> int:
        """Bytes of the full buffer while gathered."""
        return self.layout.padded * self.dtype.itemsize

    def note(self, what: str) -> None:
        """Keep in mind what happens now, for trace_parameter()."""
        self.life.append((time.perf_counter(), "backward" if torch._C._current_graph_task_id() != -1 else "", what))

    # ---- gather and release

    def request(self, state: str = "reading") -> None:
        """Start gathering, booked under `state`; nothing happens when the values are here or on their way."""
        if self.gathered or self._pending is not None:
            return
        self.note(f"gather starts ({state})")
        self.full.untyped_storage().resize_(self.full_bytes)
        with torch.no_grad():
            self.full[self.lo : self.hi].copy_(self.shard)
        self._pending = self.comm.all_gather(self.full, self.layout.bounds, state=state, unit=self.name)

    def gather(self, state: str = "reading") -> None:
        """Return when every parameter of the unit holds its values on this rank.

        Raises:
            RankError: a peer is gone.
        """
        if self.gathered:
            return
        self.request(state)
        pending, self._pending = self._pending, None
        (pending or DONE).wait()
        self.gathered = True
        self.note("whole: gathered")
        for slot in self.slots:
            show(slot)

    def release(self) -> None:
        """Let the full buffer go; without effect for a unit that is not sharded, or while a context holds it."""
        if not self.sharded or self.holds:
            return
        if self._pending is not None:
            self.gather()
        if not self.gathered:
            return
        for slot in self.slots:
            hide(slot, self._nan)
        if not self.full.untyped_storage().resizable():
            self._leave_buffer()
        self.full.untyped_storage().resize_(0)
        self.gathered = False
        self.note("freed: only the shard is left")

    def _leave_buffer(self) -> None:
        """Leave the memory to a NumPy array or the like that shares it, and go on with a buffer of our own."""
        self.full = torch.empty_like(self.full)
        for slot in self.slots:
            slot.view = self.full[slot.offset : slot.offset + slot.numel].view(slot.shape)

    def keep(self, *, exactly: bool = True) -> None:
        """Take over what was written into the gathered parameters: shard and master follow.

        With `exactly` the master becomes what the parameters hold. Without it only elements that were changed follow, so that
        a script that looks after its weights in 16 bits does not round away what the master has gained.
        """
        if not self.gathered:
            raise EngineError(f"unit {self.name!r} has nothing to keep: its parameters are not gathered")
        self.expect_write()
        with torch.no_grad():
            if self.sharded:
                self.shard.copy_(self.full[self.lo : self.hi])
            if self.master is not None and not self.master_is_shard:
                low, high = self.master_interval
                _follow(self.master, self.full[low:high], exactly)
        self.acknowledge()

    def expect_write(self) -> None:
        """Return when the values may change: a checkpoint that is being taken of them has been copied."""
        if self.before_write is not None:
            self.before_write()

    def acknowledge(self) -> None:
        """Take the parameters' values as known: what is written from now on is a change."""
        if not self.sharded and not self.master_is_shard:
            for slot in self.slots:
                slot.version = slot.param._version

    def master_follows(self, slot: Slot) -> None:
        """Let the master weights of one parameter follow what was written into it; without effect where they are one memory."""
        self.expect_write()
        slot.version = slot.param._version
        if self.master is not None and not self.master_is_shard:
            low, high = self.master_interval
            start, stop = min(max(slot.offset, low), high), max(min(slot.offset + slot.numel, high), low)
            with torch.no_grad():
                _follow(self.master[start - low : stop - low], self.full[start:stop], exactly=False)

    @property
    def master_is_shard(self) -> bool:
        """Whether the optimizer updates the parameter's own bytes (fp32), with no separate master copy."""
        return self.master is not None and self.master.dtype == self.dtype

    def on_access(self, slot: Slot) -> None:
        """Gather because values were touched while released, or say what to call instead."""
        if self.access_handler is not None:
            self.access_handler(self, slot)
            return
        raise EngineError(
            f"parameter {slot.name!r} is sharded over {self.comm.world} ranks (ZeRO-3) and its values are not here; "
            "read or change it inside `with stateroom.zero.GatheredParameters([param]):` on every rank, "
            "or use engine.module_state_dict() for whole weights"
        )

    def on_copy(self, slot: Slot) -> None:
        """Gather because the parameter is being deep-copied, as all ranks do with their copy of the model."""
        (self.copy_handler or type(self).on_access)(self, slot)

    # ---- after the optimizer

    def publish(self) -> Pending:
        """Bring updated master values to the parameters: cast, and all-gather where every rank keeps them whole."""
        if self.master is None:
            return DONE
        low, high = self.master_interval
        self.note(UPDATED)
        with torch.no_grad():
            if not self.master_is_shard:
                target = self.shard if self.sharded else self.full[low:high]
                target.copy_(self.master)
        self.acknowledge()
        if self.sharded:
            self.refresh()
            return DONE
        if (low, high) == (0, self.layout.padded):
            return DONE
        self.note("gather starts (every rank takes the new values)")
        return self.comm.all_gather(self.full, self.layout.bounds, state="parameters", unit=self.name)

    def refresh(self) -> None:
        """Drop gathered values that the shard has outgrown; gather anew where a context holds them. Whole ones stay."""
        if not self.sharded:
            return
        if self._pending is not None:
            self.gather()
        if self.gathered and self.holds:
            with torch.no_grad():
                self.full[self.lo : self.hi].copy_(self.shard)
            self.comm.all_gather(self.full, self.layout.bounds, state="parameters", unit=self.name).wait()
        else:
            self.release()

    def detach(self) -> None:
        """Give whole parameters storage of their own and forget them; sharded ones lose their values, without a collective."""
        if self.sharded:
            self._abandon()
            return
        for slot in self.slots:
            slot.param.data = slot.view.clone()  # type: ignore[union-attr]
            slot.param.grad = None
            for name in (SLOT, "ds_id", "ds_shape", "ds_numel", "ds_status"):
                vars(slot.param).pop(name, None)
        self._drop()

    def _abandon(self) -> None:
        self.holds = 0
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        for slot in self.slots:
            slot.param.grad = None
            if self.gathered:
                hide(slot, self._nan)
        self.gathered = False
        self.lost = True
        self._drop()
        self.access_handler = _lost

    def discard(self) -> None:
        """Let go of parameters that another unit has taken over."""
        self.holds = 0
        self.gathered = False
        self._drop()

    def _drop(self) -> None:
        self.slots = []
        self.optimizer = self.access_handler = self.copy_handler = self.before_write = None
        self.full = self.shard = torch.empty(0, dtype=self.dtype)
        self.master = None
        self.gradients = None


def _follow(master: torch.Tensor, values: torch.Tensor, exactly: bool) -> None:
    """Write 16-bit values into their fp32 master: all of them, or those that are not what the master rounds to."""
    if exactly:
        master.copy_(values)
    else:
        torch.where(master.to(values.dtype) == values, master, values.to(master.dtype), out=master)


def _lost(unit: Unit, slot: Slot) -> None:
    raise EngineError(
        f"parameter {slot.name!r} was sharded by an engine that is destroyed, and its values are gone; "
        "take engine.module_state_dict() before destroy()"
    )
