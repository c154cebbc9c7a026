"""Searches the layouts of a job: every legal combination of degrees, memory first, then predicted step time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..hardware.device import Cluster
from ..job import Job, Layout, problems
from ..memory.life import Course, fullest, peak_bytes
from ..memory.rank import state_rows
from ..problems import LedgerError
from ..shapes.shape import ModelShape
from ..step.time import StepTime, step_time
from ..units import show_bytes

_RECOMPUTE = ("none", "selective", "full")
_MICRO = (1, 2, 4, 8, 16)
_MOST_STAGES = 128
_NODE = 8  # devices that share a host, as nodes are usually built
TIE = 0.01  # predictions this close are equal: the model's own error is several times larger, so the simpler layout wins
_LEAST_TOKENS = 4096  # a context-parallel rank with fewer has chunks too short for the attention kernel and the gathers
_CHUNKS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        batch: sequences of a step.
        limit_bytes: what a device may hold; by default 96 % of what a process can allocate there.
        zero: stages to try. recompute: policies to try, cheapest first.
        fixed: degrees of the layout that are not searched, such as {"tp": 8}.
        host_bytes: of memory that the ranks of a node of 8 may fill with states.
        base: fields that every layout has (dtypes, tiers, schedule).
    """

    shape: ModelShape
    cluster: Cluster
    seq: int
    batch: int
    limit_bytes: float | None = None
    zero: tuple[int, ...] = (1, 2, 3)
    recompute: tuple[str, ...] = _RECOMPUTE
    fixed: dict[str, int] = field(default_factory=dict)
    base: Layout = field(default_factory=Layout)
    attention: str = "causal"
    host_bytes: float = 2e12

    @property
    def limit(self) -> float:
        """Bytes that a device may hold."""
        return 0.96 * self.cluster.accelerator.usable_bytes if self.limit_bytes is None else self.limit_bytes

    def job(self, layout: Layout) -> Job:
        """Return the job with this layout."""
        return Job(self.shape, self.cluster, layout, self.seq, self.attention)


@dataclass(frozen=True)
class Candidate:
    """A layout with its two figures; the accounts behind them are made when they are asked for."""

    job: Job
    memory_bytes: float
    seconds: float
    mfu: float

    @property
    def layout(self) -> Layout:
        """The layout."""
        return self.job.layout

    @property
    def axes(self) -> int:
        """How many mechanisms the layout needs beside data parallelism; fewer is easier to run."""
        layout = self.layout
        return sum(each > 1 for each in (layout.tp, layout.pp, layout.cp, layout.ep, layout.vp, layout.dp_replicate))

    @cached_property
    def memory(self) -> Course:
        """Memory over a step, of the fullest stage."""
        return fullest(self.job)

    @cached_property
    def time(self) -> StepTime:
        """The account of the step."""
        return step_time(self.job)


@dataclass(frozen=True)
class Plan:
    """What the search found: layouts that fit, the chosen one first, then by step time.

    Attributes:
        tried: legal layouts whose memory was computed. full: how many of them did not fit.
        note: what was changed of the request to find any; "" when nothing was.
    """

    request: Request
    candidates: tuple[Candidate, ...]
    tried: int
    full: int
    note: str = ""

    @property
    def best(self) -> Candidate:
        """The chosen layout: the simplest of those whose predicted time is the fastest's, within TIE."""
        return self.candidates[0]

    def pareto(self) -> tuple[Candidate, ...]:
        """Return layouts for which no other is both faster and smaller, fastest first."""
        found: list[Candidate] = []
        for each in sorted(self.candidates, key=lambda candidate: candidate.seconds):
            if not found or each.memory_bytes < found[-1].memory_bytes:
                found.append(each)
        return tuple(found)

    def find(self, **degrees: int | str) -> Candidate | None:
        """Return the fastest layout with these fields."""
        for each in self.candidates:
            if all(getattr(each.layout, name) == value for name, value in degrees.items()):
                return each
        return None


# what leaves the device when nothing fits there, the least first: (optimizer tier, parameter tier, ZeRO stages)
_OFFLOADS = (("cpu", "device", (1, 2, 3)), ("cpu", "cpu", (3,)), ("nvme", "nvme", (3,)))


def make_plan(request: Request) -> Plan:
    """Return the plan. Where nothing fits the devices, states go to host memory or to drives, as few of them as are needed.

    Raises:
        LedgerError: nothing is legal, or nothing fits; the message says what is nearest.
    """
    try:
        return _searched(request)
    except _NothingFits as nothing:
        if not (request.base.optimizer_tier == request.base.parameter_tier == "device") or request.fixed.get("zero") == 0:
            raise
        for optimizer, parameters, stages in _OFFLOADS:
            allowed = tuple(stage for stage in stages if stage in request.zero and request.fixed.get("zero", stage) == stage)
            base = replace(request.base, optimizer_tier=optimizer, parameter_tier=parameters)
            try:
                found = _searched(replace(request, base=base, zero=allowed))
            except LedgerError:
                continue
            return replace(found, note=f"nothing fits with all states on the devices ({nothing.smallest}), so some rest off them")
        raise


class _NothingFits(LedgerError):
    """No layout fits; `smallest` is the least that one needs, in words."""

    smallest = ""


