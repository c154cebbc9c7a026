"""Runs a user's script as one rank of an imagined world, on fake tensors, and takes down what it costs."""

from __future__ import annotations

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

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from ...environment import inherited, set_for_children, unset_for_children
from ...parallel.imagined import World, imagine
from ...zero.backward import in_backward
from ..records import RunningJob
from .flops import flops_of
from .memory import Instant, StorageWatch
from .modes import Answers, Watch, bytes_of
from .problems import NoValues, ScriptProblem

_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_WAITS = ("wait_tensor", "barrier", "monitored_barrier_", "_wrap_tensor_autograd")
_OBJECTS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list", "recv_object_list")
_PHASES = {"forward": "end of forward", "backward": "backward", "step": "optimizer"}


class _Enough(BaseException):
    """Ends the script after the steps that were asked for; no Exception, so that scripts do not catch it."""


class _TimeIsUp(BaseException):
    """Ends a script that takes too long; no Exception, for the same reason."""


class Record:
    """What one dry run has seen; the figures are of the last step that was run.

    Attributes:
        job: the engine's own records; None while no engine was built.
        instants: bytes by state between steps, at the end of forward, and at the fullest instants of the phases.
        own: the script's own collectives of a step: name -> (ranks, calls, payload bytes).
        flops: of matrix products and attention in a step, recomputed ones included.
    """

    def __init__(self, steps: int) -> None:
        self.wanted = steps
        self.job: RunningJob | None = None
        self.engines = 0
        self.instants: dict[str, Instant] = {}
        self.own: dict[tuple[str, int], tuple[int, int]] = {}
        self.flops = 0
        self.steps = 0
        self.seconds = 0.0
        self.storage = StorageWatch()

    @property
    def is_last(self) -> bool:
        """Whether the figures of the running step are those that are wanted: looking at every instant costs time."""
        return self.job is not None and self.steps + 1 >= self.wanted

    def start_step(self) -> None:
        """Forget what belongs to the step before."""
        self.instants, self.own, self.flops = {}, {}, 0


class _Watcher:
    """Turns what the engine and the operations say into a Record."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._in_backward = False
        self.world: World | None = None

    def job(self, job: RunningJob) -> None:
        """Follow the first engine; a second one's states count as its own would, under other states."""
        record = self._record
        record.engines += 1
        if record.job is not None:
            return
        record.job = job
        record.storage.recount()
        record.storage.attribute(job.tensors)
        record.storage.follow([*job.tensors()["parameters"], *job.tensors()["gathered parameters"]])
        record.start_step()

    def phase(self, name: str) -> None:
        """Note the fullest instant of a phase; after a step, stop when there are enough."""
        record, job = self._record, self._record.job
        if job is None:
            return
        self._note(name)
        if name != "step" or job.steps() == record.steps:
            return
        record.steps = job.steps()
        if record.steps >= record.wanted:
            raise _Enough
        record.start_step()
        if record.is_last:
            record.storage.recount()
            record.instants["between steps"] = record.storage.now("between steps")

    def _note(self, phase: str) -> None:
        """Keep a phase's fullest instant, or for forward its end, if no micro-batch before had more."""
        if not self._record.is_last:
            return
        instants, name = self._record.instants, _PHASES[phase]
        instant = self._record.storage.take_peak(name)
        if phase == "forward":
            instant = self._record.storage.now(name)
        if name not in instants or instant.total > instants[name].total:
            instants[name] = instant

    def after(self, func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        """Take in one operation."""
        record = self._record
        if self._in_backward and not in_backward():  # loss.backward() outside the engine tells nobody that it has ended
            self._note("backward")
        self._in_backward = record.job is not None and in_backward()
        for tensor in _results(result):
            record.storage.take_in(tensor)
        if record.is_last:
            record.storage.sample(func.__name__)
        if func.namespace in _COLLECTIVES:
            self._collective(func, args, result)
        else:
            record.flops += flops_of(func, args, kwargs, result)

    def _collective(self, func: Any, args: tuple, result: Any) -> None:
        name = func._schema.name.split("::")[1]
        if self.world is None or self.world.engine_calls or name in _WAITS:
            return
        key = (name.strip("_"), _ranks(args))
        calls, size = self._record.own.get(key, (0, 0))
        self._record.own[key] = (calls + 1, size + max(bytes_of(args), bytes_of(result)))


def _results(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for item in result:
            yield from _results(item)


def _ranks(args: tuple) -> int:
    """Return how many ranks a collective joins: from its group, given as an object or by name."""
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                return int(dist.ProcessGroup.unbox(value).size())
            except (RuntimeError, TypeError):
                continue
        if isinstance(value, str):
            try:
                return int(dist.distributed_c10d._resolve_process_group(value).size())  # type: ignore[arg-type]
            except (RuntimeError, LookupError, KeyError, ValueError):
                continue
    return dist.get_world_size()


def dry_run(
    script: str, args: Sequence[str], ranks: int, rank: int = 0, steps: int = 2, *, backend: str = "nccl", limit_s: float = 600
) -> Record:
    """Run `script` with `args` as rank `rank` of `ranks` until it has taken `steps` optimizer steps, and return what was seen.

    A script "-m" runs the module that is the first of `args`.

    Until it ends, the process has the default process group and the launch variables of the imagined rank, and all its
    tensors are fake.

    Args:
        backend: whose collectives the ranks are taken to use; gloo's need more working memory here than NCCL's.
        limit_s: the script is ended when it has not taken its steps by then.

    Raises:
        ScriptProblem: the script is not there, never reaches initialize() or a step, raises, or needs values.
    """
    is_module = script == "-m" and bool(args)
    path, args = (Path(args[0]), args[1:]) if is_module else (Path(script), args)
    if not is_module and not path.is_file():
        raise ScriptProblem(f"no script {script}; write `stateroom dryrun --ranks N -- train.py args`, or `-- -m module args`")
    record = Record(steps)
    began = time.perf_counter()
    with ExitStack() as stack:
        watcher = _Watcher(record)
        watcher.world = stack.enter_context(imagine(World(rank, ranks, watcher, backend)))
        stack.enter_context(_as_rank(rank, ranks))
        stack.enter_context(_command_line(path, args))
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        stack.enter_context(_silence("torch._subclasses.fake_tensor"))  # it logs the errors that are reported below
        for mode in (fake, Watch(fake, watcher.after), Answers()):
            stack.enter_context(mode)
        with _time_limit(limit_s):
            _run(path, record, limit_s, is_module)
    record.seconds = time.perf_counter() - began
    return record


def _run(path: Path, record: Record, limit_s: float, is_module: bool) -> None:
    try:
        if is_module:
            runpy.run_module(str(path), run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(path), run_name="__main__")
    except _Enough:
        return
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
