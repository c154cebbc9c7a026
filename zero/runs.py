"""Runs: the pieces of master weights that an optimizer updates as one tensor."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .layout import Slice
from .unit import Unit


class Run:
    """Elements [start, stop) of a unit's flat space that share a parameter group, seen by the optimizer as one tensor.

    With `whole` the run is exactly one parameter, in its own shape, for optimizers that look at rows or matrices.
    """

    __slots__ = ("continues", "group", "slots", "start", "stop", "tensor", "unit", "whole")

    def __init__(self, unit: Unit, group: int, start: int, stop: int, *, whole: bool, continues: bool = False) -> None:
        self.unit = unit
        self.group = group
        self.start = start
        self.stop = stop
        self.whole = whole
        self.continues = continues  # cut off the run before it at the edge of a tile, which changes nothing
        self.slots = [part.extent for part in unit.layout.slices(start, stop)]
        low = unit.master_interval[0]
        with torch.no_grad():
            self.tensor = self._shaped(unit.master[start - low : stop - low])  # type: ignore[index]

    def gradient(self) -> torch.Tensor:
        """Return the reduced gradient of these elements in the master's dtype and this run's shape."""
        low = self.unit.gradients.interval[0]  # type: ignore[union-attr]
        piece = self.unit.gradients.owned[self.start - low : self.stop - low]  # type: ignore[union-attr, index]
        return self._shaped(piece).to(self.tensor.device, self.tensor.dtype)

    def _shaped(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(self.unit.slots[self.slots[0]].shape) if self.whole else flat


def build_runs(
    units: Sequence[Unit],
    group_of: dict[int, int],
    inner: torch.optim.Optimizer | None,
    *,
    whole: bool,
    edges: Callable[[Unit], Sequence[int]] | None = None,
) -> list[Run]:
    """Return the runs of this rank and move the optimizer's existing state, keyed by parameter, to them.

    Parameters of one group that lie side by side become one run: few large tensors instead of many small ones.
    An optimizer that already has state keeps a run per parameter, since step counts may differ. `edges` gives the elements
    of a unit at which runs are cut all the same: the tiles in which states are moved.
    """
    before: dict[int, dict[str, Any]] = {}
    scalars: set[str] = set()
    if inner is not None:
        before = {id(param): state for param, state in inner.state.items()}
        scalars = _scalars(inner)
        inner.state.clear()
    runs: list[Run] = []
    for unit in units:
        group_at = [group_of.get(id(slot.param)) for slot in unit.slots]
        for low, high in _cuts(unit):
            open_at: tuple[int, int, int] | None = None  # group, start, stop
            for part in unit.layout.slices(low, high):
                group = group_at[part.extent]
                start = low + part.at
                stop = start + part.stop - part.start
                state = before.get(id(unit.slots[part.extent].param))
                joins = open_at is not None and open_at[0] == group and open_at[2] == start and not whole and state is None
                if joins:
                    open_at = (group, open_at[1], stop)  # type: ignore[assignment, index]
                    continue
                if open_at is not None:
                    runs.append(Run(unit, *open_at, whole=whole))
                open_at = None if group is None else (group, start, stop)
                if open_at is not None and state is not None:
                    runs.append(Run(unit, *open_at, whole=whole))
                    inner.state[runs[-1].tensor] = _adopted(runs[-1], state, part, scalars)  # type: ignore[union-attr]
                    open_at = None
            if open_at is not None:
                runs.append(Run(unit, *open_at, whole=whole))
    return runs if edges is None else [part for run in runs for part in cut_at_edges(run, edges(run.unit), inner)]


def cut_at_edges(run: Run, edges: Sequence[int], inner: torch.optim.Optimizer | None) -> list[Run]:
    """Cut a run, and its state in `inner` with it, at those of `edges` that lie inside it."""
    inside = [edge for edge in edges if run.start < edge < run.stop]
    if not inside:
        return [run]
    parts = _cut_run(run, [run.start, *inside, run.stop], inner)
    for part in parts[1:]:
        part.continues = True
    return parts


def _cuts(unit: Unit) -> list[tuple[int, int]]:
    """Return the ranks' intervals inside this rank's master interval.

    A rank that updates everything on a CPU works in the same pieces as ranks that each update one: torch's fused CPU kernels
    round the last elements of a tensor differently (seen on 2.13), and so all stages give the same bits. An accelerator
    treats all elements alike, and a thousand pieces of a unit would be a thousand small tensors for nothing.
    """
    low, high = unit.master_interval
    if not unit.comm.on_host:
        return [(low, high)]
    bounds = unit.layout.bounds
    return [(a, b) for a, b in itertools.pairwise(bounds) if low <= a and b <= high and a < b]


def split_run(run: Run, flags: Sequence[int], inner: torch.optim.Optimizer) -> list[Run]:
    """Cut a run where `flags` (one per parameter in it) change, and its state with it.

    The cut is local to this rank and final: an elementwise optimizer gives the same values either way.
    """
    cuts = [run.start]
    for left, right, slot in zip(flags, flags[1:], run.slots[1:], strict=False):
        if bool(left) != bool(right):
            cuts.append(run.unit.slots[slot].offset)
    return _cut_run(run, [*cuts, run.stop], inner)


def _cut_run(run: Run, points: Sequence[int], inner: torch.optim.Optimizer | None) -> list[Run]:
    state = None if inner is None else inner.state.pop(run.tensor, None)
    parts = [
        Run(run.unit, run.group, a, b, whole=run.whole, continues=run.continues and a == run.start) for a, b in itertools.pairwise(points)
    ]
    for part in parts:
        if state and inner is not None:
            at = part.start - run.start
            inner.state[part.tensor] = _cut_state(state, run.stop - run.start, at, at + part.stop - part.start)
    return parts


def _scalars(inner: torch.optim.Optimizer) -> set[str]:
    """Return the names of states that are one number however large the parameter is; a parameter without dimensions does not tell."""
    found = {"step"}
    for param, state in inner.state.items():
        if param.dim():
            found.update(key for key, value in state.items() if isinstance(value, torch.Tensor) and not value.dim())
    return found


def _adopted(run: Run, state: dict[str, Any], part: Slice, scalars: set[str]) -> dict[str, Any]:
    numel, shape = run.unit.layout.extents[part.extent].numel, run.tensor.shape

    def follows(key: str, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.numel() == shape.numel() and (bool(value.dim()) or key not in scalars)

    cut = _cut_state(state, numel, part.start, part.stop)
    return {key: value.view(shape) if follows(key, value) else value for key, value in cut.items()}


def _cut_state(state: dict[str, Any], numel: int, start: int, stop: int) -> dict[str, Any]:
    """Return a copy of one tensor's state for elements [start, stop); scalars such as step counts are repeated."""
    cut: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            cut[key] = value.reshape(-1)[start:stop].clone() if value.numel() == numel and value.dim() else value.clone()
        else:
            cut[key] = value
    return cut


def copied_state(state: dict[str, Any], run: Run) -> dict[str, Any]:
    """Return a run's state, in memory of its own where that of the run comes and goes."""
    if run.unit.residence is None:
        return dict(state)
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def covered(runs: Sequence[Run]) -> set[tuple[str, int, int, int]]:
    """Return the covered element spans with adjacent runs of one group joined, so that splits do not matter."""
    spans: list[tuple[str, int, int, int]] = []
    for run in sorted(runs, key=lambda r: (r.unit.name, r.start)):
        if spans and spans[-1][0] == run.unit.name and spans[-1][1] == run.group and spans[-1][3] == run.start:
            spans[-1] = (*spans[-1][:3], run.stop)
        else:
            spans.append((run.unit.name, run.group, run.start, run.stop))
    return set(spans)
