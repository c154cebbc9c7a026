"""What an agent is told while it works: to stop, to pass a signal on; heard by a thread, heeded by whoever asks."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from .channel import CHUNK, Lines, Sender, decode

BEAT_S = 2.0


class Stopped(Exception):
    """The attempt is to end; `grace_s` is the time from SIGTERM to SIGKILL."""

    def __init__(self, why: str, grace_s: float) -> None:
        super().__init__(why)
        self.grace_s = grace_s


class Control:
    """The launcher's word, and the last resort when the agent itself is stuck.

    Orders wait in `orders`; the end of the launcher's stream, or its silence, is a stop followed by None.
    """

    def __init__(self, sender: Sender) -> None:
        self.orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.silence_s: float | None = None  # watched once set
        self.grace_s = 5.0  # when the launcher is gone
        self._sender = sender
        self._stop: Stopped | None = None
        self._ranks: tuple[int, ...] = ()
        self._interruptible = self._busy = False
        self._heard = time.monotonic()
        self._lock = threading.Lock()

    def listen(self, fd: int) -> None:
        """Heed what comes in on a descriptor, and send signs of life."""
        threading.Thread(target=self._listen, args=(fd,), name="control", daemon=True).start()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def check(self) -> None:
        """Raise Stopped when the attempt is to end."""
        if self._stop is not None:
            raise self._stop

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Heed stops within this block, and none that was meant for the attempt before."""
        with self._lock:
            self._stop, self._ranks, self._busy = None, (), True
        try:
            yield
        finally:
            self._busy = False

    def ranks_are(self, pids: Iterable[int]) -> None:
        """Name the ranks' processes, each of which leads a group of its own."""
        self._ranks = tuple(pids)

    def stop(self, why: str, grace_s: float) -> None:
        """Have the attempt end; a second call with less patience kills the ranks."""
        with self._lock:
            if self._stop is None:
                self._stop = Stopped(why, grace_s)
        if grace_s <= 0:
            self.signal_ranks(signal.SIGKILL)
        if self._interruptible:
            os.kill(os.getpid(), signal.SIGTERM)  # handle() then raises in the main thread

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a stop raise Stopped within this block, which runs in the main thread and asks nobody."""
        self.check()
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False

    def handle_signals(self) -> None:
        """Take SIGTERM, SIGINT and SIGHUP as stops, and pass SIGUSR1 on to the ranks."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGUSR1, lambda number, _: self.signal_ranks(number))

    def _on_signal(self, number: int, _: object) -> None:
        # Not stop(): it takes a lock that the interrupted code may hold.
        self._stop = self._stop or Stopped(signal.Signals(number).name, self.grace_s)
        if self._interruptible:
            self._interruptible = False
            raise self._stop

    def signal_ranks(self, number: int) -> None:
        """Send a signal to every rank: SIGKILL to its whole group, so that nothing of it stays."""
        for pid in self._ranks:
            try:
                if number == signal.SIGKILL:
                    os.killpg(pid, number)
                else:
                    os.kill(pid, number)
            except (ProcessLookupError, PermissionError):
                continue

    def _listen(self, fd: int) -> None:
        lines = Lines()
        while data := os.read(fd, CHUNK):
            self._heard = time.monotonic()
            for line in lines.feed(data):
                message = decode(line)
                if message is not None:
                    self._heed(message)
        self._lose_launcher("the launcher is gone")

    def _heed(self, message: dict[str, Any]) -> None:
        kind = message["k"]
        if kind == "start":
            self.orders.put(message)
        elif kind == "quit":
            if not self._busy:
                os._exit(0)  # the main thread may be importing torch for a job that will not be
            self.orders.put(None)
        elif kind == "stop":
            self.stop(message["why"], message["grace_s"])
        elif kind == "signal":
            self.signal_ranks(message["number"])

    def _beat(self) -> None:
        while True:
            limit = self.silence_s
            time.sleep(BEAT_S if limit is None else min(BEAT_S, limit / 4))
            self._sender.send("beat")
            if limit is not None and time.monotonic() - self._heard > limit:
                self._lose_launcher(f"nothing heard of the launcher for {limit:.0f} s")
                return

    def _lose_launcher(self, why: str) -> None:
        """End the attempt, and if that does not come about, the ranks and this process."""
        self.stop(why, self.grace_s)
        self.orders.put(None)
        time.sleep(self.grace_s + 5)
        self.signal_ranks(signal.SIGKILL)
        os._exit(1)
