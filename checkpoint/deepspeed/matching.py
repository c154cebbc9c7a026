"""Names for optimizer states that were saved by number: the assignments in module order that fit every shape.

Without ZeRO DeepSpeed stores what `torch.optim` gives: numbers, no names. Every script builds its groups by walking the
module, so each group is a subsequence of the module's parameters. All assignments of that kind are followed at once; if
exactly one fits, it is the one. Cost: candidates x reachable positions, which shapes keep few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

Shape: TypeAlias = "tuple[int, ...]"
Positions: TypeAlias = "tuple[int, ...]"
MOST_STATES = 200_000


class Slots(Protocol):
    """The places of one group, filled from the first to the last."""

    @property
    def end(self) -> int:
        """The position when all are filled."""

    def room(self, shape: Shape) -> int:
        """Return how many positions a parameter of this shape takes."""

    def after(self, at: int, shape: Shape) -> int | None:
        """Return the position after a parameter of this shape was put at `at`, None if it does not fit there."""


@dataclass(frozen=True)
class Listed:
    """One place for each parameter, with the shapes that it may have; none where the optimizer has kept nothing that tells."""

    shapes: tuple[frozenset[Shape], ...]

    @property
    def end(self) -> int:
        """The position when all are filled."""
        return len(self.shapes)

    def room(self, shape: Shape) -> int:
        """Return how many positions a parameter takes."""
        return 1

    def after(self, at: int, shape: Shape) -> int | None:
        """Return the position after a parameter of this shape was put at `at`."""
        return at + 1 if at < len(self.shapes) and (not self.shapes[at] or shape in self.shapes[at]) else None


@dataclass(frozen=True)
class Poured:
    """One flat tensor that the parameters fill end to end."""

    numel: int

    @property
    def end(self) -> int:
        """The position when it is full."""
        return self.numel

    def room(self, shape: Shape) -> int:
        """Return how many positions a parameter of this shape takes."""
        size = 1
        for extent in shape:
            size *= extent
        return size

    def after(self, at: int, shape: Shape) -> int | None:
        """Return the position after a parameter of this shape was put at `at`."""
        after = at + self.room(shape)
        return after if after <= self.numel else None


@dataclass(frozen=True)
class Candidate:
    """A parameter that may belong to one of the groups in `groups`, or to none (a frozen one)."""

    name: str
    shape: Shape
    groups: frozenset[int]


Check: TypeAlias = "Callable[[int, int, Candidate], bool]"  # may this candidate stand at this position of this group?
Assignment: TypeAlias = "tuple[tuple[tuple[str, int], ...], ...]"  # for each group, (name, position) in order


class Unmatched(Exception):
    """No assignment fits, or more than one (`several`)."""

    def __init__(self, message: str, several: bool = True) -> None:
        super().__init__(message)
        self.several = several


def assign(slots: Sequence[Slots], candidates: Sequence[Candidate], check: Check | None = None) -> tuple[Assignment, bool]:
    """Return the one assignment that fits, and whether a custom of naming was needed to choose it.

    Shapes decide first, then `check` (which may compare values), then the ways in which scripts usually split
    parameters into groups with and without weight decay.

    Raises:
        Unmatched: none fits, or several do.
    """
    found = _all(slots, candidates, None)
    if len(found) > 1 and check is not None:
        found = _all(slots, candidates, check)
    if len(found) > 1 and len(slots) == 2:
        usual = {one for split in _USUAL for one in _all(slots, _split(candidates, split), check)}
        if len(usual) == 1:
            return usual.pop(), True
    if not found:
        raise Unmatched("no order of the module's parameters fits the shapes of the optimizer's states", several=False)
    if len(found) > 1:
        first, second = (dict(pair for group in one for pair in group) for one in found[:2])
        name = next((name for name in (*first, *second) if first.get(name) != second.get(name)), "a parameter")
        raise Unmatched(
            f"the optimizer's states carry numbers instead of names, and more than one order fits their shapes (first at {name})"
        )
    return found[0], False


def _all(slots: Sequence[Slots], candidates: Sequence[Candidate], check: Check | None) -> list[Assignment]:
    """Return the assignments that fit, two at most."""
    start: Positions = (0,) * len(slots)
    end = tuple(slot.end for slot in slots)
    reached: list[dict[Positions, list[tuple[Positions, int]]]] = [{start: []}]
    states = 1
    left = sum(slots[0].room(candidate.shape) for candidate in candidates) if slots else 0
    for candidate in candidates:
        following: dict[Positions, list[tuple[Positions, int]]] = {}
        left -= slots[0].room(candidate.shape) if slots else 0
        for at in reached[-1]:
            following.setdefault(at, []).append((at, -1))
            for group in sorted(candidate.groups):
                after = slots[group].after(at[group], candidate.shape)
                if after is not None and (check is None or check(group, at[group], candidate)):
                    following.setdefault((*at[:group], after, *at[group + 1 :]), []).append((at, group))
        # what is still empty must be filled by the candidates that are left
        following = {at: ways for at, ways in following.items() if sum(end) - sum(at) <= left}
        reached.append(following)
        states += len(following)
        if states > MOST_STATES:
            raise Unmatched("the optimizer's states carry numbers instead of names, and too many orders fit their shapes")
    return _paths(reached, candidates, end, len(slots)) if end in reached[-1] else []


def _paths(
    reached: list[dict[Positions, list[tuple[Positions, int]]]], candidates: Sequence[Candidate], end: Positions, groups: int
) -> list:
    """Walk back from the end; the first two ways are enough to know whether there is one."""
    found: list[Assignment] = []
    open_: list[tuple[int, Positions, Any]] = [(len(candidates), end, None)]  # what was taken is a chain of (pair, rest)
    while open_ and len(found) < 2:
        step, at, taken = open_.pop()
        if step == 0:
            found.append(_unchained(taken, groups))
            continue
        for before, group in reached[step][at]:
            pair = (group, candidates[step - 1].name, before[group])
            open_.append((step - 1, before, taken if group < 0 else (pair, taken)))
    return found


def _unchained(taken: Any, groups: int) -> Assignment:
    pairs: list[list[tuple[str, int]]] = [[] for _ in range(groups)]
    while taken is not None:
        (group, name, at), taken = taken
        pairs[group].append((name, at))
    return tuple(map(tuple, pairs))


def _split(candidates: Sequence[Candidate], decays: Callable[[Candidate], bool]) -> list[Candidate]:
    return [Candidate(one.name, one.shape, one.groups & {0 if decays(one) else 1}) if one.groups >= {0, 1} else one for one in candidates]


def _is_norm(name: str) -> bool:
    return any(part in name.lower() for part in ("norm", "ln_", "ln.", ".ln", "ln1", "ln2"))


_USUAL: tuple[Callable[[Candidate], bool], ...] = (
    lambda one: len(one.shape) >= 2,
    lambda one: not one.name.endswith("bias"),
    lambda one: not one.name.endswith("bias") and not _is_norm(one.name),
    lambda one: len(one.shape) < 2,
    lambda one: one.name.endswith("bias"),
    lambda one: one.name.endswith("bias") or _is_norm(one.name),
)
