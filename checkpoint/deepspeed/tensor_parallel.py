"""One tensor out of the slices of the tensor-parallel ranks, by the rules that the run has left in its checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import CheckpointError
from .. import elements
from ..elements import Averaged, Elements, Link, chained, joined
from .found import MASTER, Found, numel_of, shape_of

Shape = tuple[int, ...]
NEWEST_AFFINE_MAP = 1
NEWEST_RULES = 0.4


@dataclass(frozen=True)
class Rule:
    """How a parameter's slices become the whole, and what a universal file says about it beside the tensor.

    `kind` is replicated, average, affine or join; `affine` is the entry of the map, `widths` as in `elements.joined`.
    """

    kind: str
    shape: Shape
    dim: int = 0
    widths: tuple[tuple[int, ...], ...] = ()
    view: tuple[Shape, ...] = ()
    affine: Any = None
    tags: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Piece:
    """A block: where its elements go in the whole and where they come from in a slice, which holds them times `scale`."""

    shape: Shape
    into: int
    into_strides: Shape
    out_of: int
    out_of_strides: Shape
    scale: float


@dataclass(frozen=True)
class Affine:
    """A tensor rebuilt from strided pieces of the ranks' slices; each piece may be scaled."""

    parts: tuple[Elements, ...]
    size: int
    pieces: tuple[tuple[int, Piece], ...]  # (rank, piece)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.size

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first slice."""
        return self.parts[0].dtype

    def fill(self, out: torch.Tensor, start: int) -> None:
        """Write the elements from `start` on into `out`; the pieces have any form, so all of them are read."""
        full = torch.empty(self.size, dtype=self.dtype)
        slices = [elements.read(part) for part in self.parts]
        for rank, piece in self.pieces:
            block = slices[rank].as_strided(piece.shape, piece.out_of_strides, piece.out_of)
            full.as_strided(piece.shape, piece.into_strides, piece.into).copy_(block / piece.scale if piece.scale != 1.0 else block)
        out.copy_(full[start : start + out.numel()])

    def places(self) -> Iterator[tuple[str, int]]:
        """Yield (file, number of elements in it) of each slice."""
        for part in self.parts:
            yield from part.places()


def merge(by_rank: Sequence[Found], info: Mapping[str, Any] | None, where: str) -> tuple[Found, dict[str, Rule]]:
    """Return what all tensor-parallel ranks hold together, and the rule for each parameter.

    Args:
        by_rank: what each rank holds; the shapes are those of its slices.
        info: `universal_checkpoint_info`, the rules.
        where: the folder, for messages.

    Raises:
        CheckpointError: there are no rules, or they do not fit the slices.
    """
    if len(by_rank) == 1:
        return by_rank[0], {}
    if not info:
        raise CheckpointError(
            f"{where} was written with tensor parallelism over {len(by_rank)} ranks and does not say how its parameters were cut "
            "(`universal_checkpoint_info` is missing from the model states): add it to the client state of the run that saves, as "
            "DeepSpeed's universal checkpoints ask for"
        )
    version = info.get("universal_checkpoint_version", 0.0)
    if version > NEWEST_RULES:
        raise CheckpointError(
            f"{where} describes how its parameters were cut by rules of version {version}; version {NEWEST_RULES} is the newest known "
            "here: a newer Stateroom is needed"
        )
    merged, rules = Found(groups=by_rank[0].groups, notes=by_rank[0].notes, numbers=by_rank[0].numbers), {}
    for name in by_rank[0].shapes:
        rule = rule_for(name, [found.shapes[name] for found in by_rank], info, where)
        rules[name] = rule
        merged.shapes[name] = rule.shape
        for state in by_rank[0].where.get(name, {}):
            parts = [found.where.get(name, {}).get(state) for found in by_rank]
            if any(part is None for part in parts):
                merged.gaps[name, state] = "not every tensor-parallel rank has it"
            elif rule.affine is not None and state != MASTER and any(piece.scale != 1.0 for _, piece in _pieces(rule.affine)):
                merged.gaps[name, state] = "its parameter was scaled on the ranks, and optimizer states do not scale with it"
            else:
                merged.put(name, state, apply(rule, [part for part in parts if part is not None], where, name))
    for found in by_rank:
        merged.gaps.update(found.gaps)
    return merged, rules


def apply(rule: Rule, parts: Sequence[Elements], where: str, name: str) -> Elements:
    """Return the whole that a rule makes of the slices of one state."""
    if rule.kind == "replicated":
        return parts[0]
    if rule.kind == "average":
        return Averaged(tuple(parts))
    if rule.kind == "affine":
        return Affine(tuple(parts), numel_of(rule.shape), tuple(_pieces(rule.affine)))
    for part, shape in zip(parts, rule.view, strict=True):
        if part.numel != numel_of(shape):
            raise CheckpointError(f"{where}: a slice of {name} has {part.numel} elements where its rule describes shape {shape}")
    whole = joined(parts, rule.view, rule.dim, rule.widths)
    wanted = numel_of(rule.shape)  # fewer when rows of padding were added to a vocabulary
    return whole if whole.numel == wanted else chained([Link(whole, 0, wanted)])


def rule_for(name: str, shapes: Sequence[Shape], info: Mapping[str, Any], where: str) -> Rule:
    """Return how the slices of one parameter become the whole.

    Raises:
        CheckpointError: several rules of a kind match its name, or the run said that it cannot be described.
    """
    for pattern, reason in (info.get("autotp_unsupported_parameter_patterns") or {}).items():
        if re.match(pattern, name):
            raise CheckpointError(f"{where}: the run that wrote this says of {name} that its slices cannot be joined: {reason}")
    entry = _affine_entry(name, info, where)
    if entry is not None:
        return Rule("affine", shape_of(entry["logical_shape"]), affine=entry)
    if _matches(info, "tp_replicated_parameter_patterns", name):
        return Rule("replicated", shapes[0])
    if _matches(info, "parameter_to_average_patterns", name):
        return Rule("average", shapes[0])
    tags: dict[str, Any] = {}
    if _matches(info, "parameter_with_2_sub_params_cat_dim_0", name):
        # the first of two halves is the larger one where a slice has an odd number of rows, as torch.chunk cuts
        halves = [(-(-shape[0] // 2), shape[0] // 2) for shape in shapes]
        dim, view, tags = 0, list(shapes), {"cat_dim": 0, "param_n_sub_params": 2}
        widths = [tuple(half[0] for half in halves), tuple(half[1] for half in halves)]
    elif sub := _sub_params(info, name):
        dim, view, widths, described = _cut_by_sub_params(name, sub, shapes, info, where)
        tags = {"sub_param_shape": described}
    else:
        dim = 1 if _matches(info, "parameter_with_row_parallelism_patterns", name) else 0
        view, widths, tags = list(shapes), [tuple(shape[dim] for shape in shapes)], {"cat_dim": dim}
    shape = (*view[0][:dim], sum(map(sum, widths)), *view[0][dim + 1 :])
    if _matches(info, "vocabulary_parameter_patterns", name):
        shape = (min(int(info["original_vocab_size"]), shape[0]), *shape[1:])
        tags["vocab_tensor"] = True
    return Rule("join", shape, dim, tuple(widths), tuple(view), tags=tuple(tags.items()))


def _matches(info: Mapping[str, Any], key: str, name: str) -> bool:
    return any(re.match(pattern, name) for pattern in info.get(key) or [])


def _affine_entry(name: str, info: Mapping[str, Any], where: str) -> Any:
    table = info.get("affine_map") or {}
    if table.get("version", NEWEST_AFFINE_MAP) > NEWEST_AFFINE_MAP:
        raise CheckpointError(
            f"{where} describes its slices in a newer way (affine map version {table['version']}); a newer Stateroom is needed"
        )
    return next((entry for pattern, entry in (table.get("params") or {}).items() if re.match(pattern, name)), None)


def _pieces(entry: Any) -> list[tuple[int, Piece]]:
    """Return (rank, piece); what several ranks hold is taken from the first."""
    found: list[tuple[int, Piece]] = []
    seen = set()
    for rank, held in sorted(entry["ranks"].items(), key=lambda pair: int(pair[0])):
        for piece in held["pieces"]:
            (into, into_strides), (out_of, out_of_strides) = piece["source"], piece["dest"]
            key = into, tuple(into_strides), tuple(piece["shape"])
            if key not in seen:
                seen.add(key)
                found.append(
                    (int(rank), Piece(tuple(piece["shape"]), into, key[1], out_of, tuple(out_of_strides), piece.get("scale", 1.0)))
                )
    return found


def _sub_params(info: Mapping[str, Any], name: str) -> tuple[str, Mapping[str, Any]] | None:
    for described in info.get("parameter_with_sub_params") or []:
        for pattern in described["patterns"]:
            if re.match(pattern, name):
                return pattern, described
    return None


def _cut_by_sub_params(
    name: str, sub: tuple[str, Mapping[str, Any]], shapes: Sequence[Shape], info: Mapping[str, Any], where: str
) -> tuple[int, list[Shape], list[tuple[int, ...]], dict[str, Any]]:
    """Return dimension, the ranks' shapes, widths and the description for a tensor that is several tensors in one.

    Before version 0.4 no widths were recorded, every sub-tensor was cut evenly, and a plain number along the dimension said
    how many there are.
    """
    pattern, described = sub
    dim, ranks = int(described["partition_dim"]), len(shapes)
    sizes = described["shape"][dim]
    recorded = (info.get("sub_param_shard_widths") or {}).get(pattern)
    if recorded is None:
        if not isinstance(sizes, (tuple, list)):
            total = sum(shape[dim] for shape in shapes)
            sizes = (total // sizes,) * sizes if sizes > 0 and total % sizes == 0 else (total,)
        if any(size % ranks for size in sizes):
            raise CheckpointError(
                f"{where}: {name} consists of sub-tensors of sizes {tuple(sizes)}, which do not divide over {ranks} ranks"
            )
        recorded = [[size // ranks] * ranks for size in sizes]
    widths = [tuple(int(width) for width in row) for row in recorded]
    logical = [sum(size) if isinstance(size, (tuple, list)) else int(size) for size in described["shape"]]
    logical[dim] = sum(map(sum, widths))
    known = 1
    for size in logical:
        known *= size if size > 0 else 1
    total = sum(map(numel_of, shapes))
    logical = [size if size > 0 else total // known for size in logical]
    view = [(*logical[:dim], sum(row[rank] for row in widths), *logical[dim + 1 :]) for rank in range(ranks)]
    whole = list(described["shape"])
    whole[dim] = tuple(map(sum, widths))
    return dim, view, widths, {"patterns": list(described["patterns"]), "shape": tuple(whole), "partition_dim": dim}
