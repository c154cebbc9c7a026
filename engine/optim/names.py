"""Check the names that a config gives against the ones that a class takes, and suggest the nearest."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ...errors import ConfigError


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the known name nearest to `name`, or an empty string when none is near."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


def keywords_of(cls: type) -> tuple[dict[str, inspect.Parameter], set[str]]:
    """Return the keyword parameters of `cls.__init__` after its first argument, and the names that have no default."""
    parameters = list(inspect.signature(cls).parameters.values())[1:]
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return named, {name for name, p in named.items() if p.default is p.empty}


def check_keywords(where: str, given: Mapping[str, Any], known: Collection[str], required: Iterable[str] = ()) -> None:
    """Raise ConfigError, one line a problem, for given names that are unknown and required ones that are absent.

    `where` is the dotted place in the config, such as `optimizer.params`, that starts each line.
    """
    problems = [f"{where}.{name}: unknown parameter{suggestion(name, known)}" for name in given if name not in known]
    problems += [f"{where}.{name}: required, but absent" for name in sorted(required) if name not in given]
    if problems:
        raise ConfigError("\n".join(problems))
