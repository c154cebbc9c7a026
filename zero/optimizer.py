"""A torch optimizer run on shards: one step is reduce, agree, norm, clip, update, publish, at every ZeRO stage alike."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

import torch

from ..errors import EngineError, LayoutError
from ..parallel.collectives import Collectives
from .backward import BackwardPass
from .gradients import first_bad_parameter
from .runs import Run, build_runs, copied_state, covered, split_run
from .tiers.fate import SharedFate
from .tiers.sub_groups import BySubGroups
from .tiers.tiers import Tiers
from .unit import Unit
from .update import AtOnce, Update


class Scale(Protocol):
    """What the loss was multiplied by."""

    @property
    def scale(self) -> float:
        """The factor."""


class ShardedOptimizer(torch.optim.Optimizer):
    """Drives the user's torch optimizer over this rank's intervals of the master weights.

    `param_groups` and `state` are the inner optimizer's own, so schedulers and scripts see and set the real options;
    the tensors in them are runs: contiguous pieces of a unit that share a parameter group.

    Attributes:
        grad_norm: global L2 norm of the last step's gradients before clipping, unscaled; None before the first step.
        overflow: whether the last step met inf or NaN and changed nothing.
        bad_parameter: the first parameter with a non-finite gradient in that step.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        units: Sequence[Unit],
        group_of: dict[int, int],
        backward: BackwardPass,
        comm: Collectives,
        *,
        whole: bool,
        scale: Scale,
        clip: float = 0.0,
        tiers: Tiers | None = None,
        separable: bool = False,
        job: Collectives | None = None,
    ) -> None:
        # Optimizer.__init__ would want parameters; the inner optimizer has them.
        self.inner = inner
        self.units = [unit for unit in units if unit.gradients is not None]
        self.comm = comm
        self.job = comm if job is None else job  # over whom norms are summed: other stages of the model are other ranks
        self.on_reduced: Callable[[Sequence[Unit], list[bytes]], list[bytes]] | None = None  # see pipe/ties.py
        self.backward_pass = backward
        self.scale = scale
        self.clip = clip
        self.grad_norm: float | None = None
        self.overflow = False
        self.check_overflow = True
        self.demand_all_gradients = False  # a parameter that no rank used is an error
        self.report: list[Any] = []  # what this rank adds to the norm's row: travels with it, read by the engine as `reports`
        self.reports: list[list[float]] = []
        self.before_update: Callable[[list[list[float]]], None] | None = None  # sees `reports`; raises, on all ranks alike, to forbid it
        self.bad_parameter: str | None = None
        self.before_write: Callable[[], None] | None = None  # called before weights or states change: waits for who still reads them
        self.defaults = inner.defaults
        self.param_groups = inner.param_groups
        self._tiers = tiers
        self.fate = SharedFate(tiers, self.job)
        self.update: Update = AtOnce(inner) if tiers is None else BySubGroups(inner, tiers, separable=separable)
        self.runs: list[Run] = self._build(self.units, group_of, inner, whole)
        self.admit: Callable[[list[Any], int], list[Unit]] | None = None  # makes parameters trainable: see zero/grow.py
        self._whole = whole
        self._group_of = group_of
        self._point_inner_at_runs()
        self.state = inner.state
        self._index_units()
        self._settle()

    def _build(self, units: Sequence[Unit], group_of: dict[int, int], inner: torch.optim.Optimizer | None, whole: bool) -> list[Run]:
        edges = None if self._tiers is None else self._tiers.edges_of
        return build_runs(units, group_of, inner, whole=whole, edges=edges)

    def _settle(self) -> None:
        """Bring optimizer states that the inner optimizer has already to where they rest."""
        for run in self.runs:
            for key, value in self.inner.state.get(run.tensor, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() and value.device != run.tensor.device:
                    self.inner.state[run.tensor][key] = value.to(run.tensor.device)
        for unit in self.units:
            if unit.residence is not None:
                unit.residence.settle()

    def _index_units(self) -> None:
        for unit in self.units:
            unit.optimizer = self
            unit.gradients.norm_spans = partial(self._norm_spans, weakref.ref(unit))  # type: ignore[union-attr]
        self._order = {id(unit): index for index, unit in enumerate(self.units)}
        self._counts = [len(unit.slots) for unit in self.units]
        self._ungrouped = {u.index: {slot.index for slot in u.slots if id(slot.param) not in self._group_of} for u in self.units}

    def _point_inner_at_runs(self) -> None:
        for index, group in enumerate(self.inner.param_groups):
            group["params"] = [run.tensor for run in self.runs if run.group == index]

    # ---- the step

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the parameters from the gradients collected since the last step, or skip all of it on inf or NaN.

        Raises:
            EngineError: a closure was given, or no backward has run.
            RankError: a peer is gone.
        """
        if closure is not None:
            raise EngineError("step(closure) is not supported: gradients are sharded and reduced once; use an optimizer without closure")
        if self.backward_pass.passes == 0:
            raise EngineError("step() before backward(): no gradient has been collected since the last step")
        if self.backward_pass.tainted:
            message = self.backward_pass.tainted
            self.backward_pass.forget()
            raise EngineError(message)
        touched = self._agree()
        if self.on_reduced is not None:
            touched = self.on_reduced(self.units, touched)
        if self.demand_all_gradients:
            self._refuse_unused(touched)
        norm = self._global_norm()
        self._ask_before_update()
        self.overflow = self.check_overflow and not math.isfinite(norm)
        self.bad_parameter = first_bad_parameter(self.units, self.comm, self.job) if self.overflow else None
        self.grad_norm = norm / self.scale.scale
        if not self.overflow:
            if self.before_write is not None:
                self.before_write()
            factor = self._factor(self.grad_norm)
            self.fate.update(lambda: self.update(self._used_runs(touched), factor))
            self._publish()
        self.backward_pass.after_step()

    def _ask_before_update(self) -> None:
        try:
            self.fate.settle(self.units)
            if self.before_update is not None:
                self.before_update(self.reports)
        except BaseException:
            self.backward_pass.after_step()
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients collected since the last step."""
        self.backward_pass.forget()

    def _agree(self) -> list[bytes]:
        """Let all ranks know which parameters got a gradient anywhere; reduce what any rank still holds locally."""
        touched = b"".join(bytes(unit.gradients.touched) for unit in self.units)  # type: ignore[union-attr]
        dirty = bytes(unit.gradients.dirty or not unit.gradients.reduced for unit in self.units)  # type: ignore[union-attr]
        agreed = self.comm.any_flags(touched + dirty)
        touched, dirty = agreed[: len(touched)], agreed[len(touched) :]
        self.backward_pass.flush([bool(flag) for flag in dirty])
        ends = itertools.accumulate(self._counts, initial=0)
        return [touched[low:high] for low, high in itertools.pairwise(ends)]

    def _refuse_unused(self, touched: list[bytes]) -> None:
        unused = [
            slot.name
            for unit, flags in zip(self.units, touched, strict=True)
            for slot in unit.slots
            if slot.param.requires_grad and not flags[slot.index]
        ]
        if self.job is not self.comm:
            unused = list(dict.fromkeys(name for names in self.job.gather_objects(unused) for name in names))
        if unused:
            self.backward_pass.after_step()
            raise EngineError(
                f"no rank used parameter(s) {', '.join(map(repr, unused[:5]))}{' …' if len(unused) > 5 else ''} in this step, and "
                "zero_optimization.ignore_unused_parameters is false; use them in the loss, freeze them, or set the key to true"
            )

    def _norm_spans(self, unit_of: Callable[[], Unit | None]) -> list[tuple[int, int]]:
        """Return this rank's elements of a unit that count for the norm, each element on one rank only, whatever the stage.

        Stages that keep gradients whole cut them like those that shard them, so that all stages add in one order.
        """
        unit = unit_of()
        assert unit is not None
        if not self._ungrouped[unit.index]:
            return [(unit.lo, unit.hi)] if unit.hi > unit.lo else []
        return [
            (part.at + unit.lo, part.at + unit.lo + part.stop - part.start)
            for part in unit.layout.slices(unit.lo, unit.hi)
            if part.extent not in self._ungrouped[unit.index]
        ]

    def _norms(self, dtype: torch.dtype | None) -> list[torch.Tensor]:
        """Return the norms of the pieces of all units, those of one dtype together."""
        kinds: dict[torch.dtype, list[torch.Tensor]] = {}
        for unit in self.units:
            if unit.is_copy:
                continue
            gradients = unit.gradients
            assert gradients is not None
            if gradients.home is not None and dtype is None:
                norms = gradients.norms
            else:
                with nullcontext() if gradients.home is None else unit.at_hand():
                    norms = gradients.measure(gradients.owned, dtype)  # type: ignore[arg-type]
            kinds.setdefault(gradients.dtype, []).extend(norms)
        return [norm for norms in kinds.values() for norm in norms]

    def _global_norm(self) -> float:
        total = self._sum_of_squares(None)
        # Squares may overflow fp32 where the gradients do not: look again in fp64 before the step is given up.
        if not math.isfinite(total):
            total = self._sum_of_squares(torch.float64)
        return math.sqrt(total) if total >= 0 else math.nan

    def _sum_of_squares(self, dtype: torch.dtype | None) -> float:
        found = self._norms(dtype)
        if found:
            norms = torch.stack([norm.to(self.comm.device, torch.float64) for norm in found])
            mine = norms.square().sum().reshape(1)
        else:
            mine = torch.zeros(1, dtype=torch.float64, device=self.comm.device)
        extra = [torch.as_tensor(value, dtype=torch.float64, device=self.comm.device).reshape(1) for value in self.report]
        rows = self.job.gather_numbers(torch.cat([mine, *extra]))
        self.reports = [row[1:] for row in rows]
        squares = [row[0] for row in rows]
        return math.fsum(squares) if all(map(math.isfinite, squares)) else math.nan

    def _factor(self, norm: float) -> float:
        """Return what gradients are multiplied by to undo the loss scale and to clip."""
        factor = 1.0 / self.scale.scale
        if self.clip > 0 and norm > self.clip:
            factor *= self.clip / (norm + 1e-6)
        return factor

    def _used_runs(self, touched: list[bytes]) -> list[Run]:
        """Return the runs that have a gradient; a parameter that no rank used gets none, so it neither decays nor counts a step."""
        partly = {id(unit): flags for unit, flags in zip(self.units, touched, strict=True) if 0 in flags}
        flags_of = {id(run): [partly[id(run.unit)][slot] for slot in run.slots] for run in self.runs if id(run.unit) in partly}
        mixed = [run for run in self.runs if any(flags_of.get(id(run), ())) and not all(flags_of[id(run)])]
        for run in mixed:
            with run.unit.at_hand(write=True):
                at = self.runs.index(run)
                self.runs[at : at + 1] = split_run(run, flags_of[id(run)], self.inner)
        if mixed:
            self._point_inner_at_runs()
        return [run for run in self.runs if touched[self._order[id(run.unit)]][run.slots[0]]]

    def _publish(self) -> None:
        for pending in [unit.publish(taken_up=self.update.publishes) for unit in self.units]:
            pending.wait()

    # ---- state of this rank

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's optimizer state: per run its place and state tensors, and the group options."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        runs = []
        for run in self.runs:
            with run.unit.at_hand():
                state = copied_state(self.inner.state.get(run.tensor, {}), run)
            runs.append({"unit": run.unit.name, "start": run.start, "stop": run.stop, "group": run.group, "state": state})
        return {"param_groups": groups, "runs": runs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what state_dict() returned on the same rank of the same layout.

        Raises:
            LayoutError: the units, intervals or groups differ from the saved ones.
        """
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise LayoutError(f"the saved optimizer has {len(groups)} parameter groups, this one {len(self.param_groups)}")
        by_name = {unit.name: unit for unit in self.units}
        runs = []
        for saved in state_dict["runs"]:
            if saved["unit"] not in by_name:
                raise LayoutError(f"the saved optimizer state belongs to unit {saved['unit']!r}, which this model does not have")
            runs.append(Run(by_name[saved["unit"]], saved["group"], saved["start"], saved["stop"], whole=self._whole))
        if covered(runs) != covered(self.runs):
            raise LayoutError("the saved optimizer state covers other intervals than this rank owns: ranks, stage or model differ")
        self.restart(runs, (copied_state(saved["state"], run) for run, saved in zip(runs, state_dict["runs"], strict=True)))
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update(saved)

    def fresh_runs(self) -> list[Run]:
        """Return runs as a new optimizer would have them, without touching those in use."""
        return self._build(self.units, self._group_of, None, self._whole)

    def restart(self, runs: Sequence[Run], states: Iterable[dict[str, Any]]) -> None:
        """Go on with other runs over the same elements, and with the state given for each; an empty one starts anew.

        `states` is asked for one state after the other; those of a unit go to where they rest before the next unit's are asked for.
        """
        self.runs = list(runs)
        self.inner.state.clear()
        given = iter(states)
        for unit, own in itertools.groupby(self.runs, key=lambda run: run.unit):
            for run in own:
                state = next(given)
                if state:
                    move = lambda v, to=run.tensor.device: v.to(to) if isinstance(v, torch.Tensor) and v.dim() else v  # noqa: E731
                    self.inner.state[run.tensor] = {key: move(value) for key, value in state.items()}
            if unit.residence is not None:
                unit.residence.settle()
        self._point_inner_at_runs()

    def names_in_groups(self) -> list[list[str]]:
        """Return the names of the parameters that each group updates, the same on every rank."""
        names: list[list[str]] = [[] for _ in self.param_groups]
        for unit in self.units:
            for slot in unit.slots:
                group = self._group_of.get(id(slot.param))
                if group is not None:
                    names[group].append(slot.name)
        return names

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters of the model from now on: unfrozen ones, or ones that were put into it; every rank must call it.

        Options that the group leaves open are the optimizer's defaults.

        Raises:
            EngineError: there are no parameters, one is not the model's, or one is in a group already.
        """
        assert self.admit is not None
        given = param_group["params"]
        params = [given] if isinstance(given, torch.Tensor) else [p[1] if isinstance(p, tuple) else p for p in given]
        if not params:
            raise EngineError("add_param_group() was given no parameters")
        group = len(self.param_groups)
        held = self.admit(params, group)
        known = {id(unit) for unit in self.units}
        self.runs = [run for run in self.runs if id(run.unit) not in {id(unit) for unit in held}] + self._runs_again(held)
        self.units += [unit for unit in held if id(unit) not in known]
        self._index_units()
        tensors = [run.tensor for run in self.runs if run.group == group]
        self.inner.add_param_group({**param_group, "params": tensors})
        self._point_inner_at_runs()

    def take_in(self, units: Sequence[Unit]) -> None:
        """Update these units too from now on: their parameters were in groups, but frozen."""
        self.units += units
        self.runs += self._build(units, self._group_of, None, self._whole)
        self._index_units()
        self._point_inner_at_runs()

    def _runs_again(self, units: Sequence[Unit]) -> list[Run]:
        """Cut the runs of units anew, where some parameters had no group and now have one; states stay with their elements."""
        known = {id(unit) for unit in self.units}
        fresh = [unit for unit in units if id(unit) not in known]
        runs = self._build(fresh, self._group_of, None, self._whole)
        for unit in [unit for unit in units if id(unit) in known]:
            built = self._build([unit], self._group_of, None, self._whole)
            runs += [run for run in self.runs if run.unit is unit] + [run for run in built if run.group == len(self.param_groups)]
        return runs

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> Any:
        """Run `hook(inner optimizer, args, kwargs)` before each update that takes place, with this rank's gradients in place."""
        return self.update.register_pre_hook(hook)

    def register_step_post_hook(self, hook: Callable[..., Any]) -> Any:
        """Run `hook(inner optimizer, args, kwargs)` after each update that takes place."""
        return self.update.register_post_hook(hook)

    @property
    def loss_scale(self) -> float:
        """The current loss scale."""
        return self.scale.scale

    cur_scale = loss_scale

    @property
    def _global_grad_norm(self) -> float | None:
        return self.grad_norm

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's optimizer."""
        return self.inner

    def __repr__(self) -> str:
        return f"Sharded({type(self.inner).__name__}, {len(self.runs)} runs on rank {self.comm.rank} of {self.comm.world})"
