"""A rank's swap files: element ranges of named states, moved by a few threads past the page cache, counted and timed."""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from ...errors import EngineError
from .disk import SECTOR_BYTES, SwapFile, aligned_buffer

REQUEST_BYTES = 1 << 20
REQUESTS = 8
_SPARE = 1.01  # file systems need room for more than the bytes themselves


@dataclass
class Moved:
    """Bytes moved in one direction for one state."""

    requests: int = 0
    num_bytes: int = 0


class Clock:
    """Wall-clock seconds in which at least one request was on its way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._since = 0.0
        self._seconds = 0.0

    def start(self) -> None:
        """A request begins."""
        with self._lock:
            if not self._open:
                self._since = time.perf_counter()
            self._open += 1

    def stop(self) -> None:
        """A request has ended."""
        with self._lock:
            self._open -= 1
            if not self._open:
                self._seconds += time.perf_counter() - self._since

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return self._seconds


class Crew:
    """Threads that work off requests for as long as somebody holds the crew.

    Plain ones, because executors refuse work once the interpreter has begun to end.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=_work, args=(self._tasks,), name=f"{name}-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()
        self._end = weakref.finalize(self, _dismiss, self._tasks, threads)

    def submit(self, task: Callable[[], None]) -> Future[None]:
        """Run a task on one of the threads."""
        future: Future[None] = Future()
        self._tasks.put((future, task))
        return future

    def close(self) -> None:
        """Return when all tasks have ended and the threads with them."""
        self._end()
        for thread in self._threads:
            thread.join()


def _work(tasks: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None]) -> None:
    while (item := tasks.get()) is not None:
        future, task = item
        try:
            task()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        del item, future, task  # or the last one would keep its buffers until the next comes


def _dismiss(tasks: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None], threads: int) -> None:
    for _ in range(threads):
        tasks.put(None)


class Transfer:
    """Requests on their way; wait() returns when all have ended.

    Args:
        on_failure: called with the message before wait() raises.
    """

    def __init__(self, futures: Sequence[Future[None]] = (), on_failure: Callable[[str], None] | None = None) -> None:
        self._futures, self._on_failure = list(futures), on_failure

    def wait(self) -> None:
        """Return when the bytes are where they belong.

        Raises:
            EngineError: the drive failed; says where and what to do.
        """
        futures, self._futures = self._futures, []
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            if self._on_failure is not None:
                self._on_failure(str(errors[0]))
            raise errors[0]


class Waits(Protocol):
    """Something on its way."""

    def wait(self) -> None:
        """Return when it has come to its end, however."""


def wait_for_all(transfers: Iterable[Waits]) -> None:
    """Return when nothing of them is on its way any more; the first error is raised then."""
    errors = []
    for transfer in transfers:
        try:
            transfer.wait()
        except EngineError as error:
            errors.append(error)
    if errors:
        raise errors[0]


