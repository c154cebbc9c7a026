"""What ranks print: read from pipes, cut into lines, sent to the launcher and written to a file per rank."""

from __future__ import annotations

import os
import selectors
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from .channel import CHUNK, Sender
from .lines import Transcript

BAR_EVERY_S = 0.5


@dataclass
class _Stream:
    rank: int
    is_err: bool
    log: BinaryIO | None
    transcript: Transcript = field(default_factory=Transcript)
    bar: str | None = None


class Pump(threading.Thread):
    """Read the pipes of all ranks on this host until closed.

    Output of other ranks than 0 is not sent on when `quiet`; of all, the last lines are kept for a report.
    """

    def __init__(self, sender: Sender, quiet: bool, log_dir: Path | None, log_mode: Literal["wb", "ab"] = "wb") -> None:
        super().__init__(name="pump", daemon=True)
        self._sender, self._quiet, self._log_dir, self._log_mode = sender, quiet, log_dir, log_mode
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._logs: dict[int, BinaryIO] = {}
        self._tails: dict[int, Transcript] = {}
        self._closing = threading.Event()
        self._next_bar = 0.0

    def add(self, rank: int, is_err: bool) -> int:
        """Return the writing end of a new pipe for one stream of a rank."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        stream = _Stream(rank, is_err, self._log(rank))
        if is_err:
            self._tails[rank] = stream.transcript
        with self._lock:
            self._selector.register(reading, selectors.EVENT_READ, stream)
        return writing

    def _log(self, rank: int) -> BinaryIO | None:
        if self._log_dir is None:
            return None
        if rank not in self._logs:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            self._logs[rank] = open(self._log_dir / f"rank_{rank}.log", self._log_mode)  # noqa: SIM115 (closed in close)
        return self._logs[rank]

    def log(self, rank: int, text: str) -> None:
        """Add a text to the rank's file, where there is one."""
        if rank in self._logs:
            self._logs[rank].write(text.encode())
            self._logs[rank].flush()

    def tail(self, rank: int) -> tuple[str, ...]:
        """Return the last lines of the rank's standard error."""
        return tuple(self._tails[rank].tail) if rank in self._tails else ()

    def run(self) -> None:
        """Read until close() was called and nothing comes any more."""
        while True:
            with self._lock:
                idle = not self._selector.get_map()
            ready = [] if idle else self._selector.select(0.1)
            for key, _ in ready:
                self._read(key.fd, key.data)
            if time.monotonic() >= self._next_bar:
                self._next_bar = time.monotonic() + BAR_EVERY_S
                self._send_bars()
            if self._closing.is_set() and not ready:
                return
            if idle:
                self._closing.wait(0.1)

    def _read(self, fd: int, stream: _Stream) -> None:
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return
        if stream.log and data:
            stream.log.write(data)
            stream.log.flush()
        lines = stream.transcript.feed(data) if data else stream.transcript.close()
        self._send(stream, lines)
        if not data:
            with self._lock:
                self._selector.unregister(fd)
            os.close(fd)

    def _send(self, stream: _Stream, lines: list[str]) -> None:
        if lines and not (self._quiet and stream.rank):
            self._sender.send("lines", rank=stream.rank, err=stream.is_err, lines=lines)
        if lines:
            stream.bar = None

    def _send_bars(self) -> None:
        with self._lock:
            streams = [key.data for key in self._selector.get_map().values()]
        for stream in streams:
            bar = stream.transcript.bar
            if bar is not None and bar != stream.bar and not (self._quiet and stream.rank):
                stream.bar = bar
                self._sender.send("bar", rank=stream.rank, text=bar)

    def close(self, wait_s: float = 1.0) -> None:
        """Read what is left, for at most `wait_s`: a process that a rank left behind may hold its pipe open for ever."""
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            with self._lock:
                if not self._selector.get_map():
                    break
            self._closing.wait(0.01)
        self._closing.set()
        if self.is_alive():
            self.join(wait_s)
        for key in list(self._selector.get_map().values()):
            self._send(key.data, key.data.transcript.close())
            os.close(key.fd)
        self._selector.close()
        for log in self._logs.values():
            log.close()


class RankStreams(LogsSpecs):
    """Tell the agent where a rank's streams go: into the pump's pipes, or (raw) nowhere else than its own."""

    def __init__(self, folder: Path, pump: Pump | None) -> None:
        super().__init__(str(folder))
        self._folder, self._pump = folder, pump
        self._writing: list[int] = []
        self._round = 0

    @property
    def root_log_dir(self) -> str:
        """See the base class."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """See the base class; called for each attempt, with the ranks' environments by local rank."""
        self._round += 1
        outs = dict.fromkeys(envs, "")
        errs = dict.fromkeys(envs, "")
        files = {}
        for local_rank, env in envs.items():
            rank = int(env["RANK"])
            error_file = self._folder / f"round_{self._round}_rank_{rank}.json"
            env["TORCHELASTIC_ERROR_FILE"] = files[local_rank] = str(error_file)
            if self._pump:
                outs[local_rank] = self._path(rank, is_err=False)
                errs[local_rank] = self._path(rank, is_err=True)
        return LogsDest(outs, errs, {}, {}, files)

    def _path(self, rank: int, is_err: bool) -> str:
        """Return a name under which the agent opens the pipe's writing end, as it would open a file."""
        assert self._pump is not None
        self._writing.append(self._pump.add(rank, is_err))
        return f"/dev/fd/{self._writing[-1]}"

    def started(self) -> None:
        """Close our own writing ends once the ranks have theirs, so that the pipes end with the ranks."""
        while self._writing:
            os.close(self._writing.pop())
