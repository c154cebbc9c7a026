"""The records that loading leaves behind: notes on single keys, and the verdict of each key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

NoteKind = Literal["auto", "deprecated", "no_effect", "derived", "ignored_block"]


@dataclass(frozen=True)
class Note:
    """Something a user should know about one key: `path` is its full dotted name as written."""

    path: str
    kind: NoteKind
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


class Verdict(NamedTuple):
    """What becomes of one key: `verdict` is "honoured", "no effect here", "no effect yet" or "refused"."""

    path: str
    value: Any
    verdict: str
    reason: str

    def __str__(self) -> str:
        return f"{self.verdict}{': ' if self.verdict == 'no effect yet' else ' '}{self.reason}".strip()
