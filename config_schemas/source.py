"""Reads a config from a path, a dict, JSON or hjson text, or base64 of such text, and keeps the line of every key."""

from __future__ import annotations

import base64
import binascii
import copy
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError
from .scanner import Path, Positions, scan

_BASE64 = re.compile(r"[A-Za-z0-9_+/=\s-]{8,}")


@dataclass
class Document:
    """The parsed text: `name` is the file, or None when there is none; `lines` is empty for a dict."""

    data: dict[str, Any]
    name: str | None = None
    lines: dict[Path, int] = field(default_factory=dict)


def read_source(source: str | os.PathLike[str] | Mapping[str, Any]) -> Document:
    """Read a config from any accepted form.

    Raises:
        ConfigError: the file is missing or unreadable, the text is cut off or malformed, or a key occurs twice.
    """
    if isinstance(source, Mapping):
        return Document(_plain(source))
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(f"a config is a path, a dict, or JSON text, not {type(source).__name__}")
    if isinstance(source, str):
        text = _inline_text(source)
        if text is not None:
            return _parse(text, None)
    name = os.fspath(source)
    return _parse(_read_file(name), name)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    try:
        return copy.copy(value)
    except Exception:  # an object of the script, such as a process group, that does not copy
        return value


def _inline_text(source: str) -> str | None:
    """Return the config text that `source` is or encodes, or None when it must be a path."""
    if _looks_like_text(source):
        return source
    if os.path.exists(source) or not _BASE64.fullmatch(source.strip()):
        return None
    compact = re.sub(r"\s", "", source).replace("+", "-").replace("/", "_")
    try:
        decoded = base64.urlsafe_b64decode(compact + "=" * (-len(compact) % 4)).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return None
    return decoded if _looks_like_text(decoded) else None


def _looks_like_text(source: str) -> bool:
    start = source.lstrip("\ufeff \t\r\n")
    if start.startswith("{"):
        return True
    return ":" in source and ("\n" in source.strip() or start.startswith(("//", "/*", "#")))


def _read_file(name: str) -> str:
    if not os.path.exists(name):
        raise ConfigError(f"config file {name} does not exist; give a path, a dict, or JSON text")
    try:
        with open(name, encoding="utf-8-sig") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not a text file in UTF-8 (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"config file {name} cannot be read: {error.strerror}") from None


def _parse(text: str, name: str | None) -> Document:
    import hjson

    text = text.lstrip("\ufeff")
    label = name or "config text"
    twice: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in items:
            if key in result:
                twice.append(key)
            result[key] = value
        return result

    if not text.strip():
        raise ConfigError(f"{label}, line 1: the config is empty; write at least {{ train_micro_batch_size_per_gpu: 1 }}")
    positions = Positions()
    try:
        positions = scan(text)
        data = hjson.loads(text, object_pairs_hook=pairs)
    except hjson.HjsonDecodeError as error:
        raise ConfigError(_syntax_problem(label, error, positions)) from None
    except IndexError:  # hjson runs off the end of a comment that is never closed
        raise ConfigError(f"{label}, line {text.count(chr(10)) + 1}: the text ends inside a comment; close it with */") from None
    except RecursionError:
        raise ConfigError(f"{label}, line 1: nested too deeply") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{label}, line 1: expected an object {{ ... }} at the top, got {type(data).__name__}")
    _refuse_duplicates(label, twice, positions)
    return Document(data, name, positions.lines)


def _syntax_problem(label: str, error: Any, positions: Positions) -> str:
    where = f"{label}, line {error.lineno}"
    if not positions.unclosed:
        return f"{where}, column {error.colno}: {error.msg}"
    path, line = positions.unclosed[0]
    what = ".".join(map(str, path)) or "the config"
    return (
        f"{where}: the text is cut off or malformed: {what}, opened on line {line}, is not closed; "
        "add what is missing (an unquoted text value runs to the end of its line)"
    )


def _refuse_duplicates(label: str, twice: list[str], positions: Positions) -> None:
    lines = [
        f"{'.'.join(map(str, path))} ({label}, line {second}): duplicate key, first given on line {first}; keep one"
        for path, first, second in positions.duplicates
    ]
    if not lines:
        lines = [f"{key} ({label}): duplicate key; keep one" for key in twice]
    if lines:
        raise ConfigError("\n".join(lines))
