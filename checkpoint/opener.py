"""`open_source`: finds out what a path is and hands it to the reader that understands it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from .source import Source

LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"


@dataclass(frozen=True)
class Opener:
    """One kind of checkpoint: whether a folder is one, how it is opened (with the names of classes to read as records), and what
    is wrong with one that cannot be loaded (nothing: an empty text); by default what opening it says."""

    name: str
    recognises: Callable[[Path], bool]
    open: Callable[[Path, tuple[str, ...]], Source]
    examine: Callable[[Path], str] | None = None

    def problem(self, folder: Path) -> str:
        """Return why a folder of this kind cannot be loaded; empty if it can."""
        if self.examine is not None:
            return self.examine(folder)
        try:
            self.open(folder, ())
        except CheckpointError as error:
            return str(error)
        return ""


def openers() -> tuple[Opener, ...]:
    """Return the known kinds; the first that recognises a folder opens it."""
    from . import directory, plain, universal_source
    from .deepspeed import files, source
    from .native import NativeSource

    return (
        Opener(
            "stateroom",
            directory.is_ours,
            lambda folder, _inert: NativeSource(folder),
            lambda folder: directory.examine(folder, folder.name).problem,
        ),
        Opener("universal", universal_source.is_universal, universal_source.open_universal),
        Opener("deepspeed", files.is_deepspeed, source.open_deepspeed),
        Opener("weights", plain.holds_weights, plain.open_weights),
    )


def open_source(path: str | os.PathLike[str], tag: str | None = None, inert: tuple[str, ...] = ()) -> Source:
    """Open a checkpoint of any kind without reading its tensors.

    Args:
        path: a directory of tags with `latest`, the folder of one tag, a universal directory, a directory or file of
            safetensors, or a file with a state dict.
        tag: which tag; default: the one that `latest` (else `latest_universal`) names.
        inert: full names of classes whose objects in the client state are read as plain records; any other is refused.

    Raises:
        CheckpointError: there is no checkpoint, no such tag, or a file of it is missing, damaged or refused.
    """
    path = Path(path)
    if path.is_file():
        from . import plain

        if tag is not None:
            raise CheckpointError(f"{path} is a file, which has no tag {tag!r}; leave the tag out")
        return plain.open_weights(path, inert)
    return open_folder(folder_of(path, tag), inert)


def open_folder(folder: Path, inert: tuple[str, ...] = ()) -> Source:
    """Open the folder of one checkpoint.

    Raises:
        CheckpointError: see `open_source`.
    """
    kind = kind_of(folder)
    if kind is None:
        raise CheckpointError(
            f"{folder} is no checkpoint: it holds neither files of Stateroom or DeepSpeed, nor a universal directory, nor weights. "
            f"Name the directory in which checkpoints were saved, or one of them{_there(folder)}"
        )
    return kind.open(folder, inert)


def kind_of(folder: Path) -> Opener | None:
    """Return the kind of a folder; None when it is no checkpoint itself."""
    return next((kind for kind in openers() if kind.recognises(folder)), None)


def folder_of(path: Path, tag: str | None) -> Path:
    """Return the folder of the checkpoint that a path and a tag mean.

    Raises:
        CheckpointError: there is no such directory or tag, or nothing says which tag is meant.
    """
    if not path.is_dir():
        near = path.parent
        raise CheckpointError(f"{path} does not exist{_there(near) if near.is_dir() else f', nor does {near}'}")
    if tag is not None:
        if not (path / tag).is_dir():
            raise CheckpointError(f"{path / tag} does not exist{_there(path)}")
        return path / tag
    for name in (LATEST, LATEST_UNIVERSAL):
        named = _named_by(path / name)
        if named is not None:
            if not named or not (path / named).is_dir():
                raise CheckpointError(
                    f"{path / name} names the tag {named!r}, which does not exist{_there(path)}; give a tag, or correct the file"
                )
            return path / named
    if kind_of(path) is None and tags_in(path):
        raise CheckpointError(f"{path / LATEST} is missing, so nothing says which tag is meant{_there(path)}; give one of them")
    return path


def tags_in(path: Path) -> list[str]:
    """Return the names of the folders in a directory that are checkpoints."""
    return sorted(
        entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".") and kind_of(entry) is not None
    )


def _named_by(file: Path) -> str | None:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return None


def _there(path: Path) -> str:
    found = tags_in(path)
    return f"; checkpoints in {path}: {', '.join(found) if found else 'none'}"
