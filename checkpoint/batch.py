"""Files that appear under their names only once their bytes are on the disk: a batch is synced together, which costs a tenth."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

_SYNCING = 16


class Batch:
    """Files on their way; use as a context: leaving it without an error makes all of them visible, else none."""

    def __init__(self) -> None:
        self._pending: list[tuple[Path, Path]] = []

    def write(self, path: Path, fill: Callable[[BinaryIO], None]) -> None:
        """Write a file's content; its folder is made if need be."""
        with self.stage(path).open("wb") as file:
            fill(file)

    def stage(self, path: Path) -> Path:
        """Return the path that is to be written in place of a file's, for writers that open files themselves."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        self._pending.append((temporary, path))
        return temporary

    def commit(self) -> None:
        """Return when all files are on the disk under their names."""
        sync([temporary for temporary, _ in self._pending])
        for temporary, path in self._pending:
            temporary.replace(path)
        sync({path.parent for _, path in self._pending})
        self._pending = []

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None:
            self.commit()
            return
        for temporary, _ in self._pending:
            with contextlib.suppress(OSError):
                temporary.unlink()


def sync(paths: Iterable[Path]) -> None:
    """Return when files (or the names in folders) are on the disk."""
    with ThreadPoolExecutor(_SYNCING) as threads:
        list(threads.map(_sync_one, paths))


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
