"""What this rank has to write: its pieces of parameters and optimizer states under their names, and the numbers beside them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import CheckpointError
from ..zero.optimizer import ShardedOptimizer
from ..zero.runs import Run
from ..zero.tiers.home import Stored
from ..zero.unit import Unit
from .names import ModuleNames, plain
from .parts import Part
from .plan import Piece, own_pieces, state_key
from .values import to_json


@dataclass
class Collected:
    """Tensors to write, and what describes them.

    Attributes:
        pieces, tensors: what to write, side by side; the tensors are flat views of the live states, or what reads those that
            rest on a drive; buffers are copies.
        described: key -> (dtype, shape) of every tensor that this rank has a part of.
        homes: key -> this rank, for what one rank writes whole.
        scalars: parameter -> its optimizer states that are no tensors, in JSON form.
        cuts: parameters before which the optimizer's runs are cut.
    """

    rank: int
    pieces: list[Piece] = field(default_factory=list)
    tensors: list[torch.Tensor | Stored] = field(default_factory=list)
    described: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    homes: dict[str, int] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    cuts: list[str] = field(default_factory=list)

    def add(self, piece: Piece, tensor: torch.Tensor | Stored) -> None:
        """Book one tensor."""
        self.pieces.append(piece)
        self.tensors.append(tensor)
        self.described[piece.key] = (short(tensor.dtype), piece.shape)

    def add_whole(self, key: str, tensor: torch.Tensor) -> None:
        """Book a tensor that this rank writes alone."""
        self.homes[key] = self.rank
        self.add(Piece(key, tuple(tensor.shape), 0, tensor.numel(), tensor.element_size()), tensor.detach().reshape(-1))


def short(dtype: torch.dtype) -> str:
    """Return the name of a dtype."""
    return str(dtype).removeprefix("torch.")


def collect(
    units: Sequence[Unit],
    optimizer: ShardedOptimizer | None,
    names: ModuleNames,
    differing: Collection[str],
    part: Part,
    *,
    trainable_only: bool,
) -> Collected:
    """Return what this rank writes: parameters first, then each optimizer state, in the order of the units.

    The value of a parameter is its fp32 master where there is one: the 16-bit weight is exactly its cast.

    Args:
        differing: buffers that are not the same on every rank; rank 0's are the ones that stand for all.
        part: which part of the model is here.

    Raises:
        CheckpointError: an optimizer state is of a kind that cannot be stored; names parameter and state.
    """
    rank, world = part.comm.rank, part.comm.world
    found = Collected(part.ranks[rank])
    saved = [unit for unit in units if (unit.trainable or not trainable_only) and not unit.is_copy]
    for unit in saved:
        own = _own_weights(unit)
        for span, piece in own_pieces(unit.layout, rank, "", own.element_size()):
            found.add(piece._replace(key=plain(piece.key)), own[span.at : span.at + span.stop - span.start])
        if rank == 0:
            empty = [slot for slot in unit.slots if not slot.numel]
            found.described.update((plain(slot.name), (short(own.dtype), tuple(slot.shape))) for slot in empty)
    if optimizer is not None:
        _collect_states(found, optimizer, {id(unit) for unit in saved})
    for number, (name, (owner, key)) in enumerate(names.buffers.items()):
        if not part.owns(name):
            continue
        if rank == (0 if name in differing else number % world):
            found.add_whole(name, owner._buffers[key].detach().clone())  # type: ignore[union-attr]
    return found


def _own_weights(unit: Unit) -> torch.Tensor | Stored:
    """Return this rank's interval of the best weights there are, flat; where they rest on a drive, what reads them."""
    if unit.residence is not None:
        unit.residence.flush()
        stored = unit.residence.stored_weights()
        if stored is not None:
            return stored
    value, base = (unit.shard, unit.lo) if unit.master is None else (unit.master, unit.master_interval[0])
    return value[unit.lo - base : unit.hi - base].detach()


def _flat_state(run: Run, key: str, value: torch.Tensor) -> torch.Tensor | Stored:
    stored = None if run.unit.residence is None else run.unit.residence.stored(run, key, value)
    return value.detach().reshape(-1) if stored is None else stored


def _collect_states(found: Collected, optimizer: ShardedOptimizer, saved: set[int]) -> None:
    """Add the optimizer's states, those of one name together."""
    shaped: dict[str, list[tuple[Piece, torch.Tensor | Stored]]] = {}
    whole: list[tuple[str, torch.Tensor]] = []
    previous: Run | None = None
    for run in optimizer.runs:
        unit = run.unit
        if id(unit) not in saved or run.start < unit.lo or run.stop > unit.hi:
            continue  # what is updated on every rank is written by one
        parts = unit.layout.slices(run.start, run.stop)
        joins = previous is not None and (previous.unit, previous.stop, previous.group) == (unit, run.start, run.group)
        if joins and not run.whole and not run.continues:
            found.cuts.append(plain(unit.slots[parts[0].extent].name))
        previous = run
        for state, value in optimizer.inner.state.get(run.tensor, {}).items():
            kind = _kind(run, value, f"optimizer state {state!r} of parameter {plain(unit.slots[parts[0].extent].name)!r}")
            for part in parts:
                extent = unit.layout.extents[part.extent]
                key = state_key(plain(extent.name), state)
                if kind == "shaped":
                    piece = Piece(key, extent.shape, part.start, part.stop, value.element_size())
                    flat = _flat_state(run, state, value)
                    shaped.setdefault(state, []).append((piece, flat[part.at : part.at + part.stop - part.start]))
                elif kind == "whole":
                    whole.append((key, value))
                else:
                    found.scalars.setdefault(plain(extent.name), {})[state] = to_json(value, f"optimizer state {key!r}")
    for pairs in shaped.values():
        for piece, tensor in pairs:
            found.add(piece, tensor)
    for key, value in whole:
        found.add_whole(key, value)


def _kind(run: Run, value: Any, what: str) -> str:
    """Tell whether a state is cut like its parameter, stored whole beside it, or repeated for each parameter."""
    if not isinstance(value, torch.Tensor) or not value.dim():
        return "scalar"
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided or value.is_quantized:
        raise CheckpointError(f"{what} is a {type(value).__name__} of layout {value.layout}; only plain tensors and numbers can be stored")
    if value.shape == run.tensor.shape:
        return "shaped"
    if len(run.slots) == 1 and run.stop - run.start == run.unit.layout.extents[run.slots[0]].numel:
        return "whole"
    raise CheckpointError(
        f"{what} has shape {tuple(value.shape)}, unlike the {run.stop - run.start} elements that it belongs to, and these are no whole "
        "parameter; an optimizer with such states must see whole parameters"
    )
