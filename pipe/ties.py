"""Weights that several stages use: one set of values, gradients summed over the stages, counted once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import LayoutError
from ..parallel.collectives import Collectives
from ..zero.unit import Unit


@dataclass(frozen=True)
class Tie:
    """Parameters that are one to the model and live on several stages.

    Attributes:
        name: of the tie. stages: those that use it, in order; the first one owns it: it initialises, counts and saves.
        params: (name that the owner has for it, parameter) on this stage; empty on a stage that does not use it.
    """

    name: str
    stages: tuple[int, ...]
    params: list[tuple[str, nn.Parameter]] = field(default_factory=list)


class Ties:
    """Keeps tied weights equal, for the units that hold them.

    The units of a tie have the same layout on every stage that uses it, so the ranks with the same place among the stages'
    data-parallel ranks own the same elements: they sum what they own after the reduction over data-parallel ranks, at any
    ZeRO stage.

    Args:
        ties: the same, in the same order, on every rank. ranks: [stage][copy] -> global rank.
    """

    def __init__(self, ties: Sequence[Tie], ranks: Sequence[Sequence[int]], stage: int, device: torch.device) -> None:
        self.ties = [tie for tie in ties if len(tie.stages) > 1]
        self._stage = stage
        self._rank = dist.get_rank()
        self._groups: list[Any] = []
        self._comms: dict[str, Collectives] = {}
        made: dict[tuple[int, ...], Collectives] = {}
        for tie in self.ties:
            for copy in range(len(ranks[0])):
                members = tuple(ranks[user][copy] for user in tie.stages)
                if members not in made:
                    group = dist.new_group(list(members))
                    if self._rank in members:
                        self._groups.append(group)
                        made[members] = Collectives(group, device)
                    else:
                        made[members] = None  # type: ignore[assignment]
                if self._rank in members:
                    self._comms[tie.name] = made[members]
        self._units: list[tuple[Tie, Unit]] = []

    @property
    def apart(self) -> dict[int, str]:
        """id of a tied parameter on this stage -> name of its tie."""
        return {id(param): tie.name for tie in self.ties for _, param in tie.params}

    def take_units(self, units: Sequence[Unit], replaced: Mapping[int, nn.Parameter]) -> None:
        """Find the units that hold tied parameters and give them the owner's values; elsewhere they are copies.

        Args:
            replaced: id of a parameter as it was -> the one that took its place.

        Raises:
            LayoutError: a tied parameter is not the same on another stage.
        """
        for tie in self.ties:
            names = {id(replaced.get(id(param), param)): name for name, param in tie.params}
            for unit in units:
                if any(id(slot.param) in names for slot in unit.slots):
                    self._take(tie, unit, [(names[id(slot.param)], tuple(slot.shape)) for slot in unit.slots])

    def _take(self, tie: Tie, unit: Unit, held: list[Any]) -> None:
        seen = self._comms[tie.name].gather_objects((held, str(unit.dtype), unit.trainable))
        if any(other != seen[0] for other in seen):
            raise LayoutError(
                f"what is tied as {tie.name!r} is not the same on the stages that use it: {dict(zip(tie.stages, seen, strict=True))}"
            )
        unit.is_copy = tie.stages[0] != self._stage
        self._comms[tie.name].broadcast(unit.shard if unit.sharded else unit.full, state="parameters", unit=tie.name)
        unit.acknowledge()
        self._units.append((tie, unit))

    def share(self, units: Sequence[Unit], touched: list[bytes]) -> list[bytes]:
        """Sum reduced gradients over the stages of each tie, and say which parameters got one on any of them.

        Args:
            units: those of the optimizer; `touched` has one row for each.
        """
        place = {id(unit): index for index, unit in enumerate(units)}
        touched = list(touched)
        for tie, unit in self._units:
            if unit.gradients is None:
                continue
            comm, owned = self._comms[tie.name], unit.gradients.owned
            assert owned is not None
            row = torch.frombuffer(bytearray(touched[place[id(unit)]]), dtype=torch.uint8).to(torch.int32).to(comm.device)
            touched[place[id(unit)]] = (comm.sum_(row) > 0).to(torch.uint8).cpu().numpy().tobytes()
            share = owned.numel() // comm.world
            bounds = [share * rank for rank in range(comm.world)] + [owned.numel()]
            comm.all_reduce(owned, bounds, state="gradients", unit=tie.name).wait()
        return touched

    def close(self) -> None:
        """Let the groups go."""
        for comm in {id(comm): comm for comm in self._comms.values()}.values():
            comm.close()
        for group in self._groups:
            if dist.is_initialized():
                dist.destroy_process_group(group)
        self._comms, self._groups, self._units = {}, [], []
