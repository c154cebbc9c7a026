"""How far a long command is: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

EVERY_S = 5.0


class Progress:
    """Counts bytes towards a known total; use as a context. Safe to advance from several threads."""

    def __init__(self, title: str, total_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.title, self.total_bytes, self.done_bytes = title, total_bytes, 0
        self._clock = clock
        self._start = self._said = clock()
        self._lock = threading.Lock()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = Bar(*columns, console=Console(stderr=True))
            self._bar.start()
            self._bar.add_task(self.title, total=self.total_bytes)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, num_bytes: int) -> None:
        """Count bytes that are done."""
        with self._lock:
            self.done_bytes += num_bytes
            if self._bar is not None:
                self._bar.update(0, completed=self.done_bytes)
            elif self._clock() - self._said >= EVERY_S:
                self._said = self._clock()
                print(self.line(), file=sys.stderr, flush=True)

    def line(self) -> str:
        """Return where it stands as one line."""
        seconds = max(self._clock() - self._start, 1e-9)
        share = 100 * self.done_bytes / max(self.total_bytes, 1)
        return f"{self.title}: {size(self.done_bytes)} of {size(self.total_bytes)} ({share:.0f} %), {size(self.done_bytes / seconds)}/s"


def size(num_bytes: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} TB"
