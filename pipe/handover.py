"""Layers that change their stage after they were built: their values and flags go along."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..parallel.collectives import Collectives


def hand_over(
    comm: Collectives,
    ranks: Sequence[Sequence[int]],
    before: Mapping[str, Sequence[int]],
    after: Mapping[str, Sequence[int]],
    old: Mapping[str, nn.Module],
    new: Mapping[str, nn.Module],
) -> None:
    """Give layers that were built again on another stage what the script has made of them since; every rank must call it.

    Args:
        comm: over all ranks. ranks: [stage][copy]. before, after: layer -> stages that held it, and that hold it now.
        old, new: the layers of this rank, then and now.
    """
    moved = [name for name in sorted(after) if any(stage not in before[name] for stage in after[name])]
    sources = {name: ranks[before[name][0]][0] for name in moved}
    told: dict[str, list[Any]] = {}
    for facts in comm.gather_objects({name: list(_facts(old[name])) for name in moved if sources[name] == comm.rank}):
        told.update(facts)
    for name in moved:
        targets = dict(_tensors(new[name])) if name in new and name not in old else {}
        origin = dict(_tensors(old[name])) if sources[name] == comm.rank else {}
        for key, shape, dtype, wants_grad in told[name]:
            value = origin[key].detach() if origin else torch.empty(shape, dtype=dtype, device=comm.device)
            value = value.to(comm.device)
            comm.broadcast(value, state="setup", unit=name, source=sources[name])
            if key in targets:
                with torch.no_grad():
                    targets[key].copy_(value)
                targets[key].requires_grad_(wants_grad)


def gathered(comm: Collectives, leaders: Sequence[int], state: Mapping[str, torch.Tensor], *, everywhere: bool) -> dict[str, torch.Tensor]:
    """Return the tensors of all leaders by name in host memory, of rank 0 or of every rank; an empty dict elsewhere.

    One tensor is on its way at a time. A name that several leaders have is taken from the first. Every rank must call it.
    """
    told = comm.gather_objects([(key, tuple(value.shape), value.dtype) for key, value in state.items()])
    found: dict[str, torch.Tensor] = {}
    seen: set[str] = set()
    for leader in leaders:
        for key, shape, dtype in told[leader]:
            if key in seen:
                continue
            seen.add(key)
            value = state[key].to(comm.device) if comm.rank == leader else torch.empty(shape, dtype=dtype, device=comm.device)
            comm.broadcast(value, state="reading", unit=key, source=leader)
            if comm.rank == 0 or everywhere:
                found[key] = value.cpu()
    return found


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _facts(module: nn.Module) -> Iterator[tuple[str, tuple[int, ...], torch.dtype, bool]]:
    for key, tensor in _tensors(module):
        if not tensor.is_meta:
            yield key, tuple(tensor.shape), tensor.dtype, tensor.requires_grad
