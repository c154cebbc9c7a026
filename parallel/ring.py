"""A ring of collective records in memory-mapped bytes, readable after a hang or a SIGKILL."""

from __future__ import annotations

import json
import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_MAGIC = b"STRMRING1\0"
_HEADER_BYTES = 1 << 16  # magic, capacity, next sequence number, then the names as JSON
_HEAD = struct.Struct("<10sIQI")
_RECORD = struct.Struct("<QddHHIQ")  # sequence, start, end (0 while open), kind, state, unit, bytes


@dataclass(frozen=True)
class Record:
    """One collective call: times are seconds since the epoch, end_s is None while it has not finished."""

    sequence: int
    kind: str
    state: str
    unit: str
    num_bytes: int
    start_s: float
    end_s: float | None


class Ring:
    """Writes the start and end of each collective; about a microsecond each, no system call."""

    def __init__(self, path: Path | None, capacity: int = 4096) -> None:
        size = _HEADER_BYTES + capacity * _RECORD.size
        self._names: list[str] = []
        self._index: dict[str, int] = {}
        self._capacity = capacity
        self._next = 1
        self.path = path
        if path is None:
            self._map = mmap.mmap(-1, size)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w+b") as file:
                file.truncate(size)
                self._map = mmap.mmap(file.fileno(), size)
        self._write_header()

    def start(self, kind: str, state: str, unit: str, num_bytes: int) -> int:
        """Record the start of a call and return its sequence number."""
        sequence = self._next
        self._next += 1
        fields = (sequence, time.time(), 0.0, self._name(kind), self._name(state), self._name(unit), num_bytes)
        _RECORD.pack_into(self._map, self._offset(sequence), *fields)
        _HEAD.pack_into(self._map, 0, _MAGIC, self._capacity, self._next, len(self._names))
        return sequence

    def end(self, sequence: int) -> None:
        """Record that a call finished."""
        offset = self._offset(sequence)
        if struct.unpack_from("<Q", self._map, offset)[0] == sequence:  # else it was overwritten by a newer one
            struct.pack_into("<d", self._map, offset + 16, time.time())

    def records(self) -> list[Record]:
        """Return the records still in the ring, oldest first."""
        return _decode(self._map)

    def close(self) -> None:
        """Flush and unmap."""
        if not self._map.closed:
            self._map.flush()
            self._map.close()

    def _offset(self, sequence: int) -> int:
        return _HEADER_BYTES + (sequence % self._capacity) * _RECORD.size

    def _name(self, text: str) -> int:
        index = self._index.get(text)
        if index is None:
            index = self._index[text] = len(self._names)
            self._names.append(text)
            self._write_header()
        return index

    def _write_header(self) -> None:
        body = json.dumps(self._names).encode()[: _HEADER_BYTES - _HEAD.size - 4]
        _HEAD.pack_into(self._map, 0, _MAGIC, self._capacity, self._next, len(self._names))
        struct.pack_into("<I", self._map, _HEAD.size, len(body))
        self._map[_HEAD.size + 4 : _HEAD.size + 4 + len(body)] = body


def read_ring(path: str | Path) -> list[Record]:
    """Return the records of a ring file that another process wrote, oldest first.

    Raises:
        ValueError: the file is not a ring.
    """
    data = Path(path).read_bytes()
    if data[: len(_MAGIC)] != _MAGIC:
        raise ValueError(f"{path} is not a collective ring: it does not start with {_MAGIC!r}")
    return _decode(data)


def _decode(data: bytes | mmap.mmap) -> list[Record]:
    _, capacity, _, _ = _HEAD.unpack_from(data, 0)
    (length,) = struct.unpack_from("<I", data, _HEAD.size)
    try:
        names = json.loads(bytes(data[_HEAD.size + 4 : _HEAD.size + 4 + length]))
    except ValueError:  # more names than the header holds: fall back to numbers
        names = []
    label = lambda i: names[i] if i < len(names) else f"#{i}"  # noqa: E731
    found = []
    for slot in range(capacity):
        sequence, start, end, kind, state, unit, size = _RECORD.unpack_from(data, _HEADER_BYTES + slot * _RECORD.size)
        if sequence:
            found.append(Record(sequence, label(kind), label(state), label(unit), size, start, end or None))
    return sorted(found, key=lambda record: record.sequence)
