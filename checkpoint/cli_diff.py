"""`stateroom ckpt diff`: two checkpoints, of any kind, state by state."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .source import Source

CHUNK_NUMEL = 4 << 20


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same: `largest` is the largest difference of elements, None where they cannot be compared."""

    name: str
    state: str
    what: str
    largest: float | None = None


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("a", metavar="A", help="a checkpoint of any kind")
    parser.add_argument("b", metavar="B", help="another one")
    parser.add_argument("--tag_a", metavar="T", help="which checkpoint in A; default: the latest")
    parser.add_argument("--tag_b", metavar="T", help="which checkpoint in B; default: the latest")
    parser.add_argument("--weights_only", action="store_true", help="compare weights and buffers alone")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the differences and return 0 if there are none, else 1."""
    from .opener import open_source

    left, right = open_source(args.a, args.tag_a), open_source(args.b, args.tag_b)
    found = differences(left, right, args.weights_only)
    if args.json:
        print(json.dumps({"equal": not found, "differences": [asdict(one) for one in found]}, indent=2))
    else:
        for one in found:
            size = f", at most {one.largest:.3g} apart" if one.largest is not None else ""
            print(f"{one.name} {one.state}: {one.what}{size}")
        print(f"{len(found)} difference(s)" if found else f"equal: {len(left.parameters)} parameters, all states bit for bit")
    return 1 if found else 0


def differences(left: Source, right: Source, weights_only: bool = False) -> list[Difference]:
    """Return what is not the same bit for bit; reads both in chunks of 16 MB."""
    found = [Difference(name, "", "only in A") for name in left.names() if name not in right.names()]
    found += [Difference(name, "", "only in B") for name in right.names() if name not in left.names()]
    theirs = right.names()
    for name, one in left.parameters.items():
        other = theirs.get(name)
        if other is None:
            continue
        if one.shape != right.parameters[other].shape:
            found.append(Difference(name, "", f"shape {one.shape} in A, {right.parameters[other].shape} in B"))
            continue
        found += _weights(left, right, name, other)
        if not weights_only:
            found += _states(left, right, name, other)
    return found + _buffers(left, right)


def _weights(left: Source, right: Source, name: str, other: str) -> list[Difference]:
    best, theirs = left.best_weight(name), right.best_weight(other)
    largest = _largest(left, right, (name, best), (other, theirs))
    return [] if largest is None else [Difference(name, best, "elements differ", largest)]


def _states(left: Source, right: Source, name: str, other: str) -> list[Difference]:
    found = []
    mine = {state for state in left.states(name) if state not in ("fp32", "param")}
    yours = {state for state in right.states(other) if state not in ("fp32", "param")}
    found += [Difference(name, state, "only in A") for state in sorted(mine - yours)]
    found += [Difference(name, state, "only in B") for state in sorted(yours - mine)]
    for state in sorted(mine & yours):
        if left.elements(name, state).numel != right.elements(other, state).numel:
            found.append(Difference(name, state, f"shape {left.shape_of(name, state)} in A, {right.shape_of(other, state)} in B"))
            continue
        largest = _largest(left, right, (name, state), (other, state))
        if largest is not None:
            found.append(Difference(name, state, "elements differ", largest))
    numbers, others = left.scalars(name), right.scalars(other)
    for key in sorted({*numbers, *others}):
        if key not in numbers or key not in others:
            found.append(Difference(name, key, f"only in {'A' if key in numbers else 'B'}"))
        elif float(numbers[key]) != float(others[key]):
            apart = abs(float(numbers[key]) - float(others[key]))
            found.append(Difference(name, key, f"{float(numbers[key]):g} in A, {float(others[key]):g} in B", apart))
    return found


def _largest(left: Source, right: Source, mine: tuple[str, str], yours: tuple[str, str]) -> float | None:
    """Return the largest absolute difference; None if all elements are the same, NaN counting as equal to NaN."""
    numel, largest, same = left.elements(*mine).numel, 0.0, True
    for start in range(0, numel, CHUNK_NUMEL):
        stop = min(start + CHUNK_NUMEL, numel)
        a, b = left.read(*mine, start, stop).double(), right.read(*yours, start, stop).double()
        apart = (a - b).abs()
        differ = (a != b) & ~(a.isnan() & b.isnan())
        if bool(differ.any()):
            same = False
            largest = max(largest, float(apart[differ].nan_to_num(nan=float("inf")).max()))
    return None if same else largest


def _buffers(left: Source, right: Source) -> list[Difference]:
    mine, yours = left.buffers(), right.buffers()
    found = [Difference(name, "buffer", "only in A") for name in mine if name not in yours and name not in right.names()]
    found += [Difference(name, "buffer", "only in B") for name in yours if name not in mine and name not in left.names()]
    for name in mine:
        if name in yours and (mine[name].shape != yours[name].shape or not bool((mine[name].double() == yours[name].double()).all())):
            found.append(Difference(name, "buffer", "elements differ"))
    return found
