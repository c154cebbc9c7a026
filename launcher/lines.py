"""Cut what a rank prints into lines, and see a progress bar as the one line that it is."""

from __future__ import annotations

from collections import deque

LONGEST = 8192


class Transcript:
    """One stream of one rank.

    A progress bar goes back with a carriage return and writes over itself. Of a line written over so, the last state
    is the line; while it is unfinished, it is the `bar`.
    """

    def __init__(self, keep: int = 25) -> None:
        self.tail: deque[str] = deque(maxlen=keep)
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that `data` completed; a line of more than LONGEST bytes comes in pieces."""
        *whole, rest = (self._rest + data).split(b"\n")
        found = [piece for line in whole for piece in _pieces(_last_state(line))]
        if b"\r" in rest:
            # Only what the terminal would show is kept, so that a bar of a million updates takes no memory.
            head, _, tail = rest.rpartition(b"\r")
            rest = _last_state(head) + b"\r" + tail
        while len(rest) > LONGEST and b"\r" not in rest:
            cut = _cut(rest)
            found.append(_text(rest[:cut]))
            rest = rest[cut:]
        self._rest = rest
        self.tail.extend(found)
        return found

    @property
    def bar(self) -> str | None:
        """Return the state of an unfinished line that writes over itself, or None."""
        return _text(_last_state(self._rest)) if b"\r" in self._rest else None

    def close(self) -> list[str]:
        """Return the last line where it has no newline."""
        rest, self._rest = _last_state(self._rest), b""
        found = _pieces(rest) if rest else []
        self.tail.extend(found)
        return found


def _last_state(line: bytes) -> bytes:
    if b"\r" not in line:
        return line
    return next((part for part in reversed(line.split(b"\r")) if part), b"")


def _pieces(line: bytes) -> list[str]:
    found = []
    while len(line) > LONGEST:
        cut = _cut(line)
        found.append(_text(line[:cut]))
        line = line[cut:]
    return [*found, _text(line)]


def _cut(line: bytes) -> int:
    """Return where to cut so that no UTF-8 character is torn."""
    cut = LONGEST
    while cut > LONGEST - 4 and line[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace")
