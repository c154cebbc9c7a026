"""Which environment variables go along to other hosts: those that steer libraries, and the user's own list."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..environment import STEERING
from .problem import LaunchError

# Facts of one process of another job, never of this one.
_NEVER = ("TORCHELASTIC_", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z", re.ASCII)


def exported(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this process that every host gets."""
    return {name: value for name, value in env.items() if name.startswith(STEERING) and not name.startswith(_NEVER)}


def read_env_file(path: Path) -> dict[str, str]:
    """Return the variables of a file of NAME=VALUE lines; `#` begins a comment line, `export ` may stand before a name.

    Raises:
        LaunchError: the file cannot be read, or a line is something else; file, line and token are named.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise LaunchError(f"{path}: byte {error.start} is not UTF-8 text; each line is NAME=VALUE") from None
    except (OSError, ValueError) as error:
        raise LaunchError(f"cannot read the file of variables {str(path)!r}: {getattr(error, 'strerror', None) or error}") from None
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.removeprefix("export ").strip().partition("=")
        if not equals or not _NAME.match(name):
            raise LaunchError(f"{path}:{number}: {line!r} is not NAME=VALUE")
        found[name] = _unquoted(value)
    return found


def env_files(chosen: Path | None, env: Mapping[str, str], home: Path, here: Path) -> list[Path]:
    """Return the files to read, later ones win: the chosen one, else those that DeepSpeed's users keep at home and here."""
    if chosen is not None:
        return [chosen]
    name = env.get("DS_ENV_FILE") or ".deepspeed_env"
    folders = [home] if home == here else [home, here]
    return [folder / name for folder in folders if (folder / name).is_file()]


def from_options(words: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that --export names: NAME takes this process's value, NAME=VALUE brings its own.

    Raises:
        LaunchError: a name is none, or this process has no such variable.
    """
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not _NAME.match(name):
            raise LaunchError(f"--export {word!r}: {name!r} is no name of a variable; write NAME or NAME=VALUE")
        if not equals and name not in env:
            raise LaunchError(f"--export {word!r}: there is no variable {name} here; write {name}=VALUE")
        found[name] = value if equals else env[name]
    return found


def _unquoted(value: str) -> str:
    if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
        return value[1:-1]
    return value
