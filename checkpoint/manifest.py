"""The two kinds of JSON beside the data: each rank's index of its file, and the manifest that makes a directory a checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"

_HEAD, _TAIL = b'{"sha256": "', b'", "manifest": '


class DamagedError(CheckpointError):
    """Files of a checkpoint are missing or not what was written; another checkpoint may be whole."""


def index_file(rank: int) -> str:
    """Return the name of the index of `rank`'s data file."""
    return f"index_{rank}.json"


def rank_file(rank: int) -> str:
    """Return the name of the file with `rank`'s random number generators and client state."""
    return f"rank_{rank}.pt"


def write_durably(path: Path, content: bytes) -> str:
    """Write a file, return when it is on the disk, with the SHA-256 of its content."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(content).hexdigest()


def read_checked(path: Path, sha256: str) -> bytes:
    """Return the content of a file.

    Raises:
        DamagedError: it is missing, or not what was written.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}; the checkpoint is incomplete, load another tag") from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise DamagedError(f"{path} is damaged: its {len(content)} bytes do not have the hash that was saved; load another tag")
    return content


def dump_json(value: Any) -> bytes:
    """Return compact JSON."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest with its own hash in front."""
    body = dump_json(manifest)
    write_durably(folder / MANIFEST, _HEAD + hashlib.sha256(body).hexdigest().encode() + _TAIL + body + b"}")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint directory.

    Raises:
        CheckpointError: there is none, it is damaged, or a newer version wrote it.
    """
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; {folder} is not a complete checkpoint of Stateroom's") from error
    lead = len(_HEAD) + 64
    body = content[lead + len(_TAIL) : -1]
    framed = content[: len(_HEAD)] == _HEAD and content[lead : lead + len(_TAIL)] == _TAIL and content[-1:] == b"}"
    if not framed or hashlib.sha256(body).hexdigest().encode() != content[len(_HEAD) : lead]:
        raise CheckpointError(f"{path} is damaged: it does not have the hash that it names; load another tag")
    manifest = json.loads(body)
    if manifest["format"] > FORMAT:
        raise CheckpointError(
            f"{folder} has format {manifest['format']}, written by stateroom {manifest['stateroom']}; this version reads formats up to "
            f"{FORMAT}: update stateroom, or convert it there with `stateroom ckpt export` or ckpt-to-universal"
        )
    return manifest


def pack_bounds(bounds: Sequence[int]) -> int | list[int]:
    """Return bounds of a layout in short: equal shares as one number."""
    share = bounds[1]
    return share if all(bound == rank * share for rank, bound in enumerate(bounds)) else list(bounds)


def unpack_bounds(packed: int | list[int], world: int) -> tuple[int, ...]:
    """Return the bounds that `pack_bounds` was given."""
    return tuple(rank * packed for rank in range(world + 1)) if isinstance(packed, int) else tuple(packed)


def missing_parts(folder: Path, manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return file -> what is wrong, for each file of the checkpoint that is missing or has another length than was saved."""
    wrong = {}
    for name, facts in manifest["files"].items():
        try:
            num_bytes = (folder / name).stat().st_size
        except OSError:
            wrong[name] = "is missing"
            continue
        if num_bytes != facts["bytes"]:
            wrong[name] = f"has {num_bytes:,} bytes instead of {facts['bytes']:,}"
    return wrong
