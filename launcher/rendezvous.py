"""The agents' rendezvous: hosts in the list's order, and a fresh store for the ranks of every attempt.

Seen with torch 2.13: the c10d rendezvous numbers hosts by the text of their addresses; its shared store outlives a
restart, so that the ranks of the next attempt meet keys of the last and never come up; and a host that was not the
first before keeps the old first one's address. Here a host's label begins with its number, and node 0 opens a store of
its own for each attempt and tells the others where. Adapted to torch's RendezvousHandler, 2.11 to 2.14.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from .control import Control
from .job import FIXED, Order
from .preflight import Listener
from .problem import LaunchError

STORE_TIMEOUT = timedelta(seconds=60)
JOIN_S = 600.0
_POLL_S = 1.0
_REJOIN_S = 3.0
_LEAVE_S = 5.0


class FailedElsewhere(LaunchError):
    """A rank failed on a host that this one only meets through the rendezvous."""


class HostRendezvous(RendezvousHandler):
    """Bring the hosts of an order together; `attempt` counts the rounds, alike on all hosts.

    Raises (from its methods):
        LaunchError: the first host cannot be reached, or another host reported that the job failed.
    """

    def __init__(self, order: Order, listener: Listener, control: Control) -> None:
        self.attempt = order.attempt
        self._order, self._control = order, control
        self._base = _open_store(order, listener, control.check)
        self._marks = PrefixStore(f"stateroom.{order.run_id}", self._base)
        self._fresh: TCPStore | None = None
        self._inner = None if order.kind == FIXED else _c10d(order, self._base)
        self._rounds = self._size = 0
        self._next_poll = 0.0
        self._missing_since: float | None = None

    def get_backend(self) -> str:
        """See the base class."""
        return self._order.kind

    @property
    def use_agent_store(self) -> bool:
        """See the base class: ranks are clients of the store that node 0's agent keeps."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """See the base class."""
        if self._inner is None:
            store: Store = PrefixStore(f"hosts.{self._order.run_id}", self._base)
            rank, size = self._order.node, self._order.max_nodes
        else:
            # Its own shared store would be the first host's for ever; ours is made below.
            with self._control.interruptible():
                info = self._inner.next_rendezvous()
            store, rank, size = info.store, info.rank, info.world_size
        where = self._publish(store) if rank == 0 else _wait_for(store, "ranks_store", self._control.check)
        self.attempt = where["attempt"]
        self._rounds, self._size = self._rounds + 1, size
        return RendezvousInfo(store, rank, size, RendezvousStoreInfo(self._order.address, where["port"]))

    def _publish(self, store: Store) -> dict[str, int]:
        """Open the store of this attempt's ranks, and tell the others where it is.

        The first attempt shares the agents' store: one port is then all that has to be open between the hosts.
        """
        port = self._order.port
        if self._rounds:
            self._fresh = TCPStore(self._order.address, 0, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT)
            port = self._fresh.port
        # Not where: hosts may know the first one under different names.
        where = {"attempt": self._order.attempt + self._rounds, "port": port}
        store.set("ranks_store", json.dumps(where))
        return where

    def announce_failure(self, text: str) -> None:
        """Let hosts that nobody else can tell know that this job is over; a store that is gone needs no telling."""
        try:
            self._marks.set("failed", text)
        except DistError:
            return

    def raise_if_failed(self) -> None:
        """Raise when another host announced a failure (FailedElsewhere), or the first is gone; asks once a second."""
        if self._inner is None or time.monotonic() < self._next_poll:
            return
        self._next_poll = time.monotonic() + _POLL_S
        try:
            if self._marks.check(["failed"]):
                raise FailedElsewhere(f"the job failed on another host: {self._marks.get('failed').decode()}")
        except DistError as error:
            raise self._first_host_is_gone(error) from error

    def _first_host_is_gone(self, error: Exception) -> LaunchError:
        return LaunchError(f"the first host ({self._order.address}:{self._order.port}) is gone: {_line(error)}")

    def end(self) -> None:
        """Stop the signs of life; closing the rendezvous would end it for hosts that go on, and may wait for a lost one."""
        if self._inner is not None:
            self._inner._stop_heartbeats()  # a private name, seen on torch 2.11 to 2.14

    def leave(self) -> None:
        """Let the first host, with its store, go last; it waits a while for the others to have read what they need."""
        deadline = time.monotonic() + _LEAVE_S
        try:
            gone = self._marks.add("left", 0 if self._order.node == 0 else 1)
            while self._order.node == 0 and gone < self._size - 1 and time.monotonic() < deadline:
                time.sleep(0.05)
                gone = self._marks.add("left", 0)
        except DistError:
            return

    def wait_for_all(self, size: int) -> None:
        """Return when `size` hosts of this round have called it.

        Raises:
            LaunchError: as raise_if_failed.
        """
        key = f"done.{self.attempt}"
        count = self._marks.add(key, 1)
        while count < size:
            self._control.check()
            self.raise_if_failed()
            time.sleep(0.1)
            count = self._marks.add(key, 0)

    def is_closed(self) -> bool:
        """See the base class."""
        return False if self._inner is None else self._inner.is_closed()

    def set_closed(self) -> None:
        """See the base class."""
        if self._inner is not None:
            self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """See the base class: hosts to restart for, those that wait to join, and those that fell silent.

        Raises:
            LaunchError: a host fell silent, and too few are left.
        """
        if self._inner is None:
            return 0
        try:
            waiting = self._inner.num_nodes_waiting()
        except RendezvousConnectionError as error:
            raise self._first_host_is_gone(error) from error
        # Each host drops silent ones from its own copy of the state (a private name, seen on torch 2.11 to 2.14).
        missing = self._size - len(self._inner._state_holder.state.participants)
        if missing <= 0 or waiting:
            self._missing_since = None
            return waiting
        # A host that starts again is missing for a moment, before it waits.
        self._missing_since = self._missing_since or time.monotonic()
        if time.monotonic() - self._missing_since < _REJOIN_S:
            return 0
        if self._size - missing < self._order.min_nodes:
            raise LaunchError(f"{missing} of {self._size} hosts fell silent, {self._order.min_nodes} are needed")
        return 1

    def get_run_id(self) -> str:
        """See the base class."""
        return self._order.run_id

    def shutdown(self) -> bool:
        """See the base class."""
        return True if self._inner is None else self._inner.shutdown()


