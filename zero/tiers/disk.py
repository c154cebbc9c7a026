"""Files written and read past the page cache where the file system allows it: aligned buffers, offsets and lengths."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import time
from pathlib import Path
from typing import TypeVar

import torch

_HUGE_PAGE_BYTES = 2 << 20
SECTOR_BYTES = 4096  # what O_DIRECT wants addresses, offsets and lengths to be multiples of


def aligned_buffer(num_bytes: int, pinned: bool = False) -> torch.Tensor:
    """Return uint8 [num_bytes] in host memory that starts at a multiple of the sector size; a large one is made of huge pages.

    Transfers past the page cache go by pages, each a piece of its own for the drive. With huge ones the same requests wrote
    4.1 GB/s and read 2.6 where they wrote 2.2 and read 1.3 (virtual disk, two cores, 8 requests of 1 MiB at once).
    """
    if num_bytes >= _HUGE_PAGE_BYTES and not pinned and hasattr(mmap, "MADV_HUGEPAGE"):
        return _huge_pages(num_bytes)
    whole = torch.empty(num_bytes + SECTOR_BYTES, dtype=torch.uint8, pin_memory=pinned)
    skip = -whole.data_ptr() % SECTOR_BYTES
    return whole[skip : skip + num_bytes]


def _huge_pages(num_bytes: int) -> torch.Tensor:
    """Return memory that the system backs with huge pages where it has them; it goes back when the tensor is let go."""
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    skip = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE_PAGE_BYTES
    # what lies before and behind is never touched, so it is no memory, and no part of the storage
    return torch.frombuffer(memory, dtype=torch.uint8, offset=skip, count=num_bytes)


def round_up(num_bytes: int) -> int:
    """Return the next multiple of the sector size."""
    return -(-num_bytes // SECTOR_BYTES) * SECTOR_BYTES


def view_of(buffer: torch.Tensor) -> memoryview:
    """Return the bytes of a host buffer."""
    return memoryview(buffer.numpy())  # type: ignore[arg-type]


def open_direct(path: Path, flags: int) -> int:
    """Open a file past the page cache where its file system can do that, and through it where it cannot."""
    direct = getattr(os, "O_DIRECT", 0)
    try:
        return os.open(path, flags | direct, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o644)


Opened = TypeVar("Opened", bound="_File")


class _File:
    """A file descriptor that is closed at the end of a `with` block."""

    def __init__(self, path: Path, flags: int) -> None:
        self.path = path
        self._fd = open_direct(path, flags)

    def __enter__(self: Opened) -> Opened:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def is_direct(self) -> bool:
        """Whether transfers go past the page cache."""
        return bool(fcntl.fcntl(self._fd, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0))

    def write(self, buffer: torch.Tensor, at: int) -> None:
        """Write an aligned buffer whose length is a multiple of the sector size, from byte `at` on."""
        view = view_of(buffer)
        while view:
            try:
                written = os.pwrite(self._fd, view, at)
            except OSError as error:
                self._leave_direct(error)
                continue
            view, at = view[written:], at + written

    def read(self, buffer: torch.Tensor, at: int) -> int:
        """Fill an aligned buffer from byte `at`, both multiples of the sector size; return the bytes that the file had."""
        view, got = view_of(buffer), 0
        while got < len(view):
            try:
                count = os.preadv(self._fd, [view[got:]], at + got)
            except OSError as error:
                self._leave_direct(error)
                continue
            got += count
            if not count or got % SECTOR_BYTES:  # the end of the file
                break
        return got

    def _leave_direct(self, error: OSError) -> None:
        """Go on through the page cache where the file system takes O_DIRECT at open and refuses it later."""
        direct = getattr(os, "O_DIRECT", 0)
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        if error.errno != errno.EINVAL or not flags & direct:
            raise error
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~direct)


class Output(_File):
    """A new file of known length that several threads write, each at its own place; `cut` or `finish` end it."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        super().__init__(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self.num_bytes = num_bytes

    def cut(self) -> None:
        """Give the file its length; somebody else has to see that it comes to the disk."""
        os.ftruncate(self._fd, self.num_bytes)

    def finish(self) -> None:
        """Return when the file is on the disk, at its length."""
        self.cut()
        os.fsync(self._fd)


class Input(_File):
    """A file that several threads read, each at its own place."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, os.O_RDONLY)
        self.num_bytes = os.fstat(self._fd).st_size


class SwapFile(_File):
    """A file without a name: the system frees it when the process ends, however it ends, and no other process can find it.

    So nothing is left behind by a crash, and nothing that was left can be taken for this run's.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / name  # what messages call it
        try:
            self._fd = open_direct(folder, os.O_RDWR | os.O_TMPFILE)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
                raise
            self._fd = self._open_named(folder, name)

    def _open_named(self, folder: Path, name: str) -> int:
        """Make the file the old way, where the file system knows no nameless ones, and take its name away."""
        path = folder / f".stateroom-{os.getpid()}-{time.monotonic_ns()}-{name}"
        fd = open_direct(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        path.unlink()
        return fd

    def reserve(self, at: int, num_bytes: int) -> None:
        """Make room on the drive for bytes [at, at + num_bytes), so that no later write finds it full.

        Raises:
            OSError: there is no room.
        """
        try:
            os.posix_fallocate(self._fd, at, num_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that cannot; a full one says so when written
                raise

    @property
    def held_bytes(self) -> int:
        """Bytes that the file takes on the drive."""
        return 512 * os.fstat(self._fd).st_blocks
