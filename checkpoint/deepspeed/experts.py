"""Mixture-of-experts layers: every rank calls its experts 0, 1, ...; here they get their numbers in the whole model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import CheckpointError
from ..pickles import Stored
from .files import Files, load
from .flat import Partition

EXPERT = re.compile(r"^(.*deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..+)$")


@dataclass
class Experts:
    """The expert layers of a checkpoint, by the part of their parameters' names before the expert's number."""

    counts: dict[str, int] = field(default_factory=dict)
    weights: dict[str, Stored] = field(default_factory=dict)  # under whole-model names, in the order of layers and experts
    by_data_first: bool = False
    ranks: int = 1

    def __bool__(self) -> bool:
        return bool(self.counts)

    def partitions(self, options: Mapping[str, Any], partition_count: int) -> list[Partition]:
        """Return who holds a parameter group: all ranks for dense ones, one set of ranks for each slice of the experts."""
        if not options.get("moe"):
            return [Partition(tuple(range(self.ranks)), str)]
        size = self.ranks // partition_count
        return [Partition(self._holders(rank, size, partition_count), self.renaming(rank, size)) for rank in range(size)]

    def _holders(self, expert_rank: int, size: int, copies: int) -> tuple[int, ...]:
        """Return the data-parallel ranks that hold the same experts, in the order of their partitions."""
        if self.by_data_first:
            return tuple(expert_rank * copies + copy for copy in range(copies))
        return tuple(expert_rank + copy * size for copy in range(copies))

    def renaming(self, expert_rank: int, size: int) -> Any:
        """Return a function from a rank's own name of an expert's parameter to the one in the whole model."""

        def rename(name: str) -> str:
            match = EXPERT.match(name)
            if match is None or match[1] not in self.counts:
                return name
            return f"{match[1]}{expert_rank * (self.counts[match[1]] // size) + int(match[2])}{match[3]}"

        return rename

    def is_expert(self, name: str) -> bool:
        """Whether a name is one of an expert's parameters."""
        match = EXPERT.match(name)
        return match is not None and match[1] in self.counts

    def local(self, expert_rank: int, size: int) -> dict[str, Stored]:
        """Return the experts' weights that one expert-parallel rank holds."""
        held = {}
        for name, stored in self.weights.items():
            match = EXPERT.match(name)
            assert match is not None
            if int(match[2]) // (self.counts[match[1]] // size) == expert_rank:
                held[name] = stored
        return held


def find_experts(files: Files, model: Mapping[str, Any], ranks: int, inert: tuple[str, ...]) -> Experts:
    """Read which experts there are.

    Raises:
        CheckpointError: an expert's file is missing, or the experts are fused into one tensor (AutoEP).
    """
    found = Experts(by_data_first=bool((model.get("ds_config") or {}).get("use_data_before_expert_parallelism")), ranks=ranks)
    if model.get("ds_autoep_layers") or model.get("autoep_layers"):
        raise CheckpointError(
            f"{files.folder} holds experts that DeepSpeed's AutoEP has fused; this version does not read them. "
            "Save the model with engine.save_16bit_model() there and load its weights"
        )
    for layer in sorted({layer for layer, _, _ in files.experts}):
        numbers = sorted(expert for at, expert, mp in files.experts if at == layer and mp == 0)
        for expert in range(_count(model, layer, numbers)):
            for name, stored in load(files.need("experts", (layer, expert, 0)), inert).items():
                match = EXPERT.match(name)
                if match is not None and isinstance(stored, Stored):
                    found.weights[name] = stored
                    found.counts[match[1]] = max(found.counts.get(match[1], 0), int(match[2]) + 1)
    return found


def expert_ranks(optimizer: Mapping[str, Any]) -> int:
    """Return over how many ranks the experts of an optimizer without ZeRO are spread: its groups' names tell."""
    base = optimizer.get("optimizer_state_dict", optimizer)
    sizes = [re.search(r"ep_size_(\d+)", str(group.get("name"))) for group in base["param_groups"] if group.get("moe")]
    return max((int(match[1]) for match in sizes if match is not None), default=1)


def _count(model: Mapping[str, Any], layer: int, numbers: list[int]) -> int:
    listed = model.get("num_experts")
    if isinstance(listed, (list, tuple)) and layer < len(listed):
        return int(listed[layer])
    return numbers[-1] + 1
