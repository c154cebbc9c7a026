"""Which checkpoints are kept: the last few, every n-th, pinned ones, and always one that is known to be whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import CheckpointError
from .directory import Tag, latest_name, remove, tags
from .manifest import write_durably

PINNED, VERIFIED = "pinned", "verified"  # files that mark a checkpoint


def pin(folder: Path, tag: str) -> None:
    """Keep a checkpoint for good, such as the best one so far.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    write_durably(_existing(folder, tag) / PINNED, b"")


def unpin(folder: Path, tag: str) -> None:
    """Let a checkpoint go when its turn comes.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    (_existing(folder, tag) / PINNED).unlink(missing_ok=True)


def _existing(folder: Path, tag: str) -> Path:
    path = folder / tag
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist; `stateroom ckpt ls {folder}` lists the checkpoints there are")
    return path


def superfluous(found: Sequence[Tag], named: str | None, keep_last: int, keep_every: int | None) -> list[Tag]:
    """Return the checkpoints to delete.

    Kept are the newest `keep_last` complete ones, those at multiples of `keep_every` steps, pinned ones, the one that
    `latest` names, and the newest one that was verified. Broken ones are not touched: somebody may want to look at them.

    Args:
        found: newest first.
        named: the tag in `latest`.
    """
    whole = [tag for tag in found if not tag.problem]
    kept = {tag.name for tag in whole[: max(keep_last, 1)]} | {named}
    kept |= {tag.name for tag in whole if keep_every and tag.manifest["counters"]["global_steps"] % keep_every == 0}
    kept |= {tag.name for tag in whole if (tag.path / PINNED).exists()}
    kept |= {next((tag.name for tag in whole if (tag.path / VERIFIED).exists()), None)}
    return [tag for tag in whole if tag.name not in kept]


def prune(folder: Path, keep_last: int, keep_every: int | None = None) -> list[Tag]:
    """Delete what need not be kept, the oldest first; return it."""
    doomed = superfluous(tags(folder), latest_name(folder), keep_last, keep_every)
    for tag in reversed(doomed):
        remove(tag.path)
    return doomed
