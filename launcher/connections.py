"""The processes that the launcher starts here, and what comes out of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Mapping

from .channel import CHUNK, Lines, encode
from .runners import Command


class Connection:
    """One started command. `readers` maps each descriptor to read from to whether it is standard error."""

    def __init__(self, command: Command, env: Mapping[str, str]) -> None:
        """Start the command.

        Raises:
            OSError: it cannot be started.
        """
        self.command = command
        self.last_words: deque[str] = deque(maxlen=5)
        self.dropped: set[int] = set()
        self._lines: dict[int, Lines] = {}
        self._lock = threading.Lock()
        self._writing: int | None = None
        self._unsent = bytearray()
        environment = {**env, **command.env}
        if command.way == "pipes":
            self._start_with_pipes(environment)
        else:
            self._start_with_streams(environment)

    def _start_with_pipes(self, environment: dict[str, str]) -> None:
        orders_out, orders_in = os.pipe()
        messages_out, messages_in = os.pipe()
        argv = [*self.command.argv, "--channel", f"{orders_out},{messages_in}"]
        try:
            self.process = subprocess.Popen(argv, env=environment, pass_fds=(orders_out, messages_in), start_new_session=True)
        finally:
            os.close(orders_out)
            os.close(messages_in)
        self._writing = orders_in
        self._read_from(messages_out, is_err=False)

    def _start_with_streams(self, environment: dict[str, str]) -> None:
        stdin = subprocess.DEVNULL if self.command.way == "speak" else subprocess.PIPE
        # A session of its own: Ctrl-C is for the launcher, which lets the ranks end before their connection does.
        self.process = subprocess.Popen(
            self.command.argv, env=environment, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        assert self.process.stdout and self.process.stderr
        if self.process.stdin:
            self._writing = os.dup(self.process.stdin.fileno())
            self.process.stdin.close()
        for stream, is_err in ((self.process.stdout, False), (self.process.stderr, True)):
            self._read_from(os.dup(stream.fileno()), is_err)
            stream.close()

    def _read_from(self, fd: int, is_err: bool) -> None:
        self._lines[fd] = Lines()
        self.readers = {**getattr(self, "readers", {}), fd: is_err}

    @property
    def place(self) -> int:
        """Return the place of the first host that this serves."""
        return self.command.places[0]

    @property
    def talks(self) -> bool:
        """Return whether messages can be sent."""
        return self.command.way in ("pipes", "stdio")

    @property
    def keeps_open(self) -> list[int]:
        """Return the descriptors that are still to be read."""
        return list(self._lines)

    def start_writing(self) -> None:
        """Let writes to a host that does not read any more fail instead of waiting."""
        if self._writing is not None:
            os.set_blocking(self._writing, False)

    def send(self, kind: str, place: int, **fields: object) -> None:
        """Send one message; to a host that is gone it is lost, which its silence tells."""
        if self.talks:
            with self._lock:
                self._unsent += encode(kind, place, **fields)
            self.flush()

    def beat(self) -> None:
        """Send a sign of life, unless more than that still waits to be read."""
        if not self._unsent:
            self.send("beat", self.place)

    def flush(self) -> None:
        """Write what the pipe takes of what is to be sent; the rest waits for the next call."""
        with self._lock:
            try:
                while self._unsent and self._writing is not None:
                    del self._unsent[: os.write(self._writing, self._unsent)]
            except BlockingIOError:
                return
            except OSError:
                self._unsent.clear()

    def read(self, fd: int) -> list[bytes] | None:
        """Return the whole lines that are there, or None at the end."""
        try:
            data = os.read(fd, CHUNK)
        except OSError:
            data = b""
        return self._lines[fd].feed(data) if data else None

    def close_reader(self, fd: int) -> list[bytes]:
        """Close a descriptor, and return what stood there without a newline."""
        os.close(fd)
        return self._lines.pop(fd).close()

    def end(self, number: signal.Signals) -> None:
        """Send a signal to the command and what it started here."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def signal(self, number: int) -> None:
        """Send a signal to the command alone, which passes it on where it can."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def close(self) -> None:
        """Close what is open; the command then knows that the launcher is gone."""
        with self._lock:
            if self._writing is not None:
                os.close(self._writing)
                self._writing = None
        for fd in self.keeps_open:
            self.close_reader(fd)
