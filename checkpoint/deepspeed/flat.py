"""ZeRO-1 and 2, and DeepSpeed's BF16 optimizer: each parameter group is one flat tensor, cut evenly over ranks.

The order in that tensor is the one of `param_shapes`. The table of fragments that lies beside it
(`param_slice_mappings`) is only used where there are no shapes: with `round_robin_gradients` it describes an order
that the flat tensor does not have (seen with DeepSpeed 0.19.8).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import CheckpointError
from ..elements import Link, chained
from ..pickles import Inert
from .found import MASTER, Found, numel_of, options_of, shape_of, split_states, whole
from .spread import Shared

Renaming = Callable[[str], str]


@dataclass(frozen=True)
class Partition:
    """The ranks over which a group is cut, in order, and how the names that they use are called in the whole model."""

    ranks: tuple[int, ...]
    rename: Renaming


def read_flat(
    by_rank: Mapping[int, dict[str, Any]],
    shapes: Sequence[Mapping[str, Any]],
    partitions: Callable[[int], list[Partition]],
    where: str,
) -> Found:
    """Find every parameter in the flat partitions of the ranks.

    Args:
        by_rank: data-parallel rank -> inner optimizer dictionary.
        shapes: for each group, name -> shape in the order of the flat tensor.
        partitions: group index -> the sets of ranks that each hold a whole copy of their own parameters.
        where: the folder, for messages.

    Raises:
        CheckpointError: the flat tensors are shorter than the shapes need.
    """
    found = Found()
    first = by_rank[min(by_rank)]
    for index, named in enumerate(shapes):
        group = {**_options(first, index), "params": []}
        for partition in partitions(index):
            part = _Group(index, by_rank, partition, _paddings(first, "param_alignment_paddings", index, len(named)), where)
            sizes = {partition.rename(name): shape_of(shape) for name, shape in named.items()}
            part.place(sizes, found)
            group["params"].extend(sizes)
        found.groups.append(group)
    return found


class _Group:
    """One parameter group on the ranks that share it."""

    def __init__(self, index: int, by_rank: Mapping[int, dict[str, Any]], partition: Partition, aligned: list[int], where: str) -> None:
        self.index, self.aligned, self.where = index, aligned, where
        head = by_rank[partition.ranks[0]]
        masters = [by_rank[rank]["single_partition_of_fp32_groups"][index] for rank in partition.ranks]
        padding = head.get("group_paddings")
        length = masters[0].numel
        if padding and head.get("zero_stage"):  # the BF16 optimizer names its padding but leaves it in
            length += padding[index]
        states = [_states(by_rank[rank], index) for rank in partition.ranks]
        self.shared = Shared(masters, states, length, partition.ranks, f"group {index}")

    def place(self, sizes: Mapping[str, tuple[int, ...]], found: Found) -> None:
        """Cut the flat tensor into the parameters."""
        needed = sum(map(numel_of, sizes.values())) + sum(self.aligned[:-1])
        length, ranks = self.shared.length, len(self.shared.ranks)
        if needed > length * ranks:
            raise CheckpointError(
                f"{self.where}: parameter group {self.index} needs {needed} elements, its {ranks} rank(s) hold {length} each: "
                "the model states and the optimizer states are of different runs, or a rank's file is of another run"
            )
        at = 0
        for (name, shape), gap in zip(sizes.items(), self.aligned, strict=True):
            found.shapes[name] = shape
            self.shared.put(found, name, length, 0, at, numel_of(shape))
            at += numel_of(shape) + gap


def read_fragments(state: dict[str, Any], shape_of_name: Callable[[str], tuple[int, ...] | None]) -> Found:
    """Find parameters by the table of fragments: for a rank 0 whose file names no shapes (pipelines without ZeRO in bf16).

    DeepSpeed writes only this one rank of what it has cut over all of them: what lay on the others is lost, and is
    reported as a gap.
    """
    found = Found()
    ranks = state["partition_count"]
    for index, fragments in enumerate(state["param_slice_mappings"]):
        master, states = state["single_partition_of_fp32_groups"][index], _states(state, index)
        tensors = {MASTER: master, **{key: tensor for key, tensor, _ in split_states(states) if tensor is not None}}
        if (ranks[index] if isinstance(ranks, (list, tuple)) else ranks) != 1:
            found.lost = "DeepSpeed saved only data-parallel rank 0 of an optimizer that is cut over all ranks"
        for name, address in fragments.items():
            start, count = _address(address)
            shape = shape_of_name(name)
            found.shapes[name] = (count,) if shape is None else shape
            found.numbers[name] = {key: number for key, _, number in split_states(states) if number is not None}
            for key, tensor in tensors.items():
                if shape is None:
                    found.gaps[name, key] = "the files do not tell the shape of this parameter"
                elif count == numel_of(shape) and tensor.numel >= start + count:
                    found.put(name, key, chained([Link(whole(tensor), start, count)]))
                else:
                    found.gaps[name, key] = found.lost or f"its fragment has {count} of {numel_of(shape)} elements"
        found.groups.append({**_options(state, index), "params": list(fragments)})
    if found.lost:
        found.notes.append(f"{found.lost}; masters and optimizer states of the parameters on other ranks are not there")
    return found


def _address(address: Any) -> tuple[int, int]:
    if isinstance(address, Inert):
        values = (address.get("start"), address.get("numel")) if address.state else tuple(reversed(address.args))
        return int(values[0]), int(values[1])
    raise CheckpointError(f"a fragment of kind {type(address).__name__} in param_slice_mappings is not known; the file is damaged or newer")


def _states(state: dict[str, Any], index: int) -> dict[str, Any]:
    """Return the base optimizer's states of a group; with `elastic_checkpoint` they are a plain list."""
    base = state["base_optimizer_state"]
    if isinstance(base, list):
        return dict(base[index]) if index < len(base) else {}
    groups = base["param_groups"]
    key = groups[index]["params"][0] if index < len(groups) and groups[index]["params"] else index
    return dict(base["state"].get(key, {}))


def _options(state: dict[str, Any], index: int) -> dict[str, Any]:
    base = state["base_optimizer_state"]
    if isinstance(base, list) or index >= len(base["param_groups"]):
        return {}
    return options_of(base["param_groups"][index])


def _paddings(state: dict[str, Any], key: str, index: int, count: int) -> list[int]:
    """Return how many elements are left free after each parameter of a group."""
    listed = state.get(key)
    return list(listed[index]) if listed else [0] * count