@dataclass
class Drive:
    """The files of one rank under `folder`, one for each state and dtype.

    Elements lie at their number times their size. Buffers are uint8 in host memory, aligned, of whole sectors.

    Threads with plain requests, because nothing measured faster: 512 MiB on a virtual disk, 8 requests of 1 MiB at once, were
    written at 3.4 to 4.3 GB/s and read at 2.5 to 2.7; DeepSpeed 0.19.8's async_io (libaio, same depth) wrote 2.2 and read 1.1 in
    the same minutes, and on 8 threads of such depth 2.0 to 3.1 and 1.3 to 1.8. Half of the difference or more is huge pages.

    Args:
        request_bytes, requests: size of one request to the system, and how many are made at once, each on its own thread.
        pinned: buffers that an accelerator copies from are page-locked.
        on_failure: called with the message on the thread that waits, before it raises.
    """

    folder: Path
    rank: int
    request_bytes: int = REQUEST_BYTES
    requests: int = REQUESTS
    pinned: bool = False
    on_failure: Callable[[str], None] | None = None
    moved: dict[tuple[str, str], Moved] = field(default_factory=dict)  # ("read" or "written", state)
    clocks: dict[str, Clock] = field(default_factory=lambda: {"read": Clock(), "written": Clock()})
    _files: dict[tuple[str, torch.dtype], SwapFile] = field(default_factory=dict)
    _crew: Crew | None = None

    def __post_init__(self) -> None:
        weakref.finalize(self, _close_files, self._files)

    def check(self, num_bytes: int, ranks: int = 1) -> str | None:
        """See that the folder can hold `num_bytes` of each of the host's `ranks`; return a line about what is not as it should be.

        Raises:
            EngineError: it is missing, read-only or too small; nothing was written.
        """
        if not self.folder.is_dir():
            raise EngineError(
                f"nvme_path {str(self.folder)!r} is no folder on this host; mount the drive or make the folder, on every host"
            )
        try:
            with SwapFile(self.folder, "probe") as probe:
                probe.write(aligned_buffer(SECTOR_BYTES).zero_(), 0)
                direct = probe.is_direct
        except OSError as error:
            raise EngineError(
                f"nvme_path {str(self.folder)!r} cannot be written: {error.strerror}; give a folder that this user may write"
            ) from error
        disk = os.statvfs(self.folder)
        free = disk.f_bavail * disk.f_frsize
        if num_bytes * ranks * _SPARE > free:
            raise EngineError(
                f"nvme_path {str(self.folder)!r} has {free:,} bytes free, and the states of {ranks} rank(s) need {num_bytes * ranks:,}; "
                "make room, use another drive, or more ranks. Nothing was written"
            )
        return (
            None if direct else f"nvme_path {str(self.folder)!r} is on a file system without direct I/O: states go through the page cache"
        )

    def file(self, state: str, dtype: torch.dtype) -> SwapFile:
        """Return the file of a state, made when first asked for."""
        key = (state, dtype)
        if key not in self._files:
            self._files[key] = SwapFile(self.folder, f"{state}.{str(dtype).removeprefix('torch.')}")
        return self._files[key]

    def reserve(self, state: str, dtype: torch.dtype, base: int, numel: int) -> None:
        """Make room for elements [base, base + numel).

        Raises:
            EngineError: the drive is full; nothing was written.
        """
        try:
            self.file(state, dtype).reserve(base * dtype.itemsize, numel * dtype.itemsize)
        except OSError as error:
            message = (
                f"nvme_path {str(self.folder)!r}: no room for {numel * dtype.itemsize:,} bytes of {state!r} on rank {self.rank} "
                f"({error.strerror}); make room or use another drive"
            )
            if self.on_failure is not None:
                self.on_failure(message)
            raise EngineError(message) from error

    def read(self, state: str, dtype: torch.dtype, base: int, buffer: torch.Tensor) -> Transfer:
        """Start filling `buffer` with elements from `base` on."""
        return self._move("read", state, dtype, base, buffer)

    def write(self, state: str, dtype: torch.dtype, base: int, buffer: torch.Tensor) -> Transfer:
        """Start writing `buffer` from element `base` on; it must stay as it is until wait()."""
        return self._move("written", state, dtype, base, buffer)

    def submit(self, task: Callable[[], None]) -> Future[None]:
        """Run a task on one of the threads."""
        if self._crew is None:
            self._crew = Crew(self.requests, "stateroom-swap")
        return self._crew.submit(task)

    def held_bytes(self, state: str) -> int:
        """Bytes that a state takes on the drive, as the file system says."""
        return sum(file.held_bytes for (name, _), file in self._files.items() if name == state)

    @property
    def states(self) -> list[str]:
        """Names of the states that have a file."""
        return list(dict.fromkeys(name for name, _ in self._files))

    def close(self) -> None:
        """End the threads and give the files' room back."""
        if self._crew is not None:
            self._crew.close()
            self._crew = None
        _close_files(self._files)

    def _move(self, direction: str, state: str, dtype: torch.dtype, base: int, buffer: torch.Tensor) -> Transfer:
        file, at = self.file(state, dtype), base * dtype.itemsize
        starts = range(0, buffer.numel(), self.request_bytes)
        self.count(direction, state, len(starts), buffer.numel())
        pieces = ((at + start, buffer[start : start + self.request_bytes]) for start in starts)
        return self.transfer_of([self.submit(partial(self.transfer, direction, file, *piece)) for piece in pieces])

    def transfer_of(self, futures: Sequence[Future[None]]) -> Transfer:
        """Return what waits for requests that were submitted."""
        return Transfer(futures, self.on_failure)

    def place(self, out: torch.Tensor, staged: torch.Tensor) -> None:
        """Copy bytes within host memory, from a thread of the drive."""
        # neither torch, whose kernels would start a team of threads for each thread of the drive, nor numpy, which would
        # make the storage one that cannot be resized
        ctypes.memmove(out.data_ptr(), staged.data_ptr(), staged.nbytes)

    def count(self, direction: str, state: str, requests: int, num_bytes: int) -> None:
        """Book requests."""
        moved = self.moved.setdefault((direction, state), Moved())
        moved.requests += requests
        moved.num_bytes += num_bytes

    def transfer(self, direction: str, file: SwapFile, at: int, buffer: torch.Tensor) -> None:
        """Make one request and wait for it.

        Raises:
            EngineError: the drive failed.
        """
        clock = self.clocks[direction]
        clock.start()
        try:
            if direction == "written":
                file.write(buffer, at)
            elif file.read(buffer, at) < buffer.numel():
                raise OSError(0, "the file ends too early")
        except OSError as error:
            raise EngineError(
                f"rank {self.rank}: {buffer.numel():,} bytes of {file.path} could not be {direction} at byte {at:,}: {error.strerror}. "
                "Look at the drive; go on from the last checkpoint"
            ) from error
        finally:
            clock.stop()


def _close_files(files: dict[tuple[str, torch.dtype], SwapFile]) -> None:
    for file in files.values():
        file.close()
    files.clear()
