"""Which rank failed first, and what the user reads about it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

# What a rank says whose peer went away: such an error is an echo of another one, whatever the clocks say.
_ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "connectFullMesh",
    "Socket Timeout",
    "socketStartConnect",
    "remote process exited",
    "Timed out waiting",
    "recvValue failed",
    "sendBytes failed",
    "recvBytes failed",
    "Gloo connect",
)
_ENDED_BY_OTHERS = (signal.SIGABRT, signal.SIGTERM, signal.SIGPIPE)
MOST_LINES = 60


@dataclass(frozen=True)
class Failure:
    """One rank that failed by itself.

    exitcode is negative for a signal; time_ns is the host's clock at the exception, or else at the process's end;
    traceback is empty where there is none; tail holds the last lines of its standard error.
    """

    rank: int
    host: str
    exitcode: int
    time_ns: int
    message: str = ""
    traceback: str = ""
    tail: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Failure:
        """Return the failure that to_json described."""
        return cls(**{**values, "tail": tuple(values.get("tail", ()))})

    @property
    def status(self) -> int:
        """Return the exit status as a shell gives it: 128 + n after signal n."""
        return self.exitcode if self.exitcode > 0 else 128 - self.exitcode

    @property
    def is_echo(self) -> bool:
        """Return whether this looks like the consequence of another rank's end."""
        return -self.exitcode in _ENDED_BY_OTHERS or any(words in self.message for words in _ECHOES)

    def what(self) -> str:
        """Return how it ended, in words."""
        if self.exitcode >= 0:
            return f"status {self.exitcode}"
        try:
            return f"signal {-self.exitcode} ({signal.Signals(-self.exitcode).name})"
        except ValueError:
            return f"signal {-self.exitcode}"


def first(failures: Sequence[Failure]) -> Failure:
    """Return the failure that the others followed: echoes come last, then the earliest counts."""
    return min(failures, key=lambda failure: (failure.is_echo, failure.time_ns, failure.rank))


def echoes(failures: Sequence[Failure]) -> list[str]:
    """Return a line for each failure that followed the first, at most eight."""
    others = [failure for failure in failures if failure is not first(failures)]
    lines = [f"rank {failure.rank} on {failure.host} failed after it, with {failure.what()}{_brief(failure)}" for failure in others[:8]]
    return [*lines, f"and {len(others) - 8} more"] if len(others) > 8 else lines


def render(failures: Sequence[Failure], num_ranks: int) -> str:
    """Return the report of the first failure: where, how, and what it left to read, a traceback or its last lines."""
    cause = first(failures)
    ended = "; the others were ended" if num_ranks > 1 else ""
    head = f"rank {cause.rank} on {cause.host} failed first, with {cause.what()}{ended}"
    text = cause.traceback.rstrip().splitlines() or list(cause.tail)
    if not text:
        return head
    said = ", its traceback:" if cause.traceback else ", the last lines of its standard error:"
    if len(text) > MOST_LINES:
        text = [f"  … {len(text) - MOST_LINES} lines left out …", *text[-MOST_LINES:]]
    return "\n".join([head + said, *text])


def _brief(failure: Failure) -> str:
    line = failure.message.strip().split("\n", 1)[0]
    return f": {line[:160]}" if line else ""
