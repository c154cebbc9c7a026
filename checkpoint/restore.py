"""Putting a checkpoint back: every rank reads what it owns under its own layout, whatever the layout was when it was saved."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError
from ..parallel.collectives import Pending
from ..zero.access import GatheredParameters
from ..zero.intact import follow_writes
from ..zero.optimizer import ShardedOptimizer
from ..zero.runs import Run
from ..zero.unit import Unit
from .matching import Matching, Rename, check, match
from .names import plain
from .native import NativeSource
from .parts import Part
from .reader import Request
from .source import MASTER, WEIGHT, Source
from .values import to_json

# options that say how an optimizer computes, not what: this run's choice holds
_HOW = frozenset(("fused", "foreach", "capturable", "differentiable"))
# optimizers that understand each other's states, and which these are: checkpoints of others do not say what wrote them
_KIN: tuple[tuple[frozenset[str], frozenset[str]], ...] = (
    (frozenset(("Adam", "AdamW", "SwitchedAdam", "FusedAdam", "DeepSpeedCPUAdam")), frozenset(("exp_avg", "exp_avg_sq"))),
    (frozenset(("Lamb", "FusedLamb")), frozenset(("exp_avg", "exp_avg_sq"))),
    (frozenset(("Lion", "FusedLion", "DeepSpeedCPULion")), frozenset(("exp_avg",))),
    (frozenset(("Adagrad", "DeepSpeedCPUAdagrad")), frozenset(("sum",))),
    (frozenset(("SGD",)), frozenset(("momentum_buffer",))),
)
_NOT_ALWAYS = frozenset(("max_exp_avg_sq", "momentum_buffer"))


@dataclass(frozen=True)
class Read:
    """Elements of one state from flat element `start` on, to be written into `out` [n]."""

    name: str
    state: str
    start: int
    out: torch.Tensor


@dataclass
class Restorer:
    """Brings the states of one engine from a source, step by step, so that ranks can agree after each: `check`, `read`, `publish`,
    `read_rest` and `settle`.

    Attributes:
        strict: missing and unexpected names are errors.
        with_weights: parameters and buffers; without, `hand_over` brings them.
        with_optimizer: optimizer states and group options too.
        remarks: lines for the user, after each step.
    """

    module: nn.Module
    units: Sequence[Unit]
    optimizer: ShardedOptimizer | None
    source: Source
    strict: bool = True
    with_weights: bool = True
    with_optimizer: bool = True
    rename: Rename | None = None
    part: Part | None = None
    elsewhere: frozenset[str] = frozenset()  # names in the checkpoint that other parts of the model load
    remarks: list[str] = field(default_factory=list)
    _matching: Matching = field(default_factory=Matching)
    _runs: list[Run] = field(default_factory=list)
    _fresh: dict[int, dict[str, Any]] = field(default_factory=dict)  # of runs in memory, by their number
    _left: list[Read] = field(default_factory=list)
    _pending: list[Pending] = field(default_factory=list)

    def check(self) -> None:
        """See whether the checkpoint fits; nothing is changed.

        Raises:
            CheckpointError: it does not; says what, and what can be done.
        """
        left_out: Sequence[str] = ()
        if isinstance(self.source, NativeSource):
            left_out = self.source.manifest["excluded"]
            comm = self.part.comm if self.part is not None else self.units[0].comm if self.units else None
            self.source.check_small_files(*((0, 1) if comm is None else (comm.rank, comm.world)))
        self._matching = match(self.module, self.units, self.source, self.rename, left_out)
        self._matching.unexpected = [name for name in self._matching.unexpected if name not in self.elsewhere]
        check(self._matching, self.source, self.strict)
        self.remarks += self._matching.remarks
        if self._loads_states():
            self._check_optimizer()

    def read(self) -> None:
        """Read this rank's part into shards and master weights, and into optimizer states if `publish` sends nothing to other ranks.

        Raises:
            CheckpointError: a file is missing or damaged; weights and states are then a mixture of old and new.
        """
        follow_writes(self.units)
        in_memory = [unit for unit in self.units if unit.residence is None]
        reads = [read for unit in in_memory for read in self._reads_of(unit)] if self.with_weights else []
        if self._loads_states():
            assert self.optimizer is not None
            self._runs = list(self._cut(self.optimizer.fresh_runs()))
            memory = _memory_of_states(self.optimizer, self._runs)  # makes room
            for index, run in enumerate(self._runs):
                if run.unit.residence is None:
                    self._fresh[index] = self._states_of(run, self._left, memory.pop(_place(run), {}))
        if not self._travels:
            reads, self._left = reads + self._left, []
        with torch.no_grad():
            _execute(self.source, reads)
            self._read_to_drives()
            own = self._own_buffers()
            for buffer, name, saved in self._matching.buffers.values() if self.with_weights else ():
                buffer.copy_(own.get(name, saved))
        if not self._travels:
            self._restart()

    @property
    def _travels(self) -> bool:
        """Whether weights go from rank to rank when they are published, which takes no disk: states are read meanwhile."""
        in_memory = all(unit.residence is None for unit in self.units)
        return in_memory and any(unit.comm.world > 1 and unit.master is not None and not unit.sharded for unit in self.units)

    def read_rest(self) -> None:
        """Read what `read` has left, beside what `publish` has started.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        if self._travels:
            with torch.no_grad():
                _execute(self.source, self._left)
            self._restart()

    def _restart(self) -> None:
        """Let the optimizer go on with the states that were read."""
        if self._loads_states():
            assert self.optimizer is not None
            self.optimizer.restart(self._runs, self._each_state(self._runs, self._fresh))
            self._set_groups()

    def _read_to_drives(self) -> None:
        """Read the weights of units that rest on a drive, one unit after the other."""
        for unit in self.units if self.with_weights else ():
            if unit.residence is not None:
                with unit.at_hand(write=True):
                    _execute(self.source, list(self._reads_of(unit)))

    def _each_state(self, runs: Sequence[Run], read: Mapping[int, dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the states of the runs, those that rest on a drive read only now."""
        for index, run in enumerate(runs):
            if index in read:
                yield read[index]
                continue
            reads: list[Read] = []
            state = self._states_of(run, reads)
            with torch.no_grad():
                _execute(self.source, reads)
            yield state

    def hand_over(self, load: Callable[..., Any]) -> None:
        """Let a function of the script's own bring the weights: `load(src=whole state dict, dst=module)`, as in DeepSpeed.

        Every rank holds the whole model while it runs; what it writes on rank 0 is kept.
        """
        weights = {name: self.source.tensor(name, self.source.best_weight(name)) for name in self.source.parameters}
        weights.update({alias: weights[name] for alias, name in self.source.names().items()})
        with GatheredParameters(self.module, modifier_rank=0):
            load(src={**weights, **self.source.buffers()}, dst=self.module)

    def publish(self) -> None:
        """Start bringing master weights to the weights of every rank; a collective, ended by `settle`."""
        self._pending = [unit.publish() for unit in self.units]

    def settle(self) -> None:
        """Return when weights have followed master weights on every rank."""
        for each in self._pending:
            each.wait()
        for unit in self.units:
            unit.refresh()
            unit.acknowledge()

    # ---- weights

    def _reads_of(self, unit: Unit) -> Iterable[Read]:
        target, interval = unit.full, (0, unit.layout.padded)
        if unit.master is not None:
            target, interval = unit.master, unit.master_interval
        elif unit.sharded:
            target, interval = unit.shard, (unit.lo, unit.hi)
        for part in unit.layout.slices(*interval):
            name = self._matching.parameters.get(plain(unit.slots[part.extent].name))
            if name is not None:
                out = target.detach()[part.at : part.at + part.stop - part.start]
                yield Read(name, self.source.best_weight(name), part.start, out)

    def _own_buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the values of buffers that were not the same on every rank, for this one, where it existed then."""
        if not isinstance(self.source, NativeSource) or not self.units:
            return {}
        rank = self.units[0].comm.rank if self.part is None else self.part.ranks[self.part.comm.rank]
        return self.source.own(rank)["buffers"] if rank < self.source.manifest["world"] else {}

    # ---- optimizer states

    def _loads_states(self) -> bool:
        return self.with_optimizer and self.optimizer is not None

    def _check_optimizer(self) -> None:
        assert self.optimizer is not None
        saved, here = self.source.facts().get("optimizer"), type(self.optimizer.inner).__name__
        known = next(((family, states) for family, states in _KIN if here in family), None)
        if saved is not None:
            fits = saved == here or (known is not None and saved in known[0])
        else:
            there = {state for name in self._matching.parameters.values() for state in self._states(name)}
            fits = known is None or not there or there - _NOT_ALWAYS == known[1] - _NOT_ALWAYS
            saved = f"with {', '.join(sorted(there))}"
        if not fits:
            raise CheckpointError(
                f"{self.source.facts()['path']} has the states of the optimizer {saved}, and this engine has {here}; "
                "pass load_optimizer_states=False to start it anew, or use the same optimizer"
            )
        bare = [
            plain(slot.name)
            for unit in self.optimizer.units
            for slot in unit.slots
            if (name := self._matching.parameters.get(plain(slot.name))) is not None and not self._states(name) and not self._scalars(name)
        ]
        if bare:
            self.remarks.append(f"the optimizer starts anew for {len(bare)} parameter(s) without saved states, such as {bare[0]!r}")

    def _states(self, name: str) -> list[str]:
        return [state for state in self.source.states(name) if state not in (MASTER, WEIGHT)]

    def _scalars(self, name: str) -> Mapping[str, Any]:
        return self.source.scalars(name)

    def _signature(self, run: Run, slot: int) -> str:
        """Return what must be equal for parameters to stay in one run."""
        name = self._matching.parameters.get(plain(run.unit.slots[slot].name))
        if name is None:
            return ""
        states = [(state, str(self._dtype(name, state)), self._is_own_shape(name, state)) for state in self._states(name)]
        return json.dumps([states, to_json(dict(self._scalars(name)), f"optimizer state of {name!r}")])

    def _dtype(self, name: str, state: str) -> torch.dtype:
        if isinstance(self.source, NativeSource):
            return self.source.reader.dtype(self.source.key(name, state))
        return self.source.elements(name, state).dtype

    def _is_own_shape(self, name: str, state: str) -> bool:
        return tuple(self.source.shape_of(name, state)) != tuple(self.source.parameters[name].shape)

    def _cut(self, runs: Iterable[Run]) -> Iterable[Run]:
        """Cut runs where parameters have other states, or the saved run was cut."""
        cuts = set(self.source.manifest["cuts"]) if isinstance(self.source, NativeSource) else set()
        for run in runs:
            signatures = [self._signature(run, slot) for slot in run.slots]
            edges = [run.start]
            for left, right, slot in zip(signatures, signatures[1:], run.slots[1:], strict=False):
                if left != right or plain(run.unit.slots[slot].name) in cuts:
                    edges.append(run.unit.layout.extents[slot].offset)
            for start, stop in itertools.pairwise([*edges, run.stop]):
                continues = run.continues and start == run.start
                yield run if len(edges) == 1 else Run(run.unit, run.group, start, stop, whole=run.whole, continues=continues)

    def _states_of(self, run: Run, reads: list[Read], memory: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
        """Return the run's state, its tensors still to be filled by what is added to `reads`, in place of old ones in `memory` that fit."""
        parts = run.unit.layout.slices(run.start, run.stop)
        names = [self._matching.parameters.get(plain(run.unit.slots[part.extent].name)) for part in parts]
        first = names[0]
        if first is None:
            return {}
        state: dict[str, Any] = {}
        for key in self._states(first):
            if self._is_own_shape(first, key):
                state[key] = self._whole_state(run, first, key, reads)
                continue
            flat = _room(run, self._state_dtype(run, first, key), memory.get(key))
            for part, name in zip(parts, names, strict=True):
                reads.append(Read(str(name), key, part.start, flat[part.at : part.at + part.stop - part.start]))
            state[key] = flat.view(run.tensor.shape)
        group = self.optimizer.param_groups[run.group]  # type: ignore[union-attr]
        on_device = bool(group.get("fused") or group.get("capturable"))
        for key, value in self._scalars(first).items():
            if key == "step" and type(value) in (int, float) and not isinstance(self.source, NativeSource):
                value = torch.tensor(float(value))  # as torch's optimizers and ours count
            if isinstance(value, torch.Tensor):  # a copy: each run counts its own steps
                value = value.to(run.tensor.device, copy=True) if on_device else value.clone()
            state[key] = value
        return state

    def _whole_state(self, run: Run, name: str, key: str, reads: list[Read]) -> torch.Tensor:
        shape = self.source.shape_of(name, key)
        if len(run.slots) > 1 or run.stop - run.start != run.unit.layout.extents[run.slots[0]].numel:
            raise CheckpointError(
                f"optimizer state {key!r} of {name!r} has the shape {tuple(shape)} of its own, and this run's optimizer updates pieces of "
                "the parameter; use the optimizer that saved it, or pass load_optimizer_states=False"
            )
        whole = torch.empty(shape, dtype=self._dtype(name, key), device=run.tensor.device)
        reads.append(Read(name, key, 0, whole.view(-1)))
        return whole

    def _state_dtype(self, run: Run, name: str, key: str) -> torch.dtype:
        """Return the dtype as saved, unless the run has another precision now: then that in which the optimizer works."""
        saved = self._dtype(name, key)
        master = self._dtype(name, self.source.best_weight(name))
        if master == run.tensor.dtype or saved != master or not saved.is_floating_point:
            return saved
        group = self.optimizer.param_groups[run.group]  # type: ignore[union-attr]
        return torch.float32 if group.get("fp32_optimizer_states") and run.tensor.dtype.itemsize < 4 else run.tensor.dtype

    # ---- groups

    def _set_groups(self) -> None:
        """Give each group the options of the saved one that holds the same parameters."""
        assert self.optimizer is not None
        saved = self.source.groups()
        home = {name: index for index, group in enumerate(saved) for name in group["params"]}
        for index, names in enumerate(self.optimizer.names_in_groups()):
            there = [self._matching.parameters.get(plain(name)) for name in names]
            homes = {home[name] for name in there if name in home}
            if len(homes) == 1:
                _take_options(self.optimizer.param_groups[index], saved[homes.pop()])
            else:
                what = "were in several groups" if homes else "were in no group"
                self.remarks.append(f"parameter group {index} keeps its options: its parameters {what} when they were saved")


def _place(run: Run) -> tuple[int, int, int]:
    return id(run.unit), run.start, run.stop


def _memory_of_states(optimizer: ShardedOptimizer, runs: Sequence[Run]) -> dict[tuple[int, int, int], dict[str, Any]]:
    """Take the states away from an optimizer; return those in memory that lie where one of `runs` does, the others are let go."""
    wanted = {_place(run) for run in runs if run.unit.residence is None}
    kept = {_place(run): optimizer.inner.state.get(run.tensor, {}) for run in optimizer.runs if _place(run) in wanted}
    optimizer.inner.state.clear()
    return kept


def _room(run: Run, dtype: torch.dtype, old: Any) -> torch.Tensor:
    """Return memory for a state, flat [run's elements]: that of the old one where it has the same form.

    Memory that is touched for the first time costs as long as reading what goes into it, on a virtual machine several times that.
    """
    numel, device = run.stop - run.start, run.tensor.device
    if type(old) is torch.Tensor and (old.dtype, old.device, old.numel()) == (dtype, device, numel) and old.is_contiguous():
        is_here = old.untyped_storage().nbytes() >= old.nbytes  # else it is parked elsewhere
        return old.detach().view(-1) if is_here else torch.empty_like(old).view(-1)
    return torch.empty(numel, dtype=dtype, device=device)


def _take_options(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for key, value in saved.items():
        if key == "params" or key in _HOW:
            continue
        if isinstance(group.get(key), torch.Tensor) and group[key].dim() == 0:
            group[key].fill_(float(value))  # compiled and captured steps read this very tensor
        elif isinstance(value, torch.Tensor) and isinstance(group.get(key), (int, float)):
            group[key] = value.item()
        else:
            group[key] = value


def _execute(source: Source, reads: Sequence[Read]) -> None:
    """Read everything: our own directories in one sweep, others piece by piece."""
    if isinstance(source, NativeSource):
        source.reader.fill(Request(source.key(read.name, read.state), read.start, read.out) for read in reads)
        return
    for read in reads:
        read.out.copy_(source.read(read.name, read.state, read.start, read.start + read.out.numel()))
