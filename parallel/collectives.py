"""The one door to torch.distributed: every call says which state and unit it serves, is counted, and is written to a ring."""

from __future__ import annotations

import itertools
import pickle
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import RankError
from .clock import clock_for
from .distributed import default_store
from .imagined import Imagined, imagined_world
from .ring import Ring
from .transport import Transport, transport_for
from .watch import NoWatch, Watch

CONTROL = "control"  # the state that small agreement calls are booked under


@dataclass
class Traffic:
    """What one kind of collective moved for one state: calls, payload bytes (the full buffer), bytes sent by this rank."""

    calls: int = 0
    num_bytes: int = 0
    sent_bytes: int = 0

    def add(self, num_bytes: int, sent_bytes: int) -> None:
        """Book one call."""
        self.calls += 1
        self.num_bytes += num_bytes
        self.sent_bytes += sent_bytes


class Pending:
    """A collective in flight; wait() returns when its result may be read. Waiting twice is allowed."""

    __slots__ = ("_finish",)

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        self._finish = finish

    def wait(self) -> None:
        """Block (on an accelerator: make the current stream wait) until the result is there.

        Raises:
            RankError: a peer is gone or the timeout has passed; names operation, state and unit.
        """
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


DONE = Pending()


class Collectives:
    """Collectives over one process group, on flat buffers cut at given bounds.

    `bounds` are W+1 element offsets; rank r owns [bounds[r], bounds[r+1]). They need not be even. Sums run in rank
    order 0, 1, … on CPU, so that every stage and every run adds in the same order.

    Attributes:
        is_imagined: whether this is a dry run, whose other ranks do not exist and whose tensors have no values.
        on_host: whether the ranks compute on the CPU; in a dry run, whether those that are imagined do.
    """

    def __init__(self, group: Any = None, device: torch.device | None = None, ring_path: Path | None = None) -> None:
        if not dist.is_initialized():
            raise RankError("no process group exists (or it was destroyed): call stateroom.init_distributed() first")
        self.device = device or torch.device("cpu")
        self.traffic: dict[tuple[str, str], Traffic] = {}
        self.ring = Ring(ring_path)
        self.clock = clock_for(self.device)
        self._tags: dict[tuple[str, str], int] = {}
        self._watch: Watch | NoWatch = NoWatch()
        self.renew(dist.group.WORLD if group is None else group)

    def renew(self, group: Any) -> None:
        """Use this group, for the first time or after `sever`; every rank of it must call it, and calls are counted anew."""
        self._watch.close()
        self.group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        world = imagined_world()
        self.is_imagined = world is not None
        self.on_host = self.device.type == "cpu" and (world is None or world.backend == "gloo")
        self._transport: Transport = (
            transport_for(group, self.rank, self.world) if world is None else Imagined(world, group, self.rank, self.world)
        )
        self._meetings = 0
        # which of this group's instances this is: meetings of an earlier engine must not count for this one
        key = f"stateroom/serial/{self._group_name()}/{self.rank}"
        is_fake = dist.get_backend(group) == "fake"
        self._serial = 0 if is_fake else default_store().add(key, 1)
        self._watch = NoWatch()
        if self.world > 1 and not is_fake:
            prefix = f"stateroom/watch/{self._group_name()}/{self._serial}"
            self._watch = Watch(self.rank, self.world, dist.PrefixStore(prefix, default_store()))

    # ---- flat buffers

    def all_gather(self, flat: torch.Tensor, bounds: Sequence[int], *, state: str, unit: str) -> Pending:
        """Fill `flat` [bounds[-1]] on every rank from each rank's own interval, which is already in place."""
        if self.world == 1:
            return DONE
        own = bounds[self.rank + 1] - bounds[self.rank]
        sent = own * (self.world - 1) * flat.element_size()
        return self._run("all_gather", state, unit, flat.nbytes, sent, lambda tag: self._transport.all_gather(flat, bounds, tag))

    def reduce_scatter(
        self, flat: torch.Tensor, bounds: Sequence[int], *, state: str, unit: str, wire: torch.dtype | None = None
    ) -> Pending:
        """Sum `flat` over ranks; afterwards this rank's own interval holds the sum and the rest is undefined.

        `wire` is the dtype that travels; on CPU what arrives is added in the dtype of `flat`.
        """
        if self.world == 1:
            return DONE
        wire = wire or flat.dtype
        own = bounds[self.rank + 1] - bounds[self.rank]
        return self._run(
            "reduce_scatter",
            state,
            unit,
            flat.numel() * wire.itemsize,
            (flat.numel() - own) * wire.itemsize,
            lambda tag: self._transport.reduce_scatter(flat, bounds, wire, tag),
        )

    def all_reduce(self, flat: torch.Tensor, bounds: Sequence[int], *, state: str, unit: str, wire: torch.dtype | None = None) -> Pending:
        """Sum `flat` over ranks in place: a reduce-scatter and an all-gather, and booked as these two."""
        first = self.reduce_scatter(flat, bounds, state=state, unit=unit, wire=wire)

        def finish() -> None:
            first.wait()
            self.all_gather(flat, bounds, state=state, unit=unit).wait()

        return DONE if self.world == 1 else Pending(finish)

    # ---- small agreements

    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        """Return [W, k]: the row [k] of every rank, in rank order, equal on all ranks."""
        if self.world == 1:
            return row.unsqueeze(0)
        rows = torch.empty((self.world, row.numel()), dtype=row.dtype, device=row.device)
        rows[self.rank] = row
        bounds = range(0, rows.numel() + 1, row.numel())
        self.all_gather(rows.view(-1), bounds, state=CONTROL, unit="rows").wait()
        return rows

    def gather_numbers(self, row: torch.Tensor) -> list[list[float]]:
        """Return the row [k] of every rank as numbers; all of them 0 in an imagined world, where tensors have no values."""
        rows = self.gather_rows(row)
        return [[0.0] * row.numel()] * self.world if self.is_imagined else rows.tolist()

    def known_numbers(self, number: int) -> list[int]:
        """Return every rank's whole number, in rank order; in an imagined world all ranks have this one's."""
        rows = self.gather_rows(torch.tensor([number], dtype=torch.int32, device=self.device))
        return [number] * self.world if self.is_imagined else rows.flatten().tolist()

    def numbers_of_first(self, numbers: Sequence[int], *, unit: str) -> list[int]:
        """Return rank 0's whole numbers, of which every rank has as many."""
        sent = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        self.broadcast(sent, state="setup", unit=unit)
        return list(numbers) if self.is_imagined else sent.tolist()

    def any_flags(self, flags: bytes) -> bytes:
        """Return for each byte 1 where any rank's is not 0, else 0."""
        if self.world == 1:
            return flags
        counts = torch.frombuffer(bytearray(flags), dtype=torch.uint8).to(torch.int32).to(self.device)
        self.sum_(counts)
        return flags if self.is_imagined else (counts > 0).to(torch.uint8).cpu().numpy().tobytes()

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a small tensor over ranks in place and return it."""
        if self.world > 1:
            start = lambda tag: self._transport.small_sum(tensor, tag)  # noqa: E731
            self._run("all_reduce", CONTROL, "sum", tensor.nbytes, tensor.nbytes * (self.world - 1), start).wait()
        return tensor

    def broadcast(self, tensor: torch.Tensor, *, state: str = CONTROL, unit: str = "", source: int = 0) -> None:
        """Overwrite `tensor` with the value of group rank `source`."""
        if self.world > 1 and tensor.numel():
            sent = tensor.nbytes if self.rank == source else 0
            flat = tensor.contiguous()  # messages are sent from, and received in, one piece of memory
            start = lambda tag: self._transport.broadcast(flat, source, tag)  # noqa: E731
            self._run("broadcast", state, unit, tensor.nbytes, sent, start).wait()
            if flat is not tensor:
                tensor.copy_(flat)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's value (picklable), in rank order. Slow: for start-up and error messages."""
        if self.world == 1 or self.is_imagined:
            return [value] * self.world
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self.device)
        sizes = self.gather_rows(torch.tensor([mine.numel()], device=self.device)).flatten().tolist()
        bounds = [0, *itertools.accumulate(sizes)]
        flat = torch.empty(bounds[-1], dtype=torch.uint8, device=self.device)
        flat[bounds[self.rank] : bounds[self.rank + 1]] = mine
        self.all_gather(flat, bounds, state=CONTROL, unit="objects").wait()
        data = flat.cpu().numpy().tobytes()
        return [pickle.loads(data[low:high]) for low, high in itertools.pairwise(bounds)]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world > 1:
            self.sum_(torch.zeros(1, device=self.device))

    def meet(self, what: str, timeout_s: float = 30.0) -> None:
        """Wait until every rank has come to `what`, without a collective that could hang.

        Raises:
            RankError: some ranks did not come within timeout_s; the message names them.
        """
        if self.world == 1 or self.is_imagined:
            return
        self._meetings += 1
        store = dist.PrefixStore(f"stateroom/meet/{self._group_name()}/{self._serial}/{self._meetings}", default_store())
        store.set(f"{what}/{self.rank}", "here")
        deadline = time.monotonic() + timeout_s
        missing = []
        for rank in range(self.world):
            left = max(deadline - time.monotonic(), 0.001)
            try:
                store.wait([f"{what}/{rank}"], timedelta(seconds=left))
            except (dist.DistStoreError, RuntimeError):
                missing.append(rank)
        if missing:
            self._meetings -= 1  # it did not take place: a script that catches the error can go on
            store.delete_key(f"{what}/{self.rank}")
            raise RankError(
                f"{what}: rank {self.rank} waited {timeout_s:.0f} s, but rank(s) {missing} of {self.world} never called it; "
                f"every rank must call {what}"
            )

    def tell(self, trouble: str) -> None:
        """Let the other ranks know why this one cannot go on, before it raises; what they wait in then ends with that reason.

        Returns when they know, after seconds at most. For what happens to one rank alone, outside what ranks agree on.
        """
        self._watch.tell(trouble)

    # ---- accounts

    def snapshot(self) -> dict[tuple[str, str], Traffic]:
        """Return a copy of the counters, keyed (kind, state)."""
        return {key: Traffic(t.calls, t.num_bytes, t.sent_bytes) for key, t in self.traffic.items()}

    def sever(self) -> None:
        """Let go of the group, so that it closes once it is destroyed and peers that wait here raise; nothing can be sent after."""
        self.group = self._transport = None  # type: ignore[assignment]

    def close(self) -> None:
        """Release the ring and end the watch."""
        self._watch.close()
        self.ring.close()

    def _group_name(self) -> str:
        return str(getattr(self.group, "group_name", "world"))

    def _run(self, kind: str, state: str, unit: str, num_bytes: int, sent_bytes: int, start: Callable[[int], Callable[[], Any]]) -> Pending:
        """Start one call, book it, and return what waits for it."""
        key = (kind, state)
        if key not in self.traffic:
            self.traffic[key] = Traffic()
        self.traffic[key].add(num_bytes, sent_bytes)
        if not dist.is_initialized():  # the group object outlives its destruction, and on gloo even works on
            raise self._failed(kind, state, unit, RuntimeError())
        if self._watch.trouble:
            raise self._failed(kind, state, unit, RuntimeError())
        sequence = self.ring.start(kind, state, unit, num_bytes)
        call = f"{kind}/{unit}"
        number = self._watch.started(call)
        try:
            wait = start(self._tag(kind, unit))
        except (RuntimeError, ValueError, AssertionError) as error:
            raise self._failed(kind, state, unit, error) from error

        def finish() -> None:
            began = self.clock.mark()
            self._watch.waits(call, number, state)
            try:
                wait()
            except RuntimeError as error:
                raise self._failed(kind, state, unit, error) from error
            finally:
                self._watch.done()
            self.clock.waited(f"{kind} of {state}", began)
            self.ring.end(sequence)

        return Pending(finish)

    def _tag(self, kind: str, unit: str) -> int:
        """Return the message tag of a unit's collective: ranks that are out of step never read each other's bytes."""
        key = (kind, unit)
        if key not in self._tags:
            self._tags[key] = zlib.crc32(f"{kind}/{unit}".encode()) & 0x7FFFFFFF
        return self._tags[key]

    def _failed(self, kind: str, state: str, unit: str, error: BaseException) -> RankError:
        what = f"{kind} of {state} for unit {unit!r} failed on rank {self.rank} of {self.world}"
        if not dist.is_initialized():
            return RankError(f"{what}: the process group was destroyed; create it again and call initialize anew")
        if self._watch.trouble:
            return RankError(f"{what}: {self._watch.trouble}")
        detail = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return RankError(f"{what}: {detail}. A peer ended, or the ranks do not run the same steps; look at the other ranks' first error")
