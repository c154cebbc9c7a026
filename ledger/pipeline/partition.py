"""Where a list of layers is cut: contiguous parts by number, by weight with the least possible maximum, or by type."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence

from ...errors import ConfigError


def uniform(layers: int, parts: int) -> list[int]:
    """Return bounds [parts + 1] of parts whose sizes differ by at most one; the larger ones come first.

    Raises:
        ConfigError: there are fewer layers than parts.
    """
    _check(layers, parts)
    size, more = divmod(layers, parts)
    return [part * size + min(part, more) for part in range(parts + 1)]


def balanced(weights: Sequence[float], parts: int) -> list[int]:
    """Return bounds [parts + 1] of contiguous parts, none empty, whose heaviest is as light as any cut allows.

    Dynamic programming over prefix sums: O(parts x layers^2) additions, exact.

    Raises:
        ConfigError: there are fewer layers than parts.
    """
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    return lightest(lambda part, start, stop: sums[stop] - sums[start], len(weights), parts)


def lightest(cost: Callable[[int, int, int], float], layers: int, parts: int) -> list[int]:
    """Return the cut whose costliest part is cheapest, when a part's cost depends on which part it is.

    Args:
        cost: (part, start, stop) -> cost of layers [start, stop) as that part; may only grow with more layers.

    Between cuts with the same maximum the sum of squares decides on the way, so that the other parts come out even too.
    """
    _check(layers, parts)
    # best[stop]: (maximum, sum of squares, start of the last part) over cuts of [0, stop) into the parts so far
    best: list[tuple[float, float, int] | None] = [(0.0, 0.0, 0)] + [None] * layers
    rows = []
    for part in range(parts):
        now: list[tuple[float, float, int] | None] = [None] * (layers + 1)
        for stop in range(part + 1, layers - (parts - part - 1) + 1):
            options = []
            for start in range(part, stop):
                before = best[start]
                if before is not None:
                    here = cost(part, start, stop)
                    options.append((max(before[0], here), before[1] + here * here, start))
            now[stop] = min(options)
        rows.append(now)
        best = now
    bounds = [layers]
    for row in reversed(rows):
        found = row[bounds[-1]]
        assert found is not None
        bounds.append(found[2])
    return bounds[::-1]


def by_type(names: Sequence[str], pattern: str, parts: int) -> list[int]:
    """Return bounds that share out evenly the layers whose class name matches `pattern` (case ignored, anywhere in the name).

    Raises:
        ConfigError: the pattern is no regular expression, or matches nothing.
    """
    try:
        found = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(f"partition_method 'type:{pattern}': {error}") from None
    weights = [1.0 if found.search(name) else 0.0 for name in names]
    if not any(weights):
        raise ConfigError(f"partition_method 'type:{pattern}' matches none of the layers: {', '.join(dict.fromkeys(names))}")
    return balanced(weights, parts)


def explicit(given: Sequence[int], layers: int, parts: int) -> list[int]:
    """Return bounds from a list: either the bounds themselves [parts + 1] from 0 to `layers`, or the sizes [parts] of the parts.

    Raises:
        ConfigError: they do not cover the layers, or a part is empty.
    """
    _check(layers, parts)
    bounds = list(given)
    if len(bounds) == parts:
        bounds = [sum(given[:part]) for part in range(parts + 1)]
    rises = len(bounds) == parts + 1 and all(low < high for low, high in itertools.pairwise(bounds))
    if not rises or bounds[0] != 0 or bounds[-1] != layers:
        raise ConfigError(
            f"partition {list(given)} does not cut {layers} layers into {parts} parts: give {parts} sizes that add up to {layers}, or "
            f"{parts + 1} rising bounds from 0 to {layers}"
        )
    return bounds


def part_sizes(layers: int, parts: int) -> list[int]:
    """Return layers of each part; where they do not divide, the last and then the first part have one less, then the inner ones.

    The embedding and the head make the ends heavier, which is why they give first (Llama 3 does so).
    """
    most = -(-layers // parts)
    sizes = [most] * parts
    lacking = most * parts - layers
    order = [parts - 1, 0, *range(parts - 2, 0, -1)]
    for position in order[:lacking]:
        sizes[position] -= 1
    return sizes


def _check(layers: int, parts: int) -> None:
    if layers < parts:
        raise ConfigError(f"{layers} layers cannot be cut into {parts} parts without an empty one; use at most {layers} stages")
