"""What the launcher and the agents on the hosts say to each other: one JSON object a line, behind a mark.

The lines share a stream with whatever a login shell or a library prints there, so a line without the mark is plain text.
"""

from __future__ import annotations

import json
import os
import threading
from typing import Any

_MARK = b"\x1eSR "
CHUNK = 65536


def encode(kind: str, host: int, **fields: Any) -> bytes:
    """Return one message as a line; `host` is the host's place in the list, and kind one of those the two ends know."""
    return _MARK + json.dumps({"k": kind, "h": host, **fields}, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """Return the message of a line without its newline, or None when it is plain text (or a message that was torn)."""
    if not line.startswith(_MARK):
        return None
    try:
        message = json.loads(line[len(_MARK) :])
    except ValueError:
        return None
    return message if isinstance(message, dict) and isinstance(message.get("h"), int) and isinstance(message.get("k"), str) else None


class Lines:
    """Cut bytes as they come into whole lines, without their newlines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completed."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines

    def close(self) -> list[bytes]:
        """Return what stands there without a newline."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []


class Sender:
    """Write messages of one host to a file descriptor, from any thread; a reader that is gone is no error."""

    def __init__(self, fd: int, host: int) -> None:
        self._fd, self._host, self._lock = fd, host, threading.Lock()

    def send(self, kind: str, **fields: Any) -> None:
        """Write one message, whole."""
        self.write(encode(kind, self._host, **fields))

    def write(self, lines: bytes) -> None:
        """Write encoded messages, whole."""
        view = memoryview(lines)
        with self._lock:
            try:
                while view:
                    view = view[os.write(self._fd, view) :]
            except OSError:
                return  # the launcher is gone; the end of our standard input says so too, and that is acted upon
