"""Any checkpoint to DeepSpeed's universal layout: streaming, by several threads, and going on where it was stopped."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from ..version import __version__
from . import universal_work
from .batch import sync
from .opener import LATEST_UNIVERSAL, open_source
from .progress import Progress, size
from .source import Source
from .universal_plan import ZERO, File, plan
from .workers import each

PLAN, LOCK = "plan.json", "lock"
MOST_THREADS = 4  # by default: more of them wait for the same disk


@dataclass(frozen=True)
class Converted:
    """What was done."""

    folder: Path
    num_files: int
    num_bytes: int
    reused_files: int
    remarks: list[str]
    seconds: float


def convert_to_universal(
    input_folder: str | os.PathLike[str],
    output_folder: str | os.PathLike[str],
    tag: str | None = None,
    num_workers: int | None = None,
    stage: int | None = None,
    strict: bool = True,
    inert: tuple[str, ...] = (),
    say: Callable[[str], None] = lambda line: None,
) -> Converted:
    """Write a universal checkpoint and let `latest_universal` beside it name it.

    The output appears under its name when it is complete; until then it grows in a hidden folder beside it, from which a
    second call with the same input goes on. At any time each thread holds one state of one parameter.

    Args:
        input_folder: a checkpoint of Stateroom or DeepSpeed, or a universal one; see `open_source`.
        output_folder: the directory to make.
        tag: which checkpoint in `input_folder`; default: the latest.
        num_workers: threads; default: one for each core, four at most.
        stage: ZeRO stage of the DeepSpeed run that will load it (0 to 3); default: the one that wrote it.
        strict: refuse a checkpoint with missing states, else leave them out.
        inert: see `open_source`.
        say: called with lines for the user.

    Raises:
        CheckpointError: the input cannot be read or lacks states (both before anything is written), the output exists, another
            conversion is writing it, or the disk is full.
    """
    begun = time.monotonic()
    target = Path(os.path.abspath(output_folder))
    unfinished = target / PLAN
    if target.exists() and not unfinished.exists():
        _refuse_existing(target)
    source = open_source(input_folder, tag, inert)
    files, remarks = plan(source, stage, strict)
    mark = _fingerprint(source, files)
    if unfinished.exists():
        if json.loads(unfinished.read_text()).get("input") != mark:
            raise CheckpointError(f"{target} is another conversion that was stopped at its very end; remove it, or name another output")
        _name(target)
        return Converted(target, len(files), sum(file.num_bytes for file in files), len(files), remarks, time.monotonic() - begun)
    folder = target.with_name(f".{target.name}.converting")
    with _locked(folder, say):
        done = _resume(folder, mark, say)
        left = [file for file in files if file.path not in done]
        _require_space(folder, sum(file.num_bytes for file in left))
        _write(folder, left, num_workers or min(MOST_THREADS, os.cpu_count() or 1))
        _finish(folder, target, files)
    return Converted(target, len(files), sum(file.num_bytes for file in files), len(done), remarks, time.monotonic() - begun)


def _refuse_existing(target: Path) -> None:
    if not target.is_dir() or any(target.iterdir()):
        raise CheckpointError(f"{target} exists already; remove it, or name another output folder")


def _fingerprint(source: Source, files: Sequence[File]) -> str:
    """Return what tells whether a stopped conversion was of the same input into the same files."""
    digest = hashlib.sha256(__version__.encode())
    path = Path(source.facts()["path"])
    for entry in sorted(path.rglob("*")) if path.is_dir() else [path]:
        facts = entry.stat()
        if entry.is_file():
            digest.update(f"{entry}\0{facts.st_size}\0{facts.st_mtime_ns}\0".encode())
    for file in files:
        digest.update(f"{file.path}\0{file.num_bytes}\0{getattr(file, 'bare', '')}\0".encode())
    return digest.hexdigest()


@contextlib.contextmanager
def _locked(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of an unfinished output."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                say(f"another process is writing {folder}; waiting for it to end")
                fcntl.flock(file, fcntl.LOCK_EX)
            elif error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS):  # a file system without locks
                raise
        yield


def _resume(folder: Path, mark: str, say: Callable[[str], None]) -> set[str]:
    """Return what an earlier attempt has finished; remove what belongs to another one."""
    note = folder / PLAN
    try:
        same = json.loads(note.read_text()).get("input") == mark
    except (OSError, ValueError, AttributeError):
        same = False
    if not same:
        for entry in folder.iterdir():
            if entry.name == LOCK:
                continue
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        fresh = folder / f"{PLAN}.new"
        fresh.write_text(json.dumps({"input": mark, "stateroom": __version__}))
        fresh.replace(note)
        return set()
    done = universal_work.finished(folder)
    if done:
        say(f"going on in {folder}: {len(done)} files are there already")
    return done


def _require_space(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise CheckpointError(
            f"{folder.parent} has {size(free)} free, {size(num_bytes)} are needed; make room, or name an output elsewhere"
        )


def _write(folder: Path, files: Sequence[File], num_workers: int) -> None:
    work = list(universal_work.batches(files))
    writer = universal_work.Writer(folder)
    try:
        with Progress("converting", sum(file.num_bytes for file in files)) as progress:

            def write(one: universal_work.Work) -> None:
                writer.write(one)
                progress.advance(one.num_bytes)

            each(work, write, min(num_workers, len(work)), "convert")
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be written: {error.strerror or error}; run the command again when that is mended"
        ) from error


def _finish(folder: Path, target: Path, files: Sequence[File]) -> None:
    """Leave nothing but the files themselves, and give the folder its name."""
    expected = {file.path for file in files}
    folders = {folder, *((folder / path).parent for path in expected)}
    for entry in list(folder.rglob("*")):
        if entry.is_file() and str(entry.relative_to(folder)) not in expected and entry.name != PLAN:
            entry.unlink()
    sync([*folders, folder / ZERO])
    if target.exists():
        target.rmdir()
    folder.rename(target)
    sync([target.parent])
    _name(target)


def _name(target: Path) -> None:
    """Let `latest_universal` name the directory; only then is the note removed that says that something was left to do."""
    fresh = target.with_name(f".{LATEST_UNIVERSAL}.{os.getpid()}")
    fresh.write_text(target.name)
    sync([fresh])
    fresh.replace(target.with_name(LATEST_UNIVERSAL))
    sync([target.parent])
    (target / PLAN).unlink()
