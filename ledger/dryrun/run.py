"""Runs a user's script as one rank of an imagined world, on fake tensors, and takes down what it costs."""

from __future__ import annotations

import contextlib
import io
import logging
import resource
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from ...environment import inherited, set_for_children, unset_for_children
from ...parallel.imagined import NotSaidError, World, imagine
from .modes import Answers, Watch
from .problems import NoValues, ScriptProblem
from .watcher import Enough, Record, Watcher

_OBJECTS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list", "recv_object_list")


class _TimeIsUp(BaseException):
    """Ends a script that takes too long; no Exception, so that scripts do not catch it."""


class DryRuns:
    """Runs one script as one rank after another of the same imagined world, on fake tensors.

    Until a run ends, the process has the default process group and the launch variables of the imagined rank, and all its
    tensors are fake.

    Args:
        script: "-m" runs the module that is the first of `args`.
        backend: whose collectives the ranks are taken to use; gloo's need more working memory here than NCCL's, and its
            device is the host.
        limit_s: the script is ended when it has not taken its steps by then.

    Raises:
        ScriptProblem: the script is not there.
    """

    def __init__(
        self, script: str, args: Sequence[str], ranks: int, steps: int = 2, *, backend: str = "nccl", limit_s: float = 600
    ) -> None:
        self._is_module = script == "-m" and bool(args)
        self._path, self._args = (Path(args[0]), args[1:]) if self._is_module else (Path(script), args)
        if not self._is_module and not self._path.is_file():
            raise ScriptProblem(f"no script {script}; write `stateroom dryrun --ranks N -- train.py args`, or `-- -m module args`")
        self._ranks, self._steps, self._backend, self._limit_s = ranks, steps, backend, limit_s
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._said: dict[Any, Any] = {}
        self._kept: dict[Any, Any] = {}

    def as_rank(self, rank: int) -> Record:
        """Run the script as one rank until it has taken its steps, and return what was seen.

        Raises:
            ScriptProblem: it never reaches initialize() or a step, raises, or needs values.
        """
        record = Record(self._steps, is_one=self._backend == "gloo")
        began = time.perf_counter()
        with ExitStack() as stack:
            watcher = Watcher(record)
            world = World(rank, self._ranks, watcher, self._backend, self._said, self._kept)
            watcher.world = stack.enter_context(imagine(world))
            stack.enter_context(_as_rank(rank, self._ranks))
            stack.enter_context(_command_line(self._path, self._args))
            stack.enter_context(_silence("torch._subclasses.fake_tensor"))  # it logs the errors that are reported below
            for mode in (self._fake, Watch(self._fake, watcher.after), Answers()):
                stack.enter_context(mode)
            with _time_limit(self._limit_s):
                _run(self._path, record, self._limit_s, self._is_module)
        record.seconds = time.perf_counter() - began
        return record

    def stages(self, first: Record) -> list[Record]:
        """Return a record for each pipeline stage of the copy of the model that `first` was a rank of, in order.

        A stage learns the shapes of what it receives from the stage that sends it, so stages are run until all have come
        through; what the script prints is shown only once.

        Raises:
            ScriptProblem: as for `as_rank`, or stages that wait for each other.
        """
        assert first.job is not None
        place = first.job.place
        records: list[Record | None] = [None] * place.stages
        records[place.stage] = first
        while any(record is None or record.waits for record in records):
            known = len(self._said)
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                for stage, rank in enumerate(place.chain):
                    record = records[stage]
                    if record is None or record.waits:
                        records[stage] = self.as_rank(rank)
            waiting = [str(stage) for stage, record in enumerate(records) if record is None or record.waits]
            if waiting and len(self._said) == known:
                raise ScriptProblem(f"{self._path}: stages {', '.join(waiting)} wait for messages that no stage sends")
        return [record for record in records if record is not None]


