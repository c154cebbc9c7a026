"""ZeRO-3: every parameter is cut by itself into equal shards, which lie one after another in flat sub-groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import CheckpointError
from ..elements import Link, chained
from ..pickles import Stored
from .found import Found, numel_of, options_of, shape_of, whole
from .spread import Shared


def read_sharded(by_rank: Mapping[int, dict[str, Any]], shapes: Sequence[Mapping[str, Any]], where: str) -> Found:
    """Find every trainable parameter in the shards of the ranks.

    Args:
        by_rank: data-parallel rank -> inner optimizer dictionary.
        shapes: name -> shape, for each sub-group (older versions: for each parameter group), in the order of the shards.
        where: the folder, for messages.

    Raises:
        CheckpointError: the flat tensors do not have the lengths that the shapes need.
    """
    found = Found()
    ranks = sorted(by_rank)
    flats = [by_rank[rank]["fp32_flat_groups"] for rank in ranks]
    states = [by_rank[rank]["optimizer_state_dict"]["state"] for rank in ranks]
    names: list[list[str]] = [[] for _ in flats[0]]
    sub, at = 0, 0
    shared = [
        Shared(
            [flat[index] for flat in flats], [state.get(index, {}) for state in states], flats[0][index].numel, ranks, f"sub-group {index}"
        )
        for index in range(len(names))
    ]
    for name, shape in ((name, shape_of(shape)) for group in shapes for name, shape in group.items()):
        shard = -(-numel_of(shape) // len(ranks))
        while sub < len(names) and at + shard > flats[0][sub].numel:
            _check_end(sub, at, flats, where)
            sub, at = sub + 1, 0
        if sub == len(names):
            raise _misfit(where, f"there is no room for {name}")
        names[sub].append(name)
        found.shapes[name] = shape
        shared[sub].put(found, name, shard, at, 0, numel_of(shape))
        at += shard
    _check_end(sub, at, flats, where)
    for group in by_rank[ranks[0]]["optimizer_state_dict"]["param_groups"]:
        mine = [name for index in group["params"] if index < len(names) for name in names[index]]
        found.groups.append({**options_of(group), "params": mine})
    return found


def _check_end(sub: int, at: int, flats: list[list[Stored]], where: str) -> None:
    for flat in flats:
        if flat[sub].numel != at:
            raise _misfit(where, f"sub-group {sub} has {flat[sub].numel} elements on a rank, its parameters need {at}")


def _misfit(where: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: the shapes in the model states do not fit the optimizer's flat tensors: {what}. "
        "Either the files are of different runs, or the optimizer was swapped to NVMe and its tensors lie elsewhere"
    )


def frozen(models: Sequence[Mapping[str, Any]]) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return name -> (shape, elements) of the parameters without gradient, from the model states of all ranks in order."""
    found = {}
    fragments = [model.get("frozen_param_fragments") or {} for model in models]
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        shape = shape_of(shape)
        shard = -(-numel_of(shape) // len(models))
        links = []
        for rank, parts in enumerate(fragments):
            count = max(0, min(shard, numel_of(shape) - rank * shard))
            if count and name in parts and parts[name].numel >= count:
                links.append(Link(whole(parts[name]), 0, count))
        if sum(link.numel for link in links) == numel_of(shape) and name in fragments[0]:
            found[name] = (shape, chained(links or [Link(whole(fragments[0][name]), 0, 0)]))
    return found