def _open_store(order: Order, listener: Listener, checkpoint: Callable[[], None]) -> TCPStore:
    """Keep the store on node 0, at the port that was held since the check; elsewhere connect to it, however late it opens."""
    if order.node == 0:
        try:
            if listener.port != order.port:
                listener.close()
                listener = Listener(order.port)
            fd = listener.take()
        except OSError as error:
            raise LaunchError(str(error)) from None
        return TCPStore(order.address, order.port, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT, master_listen_fd=fd)
    listener.close()
    deadline = time.monotonic() + JOIN_S
    while True:
        checkpoint()
        try:
            store = TCPStore(order.address, order.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=3))
            store.set_timeout(STORE_TIMEOUT)
            return store
        except DistError as error:
            if time.monotonic() > deadline:
                where = f"{order.address}:{order.port}"
                raise LaunchError(f"cannot reach the first host at {where} within {JOIN_S:.0f} s: {_line(error)}") from None
            time.sleep(0.2)


def _c10d(order: Order, base: TCPStore) -> DynamicRendezvousHandler:
    timeout = RendezvousTimeout(join=timedelta(seconds=JOIN_S), last_call=timedelta(seconds=5))
    beat = max(1, int(order.job.silence_s / 3))
    return DynamicRendezvousHandler.from_backend(
        order.run_id,
        base,
        C10dRendezvousBackend(base, order.run_id),
        order.min_nodes,
        order.max_nodes,
        local_addr=f"{order.node:06d}-{order.host}",
        timeout=timeout,
        keep_alive_interval=beat,
        keep_alive_max_attempt=3,
    )


def _wait_for(store: Store, key: str, checkpoint: Callable[[], None]) -> dict[str, int]:
    """Return what another host publishes, in short waits so that a stop is heeded."""
    deadline = time.monotonic() + JOIN_S
    while not store.check([key]):
        checkpoint()
        if time.monotonic() > deadline:
            raise LaunchError(f"the first host did not open the ranks' store within {JOIN_S:.0f} s")
        time.sleep(0.02)
    found: dict[str, int] = json.loads(store.get(key))
    return found


def _line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0][:200]
