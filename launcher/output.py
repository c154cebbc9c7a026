"""What the user sees: every line under its host and rank, and a progress bar left in one piece."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from typing import TextIO

BAR_EVERY_S = 10.0  # where a bar cannot be redrawn, as in a log file


class Screen:
    """Write tagged lines to two streams; on a terminal the newest progress bar stays below them.

    Only the bar of the lowest rank that has one is shown: bars of several ranks on one line would shred each other.
    """

    def __init__(self, out: TextIO, err: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out, self._err, self._clock = out, err, clock
        self._live = err.isatty()
        self._bar_rank: int | None = None
        self._bar = ""
        self._bar_shown = False
        self._bar_time = float("-inf")

    def line(self, tag: str, text: str, is_err: bool = False, rank: int | None = None) -> None:
        """Write one line; a line of the rank whose bar is shown ends that bar."""
        if rank is not None and rank == self._bar_rank:
            self._bar_rank = None
        self._hide_bar()
        stream = self._err if is_err else self._out
        stream.write(f"[{tag}] {text}\n" if tag else f"{text}\n")
        stream.flush()
        self._show_bar()

    def say(self, text: str) -> None:
        """Write a line of the launcher's own."""
        self.line("", f"launcher: {text}", is_err=True)

    def bar(self, tag: str, rank: int, text: str) -> None:
        """Show the state of a rank's progress bar."""
        if self._bar_rank is not None and rank > self._bar_rank:
            return
        self._bar_rank, self._bar = rank, f"[{tag}] {text}"
        if self._live:
            self._hide_bar()
            self._show_bar()
        elif self._clock() - self._bar_time >= BAR_EVERY_S:
            self._bar_time = self._clock()
            self._err.write(self._bar + "\n")
            self._err.flush()

    def mute(self) -> None:
        """Write nothing any more: there is nobody to read it."""
        self._out = self._err = open(os.devnull, "w")  # noqa: SIM115 (for the rest of the process)
        self._live = self._bar_shown = False

    def close(self) -> None:
        """Leave the terminal's cursor at the start of an empty line."""
        self._bar_rank = None
        self._hide_bar()

    def _hide_bar(self) -> None:
        if self._bar_shown:
            self._err.write("\r\x1b[K")
            self._err.flush()
            self._bar_shown = False

    def _show_bar(self) -> None:
        if self._live and self._bar_rank is not None:
            self._err.write(self._bar[: shutil.get_terminal_size().columns - 1])  # one line, or it cannot be taken back
            self._err.flush()
            self._bar_shown = True
