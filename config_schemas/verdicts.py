"""What becomes of each key of a loaded config, read off the declarations of the keys."""

from __future__ import annotations

from typing import Any, Literal

from .draft import dotted, walk
from .fields import HONOURED
from .notes import Verdict
from .root import Config
from .scanner import Path
from .tree import Known, known_keys

_NO_EFFECT, _LATER = "no effect here", "no effect yet"


def verdicts(config: Config, defaults: bool) -> list[Verdict]:
    """Return the verdict of every key that was set, or with `defaults` of every key."""
    known = {entry.path: entry for entry in known_keys()}
    noted = {note.path: note.text for note in config.notes if note.kind == "no_effect"}
    values = config.to_dict()
    result = []
    for path, value in walk(values):
        name = dotted(path)
        if defaults or config.origin.get(name) not in ("default", "derived"):
            effect = noted.get(name) or _effect(values, path, value, _declared(known, path))
            result.append(_verdict(name, value, effect))
    for note in config.notes:
        if note.kind == "ignored_block":
            result.append(Verdict(note.path, None, _NO_EFFECT, f"because it is {note.text}"))
    return result


def unsupported(config: Config, kind: Literal["result", "placement"] | None) -> list[str]:
    """Return a line for each key whose feature is missing and which asks for something other than its default."""
    values = config.to_dict()
    idle = {note.path for note in config.notes if note.kind == "no_effect"}
    lines = []
    for entry in known_keys():
        if entry.alters is None or (kind is not None and entry.alters != kind):
            continue
        value = _value_at(values, entry.path)
        if value == entry.field.get_default() or dotted(entry.path) in idle or not _is_on(values, entry.path[:-1]):
            continue
        what = "would change the result" if entry.alters == "result" else "would only change where state rests"
        shown = "given" if isinstance(value, dict) else value
        lines.append(f"{dotted(entry.path)} = {shown}: {entry.effect} (it {what})")
    return lines


def _verdict(name: str, value: Any, effect: str) -> Verdict:
    for verdict in (_NO_EFFECT, _LATER):
        if effect.startswith(verdict):
            return Verdict(name, value, verdict, effect.removeprefix(verdict).lstrip(": "))
    return Verdict(name, value, effect, "")


def _declared(known: dict[tuple[str, ...], Known], path: Path) -> Known | None:
    for length in range(len(path), 0, -1):  # free parameters belong to the dict around them
        entry = known.get(tuple(map(str, path[:length]))) or _starred(known, path[:length])
        if entry is not None:
            return entry
    return None


def _starred(known: dict[tuple[str, ...], Known], path: Path) -> Known | None:
    for pattern, entry in known.items():
        fits = len(pattern) == len(path) and all(part in ("*", str(given)) for part, given in zip(pattern, path, strict=True))
        if "*" in pattern and fits:
            return entry
    return None


def _effect(values: dict[str, Any], path: Path, value: Any, entry: Known | None) -> str:
    if entry is None or entry.effect == HONOURED or not entry.effect.startswith(_LATER):
        return HONOURED if entry is None else entry.effect
    if value == entry.field.get_default():
        return HONOURED  # off, or as it would be without the key: that is what happens
    if not _is_on(values, path[:-1]):
        return f"{_NO_EFFECT} because {dotted(path[:-1])} is off"
    return entry.effect


def _value_at(values: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        if values is None:
            return None
        values = values[part]
    return values


def _is_on(values: Any, section: Path) -> bool:
    """Return whether no section around a key is switched off."""
    for part in section:
        values = values[part]
        if isinstance(values, dict) and (values.get("enabled") is False or values.get("device") == "none"):
            return False
    return True
