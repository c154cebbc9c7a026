"""The tree of known keys, read off the typed sections: finds a key, lists all, and names the nearest to a misspelt one."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo

from .fields import Section
from .optim import OptimizerParams
from .root import Config
from .scanner import Path
from .schedule import KNOWN_SCHEDULES


class Known(NamedTuple):
    """One known key; `path` has "*" where names or indices are free."""

    path: tuple[str, ...]
    field: FieldInfo
    effect: str
    alters: str | None


@cache
def keys_of(model: type[Section]) -> dict[str, FieldInfo]:
    """Return the keys of a section by the name that configs use."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def sections_in(field: FieldInfo) -> tuple[type[Section] | None, bool]:
    """Return the section that a key holds, and whether it is one of many (in a list or under free names)."""
    annotation: Any = field.annotation
    return _sections_in(annotation)


@cache
def _sections_in(annotation: Any) -> tuple[type[Section] | None, bool]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, False
    many = typing.get_origin(annotation) in (list, dict)
    for argument in typing.get_args(annotation):
        found, nested = _sections_in(argument)
        if found is not None:
            return found, many or nested
    return None, False


def find(path: Path) -> FieldInfo | None:
    """Return the declaration of a key, or None when it is not known; free parameters of an optimizer have none."""
    model: type[Section] | None = Config
    field: FieldInfo | None = None
    skip = False
    for part in path:
        if skip:
            skip = False
            continue
        if model is None:
            return None
        field = keys_of(model).get(str(part))
        if field is None:
            return None
        model, skip = sections_in(field)
    return field


def known_keys(model: type[Section] = Config, prefix: tuple[str, ...] = (), effect: str = "") -> Iterator[Known]:
    """Yield every key that is not itself a section, with its verdict (its own, or the one of the section around it)."""
    for name, field in keys_of(model).items():
        extra: dict[str, Any] = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        path = (*prefix, name)
        own_effect = extra.get("effect", effect)
        child, many = sections_in(field)
        if child is None or not keys_of(child):
            yield Known(path, field, own_effect, extra.get("alters"))
        else:
            if field.default is None and "alters" in extra:  # the presence of the section is what alters
                yield Known(path, field, own_effect, extra["alters"])
            yield from known_keys(child, (*path, "*") if many else path, own_effect)


@cache
def all_paths() -> tuple[tuple[str, ...], ...]:
    """Return the path of every key and section, the parameters of known optimizers and schedules included."""
    paths: dict[tuple[str, ...], None] = {}
    for known in known_keys():
        for length in range(1, len(known.path) + 1):
            paths[known.path[:length]] = None
    for name in OptimizerParams.model_fields:
        paths[("optimizer", "params", name)] = None
    for model in KNOWN_SCHEDULES.values():
        for name in model.model_fields:
            paths[("scheduler", "params", name)] = None
    return tuple(path for path in paths if path[-1] != "*")


def advise(path: Path, siblings: list[str]) -> str:
    """Return what to write instead of an unknown key: the nearest key beside it, or the same name elsewhere."""
    name = str(path[-1])
    here = ".".join(map(str, path[:-1]))
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    elsewhere = [".".join(known) for known in all_paths() if known[-1] == name]
    sure = near and difflib.SequenceMatcher(None, name, near[0]).ratio() >= 0.8
    if near and (sure or not 0 < len(elsewhere) <= 3):
        return f"nearest known key: {here + '.' if here else ''}{near[0]}"
    if 0 < len(elsewhere) <= 3:
        return f"this key belongs to {' or '.join(elsewhere)}"
    names = sorted({known[-1] for known in all_paths()})
    far = difflib.get_close_matches(name, names, n=1, cutoff=0.8)
    places = [".".join(known) for known in all_paths() if far and known[-1] == far[0]]
    if 0 < len(places) <= 3:
        return f"nearest known key: {' or '.join(places)}"
    if len(siblings) <= 25:
        return f"known keys here: {', '.join(siblings)}"
    return "no known key is near; stateroom config schema lists all"
