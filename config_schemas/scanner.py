"""Finds the line of every key in JSON or hjson text; hjson does the real parsing, this only remembers positions."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

Path = tuple["str | int", ...]

_PLAIN = re.compile(r"(true|false|null|-?\d+(\.\d+)?([eE][+-]?\d+)?)\s*$")
_COMMENT_OR_SPACE = re.compile(r"(?:\s+|#[^\n]*|//[^\n]*|/\*.*?(?:\*/|\Z))*", re.S)
_QUOTED = re.compile(r"'''.*?'''|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'", re.S)


@dataclass
class Positions:
    """Lines of keys, keys that occur twice in one object (path, first line, second line), and what was never closed."""

    lines: dict[Path, int] = field(default_factory=dict)
    duplicates: list[tuple[Path, int, int]] = field(default_factory=list)
    unclosed: list[tuple[Path, int]] = field(default_factory=list)


def scan(text: str) -> Positions:
    """Return the positions of all keys in `text`; text that is not well formed is scanned as far as it goes."""
    scanner = _Scanner(text)
    scanner.skip()
    if scanner.peek() == "{":
        scanner.value(())
    else:
        scanner.members((), closing="")
    return scanner.found


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.line = 1
        self.found = Positions()
        self._counted = 0

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def skip(self, also: str = "") -> None:
        while True:
            match = _COMMENT_OR_SPACE.match(self.text, self.at)
            self.at = match.end() if match else self.at
            if not self.peek() or self.peek() not in also:
                return
            self.at += 1

    def current_line(self) -> int:
        self.line += self.text.count("\n", self._counted, self.at)
        self._counted = self.at
        return self.line

    def members(self, path: Path, closing: str) -> bool:
        """Scan the keys of one object; False when the text ended or stopped making sense before it was closed."""
        seen: dict[str, int] = {}
        while True:
            self.skip(also=",")
            if not self.peek():
                return closing == ""
            if self.peek() == closing:
                self.at += 1
                return True
            line = self.current_line()
            name = self.name()
            self.skip()
            if name is None or self.peek() != ":":
                return False
            self.at += 1
            if name in seen:
                self.found.duplicates.append(((*path, name), seen[name], line))
            seen.setdefault(name, line)
            self.found.lines.setdefault((*path, name), line)
            if not self.value((*path, name)):
                return False

    def items(self, path: Path) -> bool:
        index = 0
        while True:
            self.skip(also=",")
            if not self.peek():
                return False
            if self.peek() == "]":
                self.at += 1
                return True
            place: Path = (*path, index)
            self.found.lines[place] = self.current_line()
            if not self.value(place):
                return False
            index += 1

    def value(self, path: Path) -> bool:
        self.skip()
        opening = self.peek()
        if opening in ("{", "["):
            line = self.current_line()
            self.at += 1
            closed = self.members(path, "}") if opening == "{" else self.items(path)
            if not closed:
                self.found.unclosed.append((path, line))
            return closed
        if opening in ('"', "'"):
            return self.quoted() is not None
        return self.plain()

    def plain(self) -> bool:
        """Pass over an unquoted value: a number or constant ends at punctuation, any other text at the end of its line."""
        start = self.at
        while self.peek() not in ("", "\n"):
            ahead = self.text[self.at : self.at + 2]
            ends = ahead[0] in ",]}#" or ahead in ("//", "/*")
            if ends and _PLAIN.match(self.text[start : self.at].strip()):
                break
            self.at += 1
        return self.at > start

    def name(self) -> str | None:
        if self.peek() in ('"', "'"):
            return self.quoted()
        match = re.compile(r"[^\s:,{}\[\]]+").match(self.text, self.at)
        if not match:
            return None
        self.at = match.end()
        return match.group()

    def quoted(self) -> str | None:
        match = _QUOTED.match(self.text, self.at)
        if not match:
            self.at = len(self.text)
            return None
        self.at = match.end()
        body = match.group()
        if body.startswith('"'):
            try:
                return str(json.loads(body, strict=False))
            except ValueError:
                return body[1:-1]
        return body[1:-1]