def dry_run(
    script: str, args: Sequence[str], ranks: int, rank: int = 0, steps: int = 2, *, backend: str = "nccl", limit_s: float = 600
) -> Record:
    """Run `script` with `args` as rank `rank` of `ranks` until it has taken `steps` optimizer steps; see `DryRuns`.

    The record of a model that is cut into stages has those of all stages with it.
    """
    runs = DryRuns(script, args, ranks, steps, backend=backend, limit_s=limit_s)
    first = runs.as_rank(rank)
    assert first.job is not None
    stages = runs.stages(first)
    found = stages[first.job.place.stage]
    found.stages = stages
    found.seconds = sum(each.seconds for each in stages)
    return found


def _run(path: Path, record: Record, limit_s: float, is_module: bool) -> None:
    try:
        if is_module:
            runpy.run_module(str(path), run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(path), run_name="__main__")
    except Enough:
        return
    except NotSaidError:
        record.waits = record.job is not None
        if record.waits:
            return
        raise
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise ScriptProblem(f"{path} ended itself: {stop.code}{_where(stop, path)}") from stop
    except _TimeIsUp as stop:
        raise ScriptProblem(f"{path} took no {record.wanted} steps in {limit_s:g} s (--limit){_where(stop, path)}") from None
    except Exception as error:
        raise ScriptProblem(_explained(error, path, record)) from error
    if record.job is None:
        raise ScriptProblem(f"{path} ended without calling stateroom.initialize(); a dry run follows the engine that it builds")
    if record.steps == 0:
        raise ScriptProblem(f"{path} built an engine and ended before its first engine.step() on an accumulation boundary")
    record.close()


def _explained(error: Exception, path: Path, record: Record) -> str:
    """Say in one message what stopped the script, and on which of its lines."""
    names = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    text = str(error).strip() or type(error).__name__
    objects = names & set(_OBJECTS)
    if objects:
        text = f"{sorted(objects)[0]}() exchanges Python objects between ranks, and here is only one rank; leave it out of the dry run"
    elif "in DataLoader worker process" in text:
        text = "worker processes of a DataLoader cannot make fake tensors; use num_workers=0 in a dry run"
    elif "init_process_group" in names and "twice" in text:
        text = "the group of the imagined ranks exists already; call stateroom.init_distributed(), or ask dist.is_initialized() before"
    elif not isinstance(error, NoValues):
        text = f"{type(error).__name__}: {text}"
    when = "before an engine was built" if record.job is None else f"in step {record.steps + 1}"
    return f"{path} stops {when}{_where(error, path)}: {text}"


def _where(error: BaseException, path: Path) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename, path)]
    return f", at {Path(frames[-1].filename).name}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""


def _is_users(filename: str, path: Path) -> bool:
    try:
        return Path(filename).resolve().is_relative_to(path.resolve().parent) and "site-packages" not in filename
    except OSError:
        return False


@contextmanager
def _as_rank(rank: int, ranks: int) -> Iterator[None]:
    """Be rank `rank`: a process group whose messages reach nobody, and the variables that a launcher sets."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ScriptProblem("a process group exists in this process already; a dry run needs one of its own")
    local = min(ranks, 8)
    facts = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local}
    before = inherited()
    for name, value in {**facts, "STATEROOM_ACCELERATOR": "cpu"}.items():
        set_for_children(name, str(value))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        if dist.is_initialized():  # the script may have ended it itself
            dist.destroy_process_group()
        for name in (*facts, "STATEROOM_ACCELERATOR"):
            if name in before:
                set_for_children(name, before[name])
            else:
                unset_for_children(name)


@contextmanager
def _command_line(path: Path, args: Sequence[str]) -> Iterator[None]:
    """Let the script find its own arguments, and the modules beside it."""
    argv, paths = sys.argv, list(sys.path)
    sys.argv = [str(path), *args]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, paths


@contextmanager
def _silence(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def _time_limit(limit_s: float) -> Iterator[None]:
    """End what runs in the main thread when the time is up; other threads have no alarm, and no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: Any) -> None:
        raise _TimeIsUp

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def host_bytes() -> int:
    """Return the most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
