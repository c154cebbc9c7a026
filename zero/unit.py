"""A unit: parameters that are gathered, updated and released together, as views of one flat buffer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import EngineError
from ..parallel.collectives import DONE, Collectives, Pending
from .gradients import Gradients
from .layout import Layout
from .parameter import SLOT, Slot, ZeroParamStatus, hide, show, slot_of
from .tiers.copies import copy_ahead

if TYPE_CHECKING:
    from .tiers.residence import Residence
    from .tiers.tiers import Tiers

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
        index: int = 0,
        tiers: Tiers | None = None,
    ) -> None:
        self.name = name
        self.layout = layout
        self.comm = comm
        self.dtype = dtype
        self.sharded = sharded and (comm.world > 1 or (tiers is not None and tiers.moves_params))
        self.comes_from_afar = comm.world > 1 and tiers is not None and tiers.moves_params  # a gather waits for the shard first
        self.trainable = trainable
        self.index = index
        self.lo, self.hi = layout.interval(comm.rank)
        self.pinned = False  # stays gathered from the start of a forward to the end of its backward
        self.parked: frozenset[str] = frozenset()  # kinds of states that engine.offload_states() has moved away
        self.lost = False  # the engine was destroyed while only shards existed
        self.is_copy = False  # another stage has the same parameters and owns them: they are counted and saved there
        self.holds = 0  # contexts that need the values to stay
        self.access_handler: AccessHandler | None = None
        self.copy_handler: AccessHandler | None = None
        self.before_write: Callable[[], None] | None = None  # called before values change from outside: waits for who still reads them
        self.optimizer: Any = None  # the ShardedOptimizer that updates this unit, for reading its states
        self.gradients: Gradients | None = None
        self.master: torch.Tensor | None = None  # set by the optimizer: the dtype and interval that it updates
        self.master_is_shard = False  # the optimizer updates the parameter's own bytes, with no separate master copy
        self.master_interval = (0, layout.padded)
        self.residence: Residence | None = None  # what of it rests on a drive
        self.life: deque[tuple[float, str, str]] = deque(maxlen=LIFE)  # moment on the host's clock, during what, what
        self._pending: Pending | None = None
        self._arriving: Pending | None = None  # the shard, on its way into `full`
        self.nan = torch.full((), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=comm.device)
        self.full = torch.zeros(layout.padded, dtype=dtype, device=comm.device) if full is None else full
        self.slots = [Slot(self, i, name, param) for i, (name, param) in enumerate(named_params)]
        self._adopt()
        comm.broadcast(self.full, state="parameters", unit=name)  # every rank starts from rank 0's values
        self.gathered = True
        self.acknowledge()
        own = self.full[self.lo : self.hi]
        if not self.sharded:
            self.shard = own
        else:
            self.shard = own.clone() if tiers is None else tiers.keep_shard(self, own)

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
                slot.param.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]

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
        self.preload()
        arriving, self._arriving = self._arriving or DONE, None
        if self.comm.world == 1:
            self._pending = arriving
            return
        arriving.wait()
        self._pending = self.comm.all_gather(self.full, self.layout.bounds, state=state, unit=self.name)

    def preload(self) -> None:
        """Start bringing this rank's own part into the full buffer from where it rests; no other rank is needed."""
        if self.gathered or self._pending is not None or self._arriving is not None:
            return
        if "lp_params" in self.parked:
            self.refuse_parked()
        self.full.untyped_storage().resize_(self.full_bytes)
        self._arriving = self._bring_own()

    def _bring_own(self) -> Pending:
        own = self.full[self.lo : self.hi]
        if self.residence is not None and self.residence.shard is not None:
            return Pending(self.residence.shard.load(own).wait)
        return copy_ahead(own, self.shard)

    def _keep_own(self) -> None:
        """Take this rank's part of the full buffer to where it rests."""
        own = self.full[self.lo : self.hi]
        if self.residence is not None and self.residence.shard is not None:
            self.residence.shard.store(own)
        else:
            self.shard.copy_(own)

    def at_hand(self, *, write: bool = False) -> AbstractContextManager[None]:
        """A context in which shard, master weights, gradients and optimizer states are in memory; with `write` changes are kept."""
        if self.parked:
            self.refuse_parked()
        return nullcontext() if self.residence is None else self.residence.hold(write)

    def refuse_parked(self) -> None:
        """Say that the states are away.

        Raises:
            EngineError: always.
        """
        raise EngineError(f"engine.offload_states() has moved {', '.join(sorted(self.parked))} away; call engine.reload_states() first")

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
        show(self.slots)

    def release(self) -> None:
        """Let the full buffer go; without effect for a unit that is not sharded, or while a context holds it."""
        if not self.sharded or self.holds:
            return
        self._forget_preloaded()
        if self._pending is not None:
            self.gather()
        if not self.gathered:
            return
        hide(self.slots, self.nan)
        if not self.full.untyped_storage().resizable():
            self._leave_buffer()
        self.full.untyped_storage().resize_(0)
        self.gathered = False
        self.note("freed: only the shard is left")

    def _forget_preloaded(self) -> None:
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
            self.full.untyped_storage().resize_(0)

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
        with torch.no_grad(), self.at_hand(write=self.master is not None and not self.master_is_shard):
            if self.master is not None and not self.master_is_shard:
                low, high = self.master_interval
                _follow(self.master, self.full[low:high], exactly)
        with torch.no_grad():
            if self.sharded:
                self._keep_own()
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
            with torch.no_grad(), self.at_hand(write=True):
                _follow(self.master[start - low : stop - low], self.full[start:stop], exactly=False)

    def on_access(self, slot: Slot) -> None:
        """Gather because values were touched while released, or say what to call instead."""
        if "lp_params" in self.parked:
            self.refuse_parked()
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

    def publish(self, *, taken_up: bool = False) -> Pending:
        """Bring updated master values to the parameters: cast, and all-gather where every rank keeps them whole.

        With `taken_up` the update has brought them to this rank's own part already.
        """
        if self.master is None:
            return DONE
        low, high = self.master_interval
        self.note(UPDATED)
        if not self.master_is_shard:
            home = self.residence
            if home is not None and home.shard is not None:
                if home.master is None:
                    home.shard.store(self.master.to(self.dtype))
                elif not taken_up:
                    with self.at_hand(write=True):
                        self.shard.copy_(self.master)
            elif not taken_up:
                with self.at_hand():
                    self.take_up(self.master, low)
        self.acknowledge()
        if self.sharded:
            self.refresh()
            return DONE
        if (low, high) == (0, self.layout.padded):
            return DONE
        self.note("gather starts (every rank takes the new values)")
        return self.comm.all_gather(self.full, self.layout.bounds, state="parameters", unit=self.name)

    def take_up(self, values: torch.Tensor, start: int, *, stays: bool = True) -> None:
        """Cast new master values of elements from `start` on into this rank's own part of the parameters, where that is in memory.

        Values that do not `stay` where they are after this call are waited for.
        """
        if self.master_is_shard or (self.residence is not None and self.residence.shard is not None):
            return
        part, base = (self.shard, self.lo) if self.sharded else (self.full, 0)
        with torch.no_grad():
            part[start - base : start - base + values.numel()].copy_(values, non_blocking=stays)

    def refresh(self) -> None:
        """Drop gathered values that the shard has outgrown; gather anew where a context holds them. Whole ones stay."""
        if not self.sharded:
            return
        self._forget_preloaded()
        if self._pending is not None:
            self.gather()
        if self.gathered and self.holds:
            self._bring_own().wait()
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
        self._forget_preloaded()
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        for slot in self.slots:
            slot.param.grad = None
        if self.gathered:
            hide(self.slots, self.nan)
        self.gathered = False
        self.lost = True
        self._drop()
        self.access_handler = _lost

    def drop_pending(self) -> None:
        """Forget a gather under way, whose peers will not come any more."""
        self._pending = None

    def discard(self) -> None:
        """Let go of parameters that another unit has taken over."""
        self.holds = 0
        self.gathered = False
        self._drop()

    def _drop(self) -> None:
        self.slots = []
        self.optimizer = self.access_handler = self.copy_handler = self.before_write = None
        self.full = self.shard = torch.empty(0, dtype=self.dtype)
        self.master = self.residence = None
        self.master_is_shard = False
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