def _searched(request: Request) -> Plan:
    tried = full = 0
    fitting: list[Candidate] = []
    smallest: tuple[float, Layout] | None = None
    for family in _families(request):
        for layout in family:
            job = request.job(layout)
            if problems(job):
                continue
            tried += 1
            memory, stage = peak_bytes(job)
            if not _host_holds(request, job, -stage):
                continue
            if smallest is None or memory < smallest[0]:
                smallest = (memory, layout)
            if memory > request.limit:
                full += 1
                continue
            time = step_time(job)
            fitting.append(Candidate(job, memory, time.seconds, time.mfu))
            break  # the next of the family recomputes more, which costs time and gains nothing
    if not fitting:
        nothing = _NothingFits(_nothing(request, tried, smallest))
        nothing.smallest = (
            "no layout is legal" if smallest is None else f"the smallest needs {show_bytes(smallest[0])} of {show_bytes(request.limit)}"
        )
        raise nothing
    fitting.sort(key=lambda each: (each.seconds, each.memory_bytes))
    close = [each for each in fitting if each.seconds <= (1 + TIE) * fitting[0].seconds]
    best = min(close, key=lambda each: (each.axes, each.seconds))
    return Plan(request, (best, *(each for each in fitting if each is not best)), tried, full)


def _host_holds(request: Request, job: Job, stage: int) -> bool:
    """Whether the ranks of a node find room for what rests in host memory."""
    if job.layout.optimizer_tier == job.layout.parameter_tier == "device":
        return True
    each = sum(size for tier, _, size, _ in state_rows(job, stage) if tier == "cpu")
    return each * min(job.cluster.devices, _NODE) <= request.host_bytes


def _nothing(request: Request, tried: int, smallest: tuple[float, Layout] | None) -> str:
    sequences = request.batch
    if smallest is None:
        return (
            f"no legal layout of {request.shape.name} on {request.cluster}: a step has {sequences:,} sequences, and some degrees of "
            f"{request.cluster.devices:,} devices must divide it; try a batch that is a multiple of the devices over tp x pp, "
            f"such as {1 << round(math.log2(sequences)):,}"
        )
    need, layout = smallest
    return (
        f"none of {tried:,} layouts fits {show_bytes(request.limit)} a device; the smallest needs {show_bytes(need)}: {layout.words()}. "
        "Use more devices, a shorter sequence, full recomputation, or a drive (--optimizer-tier nvme --parameter-tier nvme --zero 3)"
    )


def _families(request: Request) -> Iterator[list[Layout]]:
    """Yield groups of layouts that differ in recomputation alone, cheapest first."""
    for tp, pp, cp, dp in _meshes(request):
        for ep in _expert_degrees(request, tp * cp * dp):
            for replicate in _replicas(request, dp):
                for micro, accumulation in _batches(request, dp):
                    for vp in _chunks(request, pp, accumulation):
                        for zero in _stages(request, dp * cp):
                            degrees = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "dp_shard": dp // replicate, "dp_replicate": replicate,
                                "vp": vp,
                                       "zero": zero, "micro_batch": micro, "accumulation": accumulation}  # fmt: skip
                            yield [_layout(request, degrees, policy) for policy in request.recompute]


def _layout(request: Request, degrees: dict[str, int], policy: str) -> Layout:
    return Layout(**{**vars(request.base), **degrees, "recompute": policy})


def _divisors(number: int, most: int | None = None) -> list[int]:
    found = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    found += [number // each for each in reversed(found) if each * each != number]
    return [each for each in found if most is None or each <= most]


def _meshes(request: Request) -> Iterator[tuple[int, int, int, int]]:
    devices, shape, fixed = request.cluster.devices, request.shape, request.fixed
    for tp in _divisors(request.cluster.domain, min(64, shape.heads)):
        if devices % tp or shape.heads % tp or fixed.get("tp", tp) != tp:
            continue
        for pp in _divisors(devices // tp, min(_MOST_STAGES, shape.layers)):
            if fixed.get("pp", pp) != pp:
                continue
            for cp in _divisors(devices // (tp * pp), 64):
                dp = devices // (tp * pp * cp)
                if fixed.get("cp", cp) != cp or fixed.get("dp", dp) != dp or dp > request.batch or request.batch % dp:
                    continue
                if cp > 1 and (request.seq % (2 * cp) or request.seq // cp < _LEAST_TOKENS or cp & (cp - 1)):
                    continue
                yield tp, pp, cp, dp


def _expert_degrees(request: Request, room: int) -> list[int]:
    mixture = request.shape.mixture
    if mixture is None:
        return [1]
    found = [each for each in _divisors(mixture.experts) if room % each == 0 and each & (each - 1) == 0]
    return [each for each in found if request.fixed.get("ep", each) == each]


def _replicas(request: Request, dp: int) -> list[int]:
    """Whole shards, or copies of shards of 64 and 512 ranks: more cuts of a large group save little memory and cost latency."""
    found = {1} | {dp // size for size in (64, 512) if dp > size and dp % size == 0}
    return [each for each in sorted(found) if request.fixed.get("dp_replicate", each) == each]


def _batches(request: Request, dp: int) -> Iterator[tuple[int, int]]:
    here = request.batch // dp
    for micro in _MICRO:
        if here % micro == 0 and request.fixed.get("micro_batch", micro) == micro:
            yield micro, here // micro


def _chunks(request: Request, pp: int, accumulation: int) -> list[int]:
    fixed = request.fixed.get("vp")
    if pp == 1 or accumulation % pp:
        return [each for each in (1,) if fixed in (None, each)]
    layers = request.shape.layers
    even = [each for each in _CHUNKS if each == 1 or (-layers % (pp * each) <= 2 and pp * each <= layers + 2)]
    found = even  # chunks of unequal size would let every stage wait for the largest
    return [each for each in found if fixed in (None, each)]


def _stages(request: Request, world: int) -> list[int]:
    """With one rank nothing is cut and the stages are one, unless a tier off the device goes with a stage."""
    fixed = request.fixed.get("zero")
    at_home = request.base.optimizer_tier == request.base.parameter_tier == "device"
    stages = [0] if world == 1 and fixed is None and at_home else list(request.zero)
    return [each for each in stages if fixed in (None, each)]
