"""Tags in a checkpoint directory: how one becomes complete in a single rename, and which one is found after a crash."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .manifest import MANIFEST, missing_parts, read_manifest, write_durably

LATEST = "latest"
_SPARE = 1.02  # file systems need room for more than the bytes themselves
PARTIAL, OLD, DELETING = ".partial", ".old", ".deleting"


def check_tag(tag: str) -> None:
    """Refuse a tag that is no plain name of a folder.

    Raises:
        CheckpointError: says what is wrong with it.
    """
    if not tag or tag.startswith(".") or os.sep in tag or tag == LATEST:
        raise CheckpointError(f"tag {tag!r} cannot name a checkpoint: it must be a plain folder name without {os.sep!r} and leading dot")


def partial_path(folder: Path, tag: str) -> Path:
    """Return where a tag is written before it is complete."""
    return folder / f".{tag}{PARTIAL}"


def _old_path(folder: Path, tag: str) -> Path:
    return folder / f".{tag}{OLD}"


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Tag:
    """A checkpoint: its name, where it lies, and its manifest; `problem` says why it cannot be loaded."""

    name: str
    path: Path
    manifest: dict[str, Any] = field(default_factory=dict, repr=False)
    problem: str = ""

    @property
    def age(self) -> tuple[int, float]:
        """What orders tags: steps, then the time of the save."""
        return self.manifest["counters"]["global_steps"], self.manifest["created"]


# ---- becoming complete


def commit(folder: Path, tag: str, save_latest: bool) -> None:
    """Give a written partial folder its name, then let `latest` name it; a crash at any point leaves something that loads."""
    partial, final, old = partial_path(folder, tag), folder / tag, _old_path(folder, tag)
    sync_folder(partial)
    _put_in_place(folder, partial, final, old)
    if save_latest:
        write_latest(folder, tag)
    if old.exists():
        remove(old)


def _put_in_place(folder: Path, partial: Path, final: Path, old: Path) -> None:
    if final.exists():
        if old.exists():
            remove(old)
        final.rename(old)
    partial.rename(final)
    sync_folder(folder)


def write_latest(folder: Path, tag: str) -> None:
    """Let `latest` name a tag."""
    fresh = folder / f".{LATEST}{PARTIAL}"
    write_durably(fresh, tag.encode())
    fresh.replace(folder / LATEST)
    sync_folder(folder)


def remove(path: Path) -> None:
    """Delete a checkpoint so that a crash in between leaves nothing that looks like one."""
    doomed = path.with_name(f".{path.name.removeprefix('.')}{DELETING}") if not path.name.endswith(DELETING) else path
    if doomed != path:
        if doomed.exists():
            shutil.rmtree(doomed)
        path.rename(doomed)
        sync_folder(path.parent)
    shutil.rmtree(doomed)


def tidy(folder: Path) -> list[str]:
    """Finish or remove what a crash left in a folder that nobody is saving to; return a line for each thing done."""
    done = []
    for path, tag, kind in list(_leftovers(folder)):
        if kind == PARTIAL and (path / MANIFEST).exists() and not examine(path, tag).problem:
            _put_in_place(folder, path, folder / tag, _old_path(folder, tag))
            if _old_path(folder, tag).exists():
                remove(_old_path(folder, tag))
            done.append(f"{folder / tag} was written completely and is put in its place")
        elif not path.exists():
            continue  # went with the partial folder that replaced it
        elif kind == OLD and not (folder / tag).exists():
            path.rename(folder / tag)
            done.append(f"{folder / tag} is put back: its successor was not completed")
        else:
            remove(path)
            done.append(f"{path} is removed: it is {'a half-written checkpoint' if kind == PARTIAL else 'left over'}")
    return done


def _leftovers(folder: Path) -> Iterator[tuple[Path, str, str]]:
    for kind in (DELETING, PARTIAL, OLD):  # a complete partial folder comes before the old one that it replaces
        for path in sorted(folder.glob(f".*{kind}")):
            if path.is_dir():
                yield path, path.name[1 : -len(kind)], kind


def make_room(folder: Path, tag: str, num_bytes: int) -> list[str]:
    """Make the folder that a tag is written to, and see that the disk has room for it; return what `tidy` had to do first.

    Raises:
        CheckpointError: there is not enough room; nothing was written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = tidy(folder)
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if num_bytes * _SPARE > free:
        raise CheckpointError(
            f"the checkpoint {folder / tag} needs {num_bytes:,} bytes and {folder} has {free:,} free; nothing was written. "
            "Make room, lower checkpoint.keep_last, or save elsewhere"
        )
    partial_path(folder, tag).mkdir()
    sync_folder(folder)
    return done


