"""Bytes on a drive, bytes of the buffers in front of it, and bytes moved in a step, from where states rest alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Moves = dict[tuple[str, str], int]  # ("read" or "written", state) -> bytes
_SECTOR_BYTES = 4096
_ELSEWHERE = 0  # the item size of a state that does not rest on the drive


@dataclass(frozen=True)
class DriveUnit:
    """A unit of which something rests on a drive. Item sizes are bytes per element, 0 for what rests elsewhere.

    Attributes:
        tiles: (elements, elements with padding in the files) of each of its tiles on this rank.
        states: item size of each optimizer state on the drive, by name.
        is_root: gathered once per micro-batch, for forward and backward together.
        shares_master: the optimizer updates the parameters themselves.
    """

    tiles: tuple[tuple[int, int], ...]
    param_itemsize: int = _ELSEWHERE
    master_itemsize: int = _ELSEWHERE
    grad_itemsize: int = _ELSEWHERE
    states: tuple[tuple[str, int], ...] = ()
    is_root: bool = False
    shares_master: bool = False
    trainable: bool = True

    @property
    def held(self) -> int:
        """Elements in each file, padding included."""
        return sum(padded for _, padded in self.tiles)

    @property
    def update_itemsize(self) -> int:
        """Bytes per element that an update has in its buffer."""
        return self.param_itemsize + self.master_itemsize + self.grad_itemsize + sum(size for _, size in self.states)

    def flat_bytes(self, itemsize: int) -> int:
        """Bytes that travel when a state of the unit travels as a whole, in whole sectors for each tile."""
        return sum(-(-numel * itemsize // _SECTOR_BYTES) * _SECTOR_BYTES for numel, _ in self.tiles)


def predict_drive(units: Sequence[DriveUnit]) -> dict[str, int]:
    """Return the bytes of each state on the drive: parameters, gradients, master weights, optimizer states."""
    return {
        "parameters": sum(unit.held * unit.param_itemsize for unit in units),
        "gradients": sum(unit.held * unit.grad_itemsize for unit in units),
        "master weights": sum(unit.held * unit.master_itemsize for unit in units),
        "optimizer states": sum(unit.held * size for unit in units for _, size in unit.states),
    }


def predict_moves(units: Sequence[DriveUnit], micro_batches: int, reductions: int) -> Moves:
    """Return the bytes that one optimizer step moves when every parameter is used.

    A parameter is read for each gather, a gradient is read back once for each reduction but the first and once for the update,
    and what the update changes is read and written once. 16-bit parameters are written without being read.

    Args:
        reductions: of gradients in the step; one, or one for each micro-batch.
    """
    moves: Moves = {}

    def add(direction: str, state: str, num_bytes: int) -> None:
        if num_bytes:
            moves[direction, state] = moves.get((direction, state), 0) + num_bytes

    for unit in units:
        gathers = micro_batches * (1 if unit.is_root else 2)
        add("read", "parameters", gathers * unit.flat_bytes(unit.param_itemsize))
        add("written", "gradients", reductions * unit.flat_bytes(unit.grad_itemsize))
        add("read", "gradients", (reductions - 1) * unit.flat_bytes(unit.grad_itemsize) + unit.held * unit.grad_itemsize)
        if unit.shares_master:
            add("read", "parameters", unit.held * unit.param_itemsize)
        if unit.grad_itemsize or unit.master_itemsize or unit.states or unit.shares_master:
            add("written", "parameters", unit.held * unit.param_itemsize)
        elif unit.trainable:  # updated in memory, and stored as a whole
            add("written", "parameters", unit.flat_bytes(unit.param_itemsize))
        for direction in ("read", "written"):
            add(direction, "master weights", unit.held * unit.master_itemsize)
            add(direction, "optimizer states", sum(unit.held * size for _, size in unit.states))
    return moves


def predict_buffers(units: Sequence[DriveUnit], limit: int, rooms: int) -> int:
    """Return the bytes of the buffers that sub-groups are updated in.

    Args:
        limit: elements of a sub-group; a tile that is larger stands alone.
        rooms: sub-groups in memory at once.
    """
    largest = numel = 0
    sub_groups = 0
    itemsize = 0
    for unit in units:
        for _, padded in unit.tiles:
            joins = numel and numel + padded <= limit and itemsize == unit.update_itemsize
            sub_groups += 0 if joins else 1
            numel = numel + padded if joins else padded
            itemsize = unit.update_itemsize
            largest = max(largest, numel * itemsize)
    return largest * min(rooms, sub_groups)


@dataclass(frozen=True)
class UnitInUse:
    """What a unit of stage 3 takes while it is in use: bytes of its full buffers, and of its largest parameter's gradient."""

    full_bytes: int
    grad_bytes: int
    largest_grad_bytes: int
    is_root: bool


def predict_working(units: Sequence[UnitInUse], *, ahead: int, in_flight: int, created_bytes: int) -> tuple[tuple[str, int], ...]:
    """Return what is in memory beyond what rests there, at the highest point of a step, as named terms.

    In a backward the root, the running unit and those gathered ahead are whole; a gradient buffer is filled while others wait
    for their reduction; and autograd holds one parameter's gradient. In the first update an optimizer makes the states of a
    sub-group before they find their buffer. The step needs the larger of the two.

    Args:
        ahead: units gathered or read before they are needed.
        in_flight: gradient buffers that may wait for their reduction.
        created_bytes: states that one sub-group's first update makes.
    """
    root = [unit for unit in units if unit.is_root]
    others = [unit for unit in units if not unit.is_root] or root
    count = 1 + ahead if others is not root else 0
    whole = sum(unit.full_bytes for unit in root) + sum(sorted((unit.full_bytes for unit in others), reverse=True)[:count])
    filling = sorted((unit.grad_bytes for unit in others), reverse=True)[: 1 + in_flight]
    gradients = sum(unit.grad_bytes for unit in root if others is not root) + sum(filling)
    landing = max((unit.largest_grad_bytes for unit in units), default=0)
    if whole + gradients + landing < created_bytes:
        return (("states of a sub-group as the optimizer makes them", created_bytes),)
    return (("gathered units", whole), ("gradients of units in backward", gradients), ("one parameter's gradient", landing))
