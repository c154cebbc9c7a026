"""No ZeRO: the optimizer's own dictionary with whole tensors, and the wrappers that keep fp32 masters beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from .. import archive, elements
from ..elements import Link, chained
from ..pickles import Stored
from .found import MASTER, Found, numel_of, options_of, split_states, whole
from .matching import Assignment, Candidate, Check, Listed, Poured, Slots, Unmatched, assign

Weights: TypeAlias = "Mapping[str, Stored]"
MayHold: TypeAlias = "Callable[[str, dict[str, Any]], bool]"


def read_whole(optimizer: dict[str, Any], weights: Weights, may_hold: MayHold) -> Found:
    """Find the states of every parameter in an optimizer dictionary without names.

    Args:
        optimizer: what DeepSpeed stored under "optimizer".
        weights: name -> weight in the order of the module, each tied one once; not the buffers.
        may_hold: whether a parameter group (with these options) may hold a parameter of this name.

    A parameter that no group holds is frozen and is not among the result's shapes. If names cannot be told, every state is a
    gap, and all parameters count as trainable.
    """
    base = optimizer.get("optimizer_state_dict", optimizer)
    masters, poured = optimizer.get("fp32_groups"), optimizer.get("fp32_groups_flat")
    groups, states = base["param_groups"], base["state"]
    found = Found(groups=[{**options_of(group), "params": []} for group in groups])
    try:
        assignment, guessed = names_for(optimizer, weights, may_hold)
    except Unmatched as why:
        return _nameless(found, states, weights, str(why), masters is None and poured is None)
    if guessed:
        found.notes.append("the optimizer's states carry numbers; names were given by the usual split into groups with and without decay")
    for index, pairs in enumerate(assignment):
        for name, at in pairs:
            found.shapes[name] = weights[name].shape
            found.groups[index]["params"].append(name)
            if poured is not None:
                _take_poured(found, name, at, poured[index], states.get(groups[index]["params"][0], {}))
            else:
                _take_listed(found, name, weights[name], states.get(groups[index]["params"][at], {}), masters and masters[index][at])
    return found


def names_for(optimizer: dict[str, Any], weights: Weights, may_hold: MayHold) -> tuple[Assignment, bool]:
    """Return which weight stands where in the groups; see `matching.assign`.

    Raises:
        Unmatched: no order of the weights fits, or several do.
    """
    base = optimizer.get("optimizer_state_dict", optimizer)
    masters, poured = optimizer.get("fp32_groups"), optimizer.get("fp32_groups_flat")
    groups, states = base["param_groups"], base["state"]
    slots: list[Slots] = []
    for index, group in enumerate(groups):
        if poured is not None:
            slots.append(Poured(poured[index].numel))
        else:
            slots.append(Listed(tuple(_shapes(states.get(key, {}), masters, index, at) for at, key in enumerate(group["params"]))))
    candidates = [
        Candidate(name, stored.shape, frozenset(index for index, group in enumerate(groups) if may_hold(name, group)))
        for name, stored in weights.items()
    ]
    return assign(slots, candidates, _value_check(masters, poured, weights))


def _shapes(states: Mapping[str, Any], masters: Any, group: int, at: int) -> frozenset[tuple[int, ...]]:
    """Return the shapes that a parameter may have: its master's, or those of its states."""
    if masters is not None:
        return frozenset([tuple(masters[group][at].shape)])
    return frozenset(tensor.shape for _, tensor, _ in split_states(states) if tensor is not None)


def _value_check(masters: Any, poured: Any, weights: Weights) -> Check | None:
    """Return a test whether a master, rounded to the model's dtype, is the weight."""
    if masters is None and poured is None:
        return None
    seen: dict[tuple[int, int, str], bool] = {}

    def same(group: int, at: int, candidate: Candidate) -> bool:
        key = group, at, candidate.name
        if key not in seen:
            weight = archive.read_whole(weights[candidate.name]).flatten()
            flat = elements.read(whole(poured[group]), at, at + weight.numel()) if poured is not None else None
            master = archive.read_whole(masters[group][at]).flatten() if flat is None else flat
            seen[key] = torch.equal(master.to(weight.dtype), weight)
        return seen[key]

    return same


def _take_listed(found: Found, name: str, weight: Stored, states: Mapping[str, Any], master: Stored | None) -> None:
    found.put(name, MASTER, whole(weight if master is None else master))
    found.numbers[name] = {}
    for key, tensor, number in split_states(states):
        if tensor is None:
            assert number is not None
            found.numbers[name][key] = number
            continue
        found.put(name, key, whole(tensor))
        if tensor.shape != weight.shape:
            found.own_shapes[name, key] = tensor.shape


def _take_poured(found: Found, name: str, at: int, flat: Stored, states: Mapping[str, Any]) -> None:
    numel = numel_of(found.shapes[name])
    found.put(name, MASTER, chained([Link(whole(flat), at, numel)]))
    found.numbers[name] = {}
    for key, tensor, number in split_states(states):
        if tensor is None:
            assert number is not None
            found.numbers[name][key] = number
        elif tensor.numel == flat.numel:
            found.put(name, key, chained([Link(whole(tensor), at, numel)]))
        else:
            found.gaps[name, key] = f"it has shape {tuple(tensor.shape)} for a flat group of {flat.numel} elements"


def _nameless(found: Found, states: Mapping[Any, Any], weights: Weights, why: str, weights_are_masters: bool) -> Found:
    """Keep the weights; say of every state why it belongs to nobody."""
    keys = {key for held in states.values() for key, tensor, _ in split_states(held) if tensor is not None}
    for name, weight in weights.items():
        found.shapes[name] = weight.shape
        if weights_are_masters:
            found.put(name, MASTER, whole(weight))
        for key in keys if weights_are_masters else {*keys, MASTER}:
            found.gaps[name, key] = why
    found.notes.append(f"optimizer states cannot be given to parameters: {why}")
    return found


def names_with(stored: Mapping[str, Any], without: Sequence[str]) -> tuple[dict[str, Stored], dict[str, list[str]]]:
    """Return name -> weight with each tied one once, and name -> the other names of the same elements.

    Args:
        stored: a module's state dict, tensors unread.
        without: names that are no parameters (buffers).
    """
    weights: dict[str, Stored] = {}
    aliases: dict[str, list[str]] = {}
    owner: dict[Any, str] = {}
    for name, value in stored.items():
        if not isinstance(value, Stored) or name in without:
            continue
        first = owner.setdefault(value.place, name) if value.numel else name
        if first == name:
            weights[name] = value
        else:
            aliases.setdefault(first, []).append(name)
    return weights, aliases
