"""Takes down what an engine and the operations of its script say while a dry run goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ...parallel.imagined import World
from ...zero.backward import in_backward
from ..records import RunningJob
from ..report import Ledger
from .flops import flops_of
from .memory import Instant, StorageWatch
from .modes import bytes_of, tensors_of

_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_WAITS = ("wait_tensor", "barrier", "monitored_barrier_", "_wrap_tensor_autograd")
_PHASES = {"forward": "end of forward", "backward": "backward", "schedule": "backward", "step": "optimizer"}


class Enough(BaseException):
    """Ends the script after the steps that were asked for; no Exception, so that scripts do not catch it."""


class Record:
    """What one dry run has seen; the figures are of the last step that was run.

    Attributes:
        job: the engine's own records; None while no engine was built. account: its own ledger after the last step.
        on_drive: bytes of each state on a drive. waits: the rank waited for what another rank, not run so far, sends first.
        stages: the records of all pipeline stages, this one among them; set when they have all been run.
        instants: bytes by state between steps, at the end of forward, and at the fullest instants of the phases.
        own: the script's own collectives of a step: name -> (ranks, calls, payload bytes).
        flops: of matrix products and attention in a step, recomputed ones included.
    """

    def __init__(self, steps: int, *, is_one: bool) -> None:
        self.wanted = steps
        self.job: RunningJob | None = None
        self.account: Ledger | None = None
        self.on_drive: dict[str, int] = {}
        self.waits = False
        self.stages: list[Record] = []
        self.engines = 0
        self.instants: dict[str, Instant] = {}
        self.own: dict[tuple[str, int], tuple[int, int]] = {}
        self.flops = 0
        self.steps = 0
        self.seconds = 0.0
        self.storage = StorageWatch(is_one=is_one)

    @property
    def is_last(self) -> bool:
        """Whether the figures of the running step are those that are wanted: looking at every instant costs time."""
        return self.job is not None and self.steps + 1 >= self.wanted

    def close(self) -> None:
        """Ask the engine for its own figures; it answers in the imagined world only."""
        assert self.job is not None
        self.account, self.on_drive = self.job.ledger(), self.job.on_drive()

    def start_step(self) -> None:
        """Forget what belongs to the step before."""
        self.instants, self.own, self.flops = {}, {}, 0


class Watcher:
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
        record.storage.attribute(job.tensors, job.in_host)
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
            record.close()
            raise Enough
        record.start_step()
        if record.is_last:
            record.storage.recount()
            record.instants["between steps"] = record.storage.now("between steps")

    def _note(self, phase: str) -> None:
        """Keep a phase's fullest instant, or for forward its end, if no micro-batch before had more."""
        if not self._record.is_last:
            return
        instants, name = self._record.instants, _PHASES.get(phase)
        if name is None:
            return
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
        if not self._in_backward and in_backward() and record.job is not None and record.job.place.stages > 1:
            self._note("forward")  # within a schedule, whose forwards and backwards alternate
        self._in_backward = record.job is not None and in_backward()
        record.storage.take_in(_results(result), lambda: tensors_of((args, kwargs)))
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