# ---- being found


def examine(path: Path, name: str) -> Tag:
    """Look whether a folder is a complete checkpoint: its manifest is whole, and each file there at its length."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return Tag(name, path, problem=str(error))
    missing = [f"{file} {what}" for file, what in missing_parts(path, manifest).items()]
    return Tag(name, path, manifest, f"{path} is incomplete: {'; '.join(missing)}" if missing else "")


def is_ours(path: Path) -> bool:
    """Whether a folder holds files that Stateroom writes, complete or not."""
    return (
        (path / MANIFEST).exists() or next(path.glob("index_*.json"), None) is not None or next(path.glob("__*.distcp"), None) is not None
    )


def holds_ours(folder: Path, tag: str | None) -> bool:
    """Whether what a tag (or `latest`, or the folder itself) means is Stateroom's, complete or not."""
    if not folder.is_dir():
        return False
    named = tag or latest_name(folder)
    if named is not None and (folder / named).is_dir():
        return is_ours(folder / named)
    if is_ours(folder):
        return True
    return any(path.is_dir() and is_ours(path) for path in folder.iterdir())


def tags(folder: Path) -> list[Tag]:
    """Return Stateroom's checkpoints in a folder, newest first, the broken ones last.

    A tag that a crash left between two names is found where it is.
    """
    places: dict[str, list[Path]] = {}
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not path.name.startswith(".") and is_ours(path):
                places.setdefault(path.name, []).append(path)
        for path, name, kind in _leftovers(folder):
            if kind != DELETING:
                places.setdefault(name, []).append(path)
    found = []
    for name, paths in places.items():
        seen = [examine(path, name) for path in paths]
        whole = [tag for tag in seen if not tag.problem]
        found.append(whole[0] if whole else seen[0])
    good = sorted((tag for tag in found if not tag.problem), key=lambda tag: tag.age, reverse=True)
    # a half-written folder is no checkpoint that broke, only one that never was
    return good + [tag for tag in found if tag.problem and tag.path.name == tag.name]


def latest_name(folder: Path) -> str | None:
    """Return what `latest` names; None without it."""
    try:
        return (folder / LATEST).read_text(errors="replace").strip()
    except OSError:
        return None


def find(folder: Path, tag: str | None) -> tuple[list[Tag], list[str]]:
    """Return the checkpoints that may be loaded, the wanted one first, and what is to be said about those passed over.

    With a tag it is the only candidate. Without one it is that of `latest`, then the others from new to old.

    Raises:
        CheckpointError: the tag that was asked for is missing or broken, or `latest` exists and nothing can be loaded.
    """
    if is_ours(folder):  # the path of one checkpoint itself
        itself = examine(folder, folder.name)
        if itself.problem:
            raise CheckpointError(itself.problem)
        return [itself], []
    there = tags(folder)
    by_name = {found.name: found for found in there}
    known = ", ".join(found.name for found in there if not found.problem) or "none"
    if tag is not None:
        if tag not in by_name:
            raise CheckpointError(f"{folder / tag} does not exist; complete checkpoints in {folder}: {known}")
        if by_name[tag].problem:
            raise CheckpointError(f"{by_name[tag].problem}; complete checkpoints in {folder}: {known}")
        return [by_name[tag]], []
    good = [found for found in there if not found.problem]
    named = latest_name(folder)
    if named is None:
        meant = [found for found in good if found.manifest["save_latest"]]
        return meant, [f"{folder / LATEST} is missing; {meant[0].name} is the newest complete checkpoint"] if meant else []
    if named in by_name and not by_name[named].problem:
        return [by_name[named], *(found for found in good if found.name != named)], []
    reason = by_name[named].problem if named in by_name else f"{folder / named} does not exist"
    if not good:
        raise CheckpointError(f"{folder / LATEST} names {named!r}, but {reason}; there is no complete checkpoint in {folder}")
    return good, [f"{folder / LATEST} names {named!r}, but {reason}; loading {good[0].name}, the newest complete one"]
