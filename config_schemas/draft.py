"""A config while it is being loaded: raw values, what was written where, and the notes and problems found so far."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .notes import Note, NoteKind
from .scanner import Path
from .source import Document

MISSING: Any = object()


def dotted(path: Path) -> str:
    """Return a path as users write it: zero_optimization.stage."""
    return ".".join(map(str, path))


def walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every leaf with its path; lists count as leaves unless they hold objects."""
    if isinstance(value, dict) and (value or not path):
        for name, item in value.items():
            yield from walk(item, (*path, name))
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from walk(item, (*path, index))
    else:
        yield path, value


@dataclass
class Draft:
    """Raw values under their current names; `written` maps a current path to the one in the source where they differ."""

    document: Document
    data: dict[str, Any] = field(init=False)
    written: dict[Path, Path] = field(default_factory=dict)
    origins: dict[Path, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    problems: list[tuple[int, str]] = field(default_factory=list)
    refused: set[Path] = field(default_factory=set)
    autos: set[Path] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.data = self.document.data
        for path, _ in walk(self.data):
            self.origins[path] = self.where(path)

    def get(self, *path: str | int) -> Any:
        """Return the raw value at a path, or MISSING."""
        value: Any = self.data
        for part in path:
            inside = part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int) and part < len(value)
            if not inside:
                return MISSING
            value = value[part]
        return value

    def put(self, path: Path, value: Any, origin: str) -> None:
        """Set a value, making the sections around it."""
        holder: Any = self.data
        for part in path[:-1]:
            holder = holder.setdefault(part, {}) if isinstance(holder, dict) else holder[part]
        holder[path[-1]] = value
        self.origins[path] = origin

    def drop(self, path: Path) -> Any:
        """Remove a value and return it."""
        value = self.get(*path[:-1]).pop(path[-1])
        for known in [known for known in self.origins if known[: len(path)] == path]:
            del self.origins[known]
        return value

    def move(self, old: Path, new: Path) -> None:
        """Give a value its present name; problems and notes still show the written one."""
        self.written[new] = self.as_written(old)
        value = self.drop(old)
        self.put(new, value, self.where(new))
        for path, _ in walk(value):
            place: Path = (*new, *path)
            self.origins[place] = self.where(place)

    def as_written(self, path: Path) -> Path:
        """Return the path under which the source has what is now at `path`."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.written:
                return self.written[path[:length]] + path[length:]
        return path

    def line(self, path: Path) -> int | None:
        """Return the line of a key, or of the nearest section around it; None for a dict."""
        path = self.as_written(path)
        for length in range(len(path), 0, -1):
            if path[:length] in self.document.lines:
                return self.document.lines[path[:length]]
        return None

    def where(self, path: Path) -> str:
        """Return "line N" for text, "config" for a dict."""
        line = self.line(path)
        return "config" if line is None else f"line {line}"

    def note(self, path: Path, kind: NoteKind, text: str) -> None:
        """Record something to know about a key."""
        self.notes.append(Note(dotted(self.as_written(path)), kind, text))

    def refuse(self, path: Path, text: str) -> None:
        """Record a problem; loading goes on, so that all problems are in one report."""
        line = self.line(path)
        place = "" if line is None else f" (line {line})"
        self.problems.append((line or 0, f"{dotted(self.as_written(path))}{place}: {text}"))
        self.refused.add(path)
