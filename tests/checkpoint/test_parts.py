"""The pieces from which sources are built: elements in files, slices of tensor-parallel ranks, names for numbered states."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from stateroom import CheckpointError
from stateroom.checkpoint import archive, elements
from stateroom.checkpoint.deepspeed.experts import Experts
from stateroom.checkpoint.deepspeed.matching import Candidate, Listed, Poured, Unmatched, assign
from stateroom.checkpoint.deepspeed.tensor_parallel import apply, rule_for
from stateroom.checkpoint.elements import Averaged, Chain, Link, Whole, chained, joined

NONE = frozenset([0])


def stored(tmp_path, *tensors: torch.Tensor) -> list[Whole]:
    """The tensors, in one file each."""
    found = []
    for tensor in tensors:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.pt"
        torch.save(tensor.clone(), path)
        found.append(Whole(archive.load(path)))
    return found


def every_interval(whole: elements.Elements, wanted: torch.Tensor) -> None:
    """Random intervals, the empty ones at both ends, and all of it."""
    chance = random.Random(0)
    flat = wanted.flatten()
    assert whole.numel == flat.numel()
    bounds = [(0, 0), (flat.numel(), flat.numel()), (0, flat.numel())]
    bounds += [tuple(sorted(chance.choices(range(flat.numel() + 1), k=2))) for _ in range(30)]
    for start, stop in bounds:
        assert torch.equal(elements.read(whole, start, stop), flat[start:stop])
    assert sum(numel for _, numel in whole.places()) >= 0


def test_intervals_of_intervals(tmp_path):
    a, b = stored(tmp_path, torch.arange(10.0), torch.arange(100.0, 106.0))
    chain = chained([Link(a, 3, 5), Link(b, 0, 6), Link(a, 0, 1)])
    every_interval(chain, torch.cat([torch.arange(3.0, 8.0), torch.arange(100.0, 106.0), torch.zeros(1)]))
    every_interval(chained([Link(chain, 2, 8), Link(b, 5, 1)]), torch.tensor([5.0, 6, 7, 100, 101, 102, 103, 104, 105]))
    assert chained([Link(a, 0, 10)]) is a and isinstance(chain, Chain)
    assert list(chain.places()) == [(a.stored.storage.file, 5), (b.stored.storage.file, 6), (a.stored.storage.file, 1)]


def test_tensors_that_are_not_contiguous_in_their_file(tmp_path):
    torch.save({"t": torch.arange(12.0).view(3, 4).t()[1:]}, tmp_path / "x.pt")
    found = archive.load(tmp_path / "x.pt")["t"]
    assert not found.contiguous
    every_interval(Whole(found), torch.arange(12.0).view(3, 4).t()[1:].contiguous())


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("widths", [((2, 3, 1),), ((1, 1, 2), (3, 0, 1)), ((2, 2, 2), (1, 1, 1), (4, 4, 4))])
def test_slices_joined_along_any_dimension_in_any_widths(dim, widths, tmp_path):
    """Each sub-tensor is cut over all ranks; the whole is the sub-tensors one after another."""
    shape = [3, 2, 4]
    shape[dim] = sum(map(sum, widths))
    whole = torch.rand(shape)
    subs = whole.split([sum(width) for width in widths], dim)
    cut = [sub.split(list(width), dim) for sub, width in zip(subs, widths, strict=True)]
    ranks = [torch.cat([sub[rank] for sub in cut], dim).contiguous() for rank in range(3)]
    parts = stored(tmp_path, *ranks)
    every_interval(joined(parts, [tuple(rank.shape) for rank in ranks], dim, widths), whole)


def test_copies_that_drifted_apart_are_averaged(tmp_path):
    parts = stored(tmp_path, torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0]))
    every_interval(Averaged(tuple(parts)), torch.tensor([2.0, 4.0]))


# ---- rules of tensor parallelism


def merged(tmp_path, info, name, *ranks: torch.Tensor) -> tuple[torch.Tensor, dict]:
    rule = rule_for(name, [tuple(rank.shape) for rank in ranks], info, "here")
    whole = apply(rule, stored(tmp_path, *ranks), "here", name)
    found = elements.read(whole).view(rule.shape)
    if rule.kind != "average":
        every_interval(whole, found)
    return found, dict(rule.tags)


def test_each_kind_of_rule(tmp_path):
    full = torch.rand(6, 4)
    info = {
        "tp_replicated_parameter_patterns": [r".*norm\.weight"],
        "parameter_to_average_patterns": [r".*mean\.weight"],
        "parameter_with_row_parallelism_patterns": [r".*down\.weight"],
        "vocabulary_parameter_patterns": [r"emb\.weight"],
        "parameter_with_2_sub_params_cat_dim_0": [r".*swiglu\.weight"],
        "original_vocab_size": 5,
    }
    assert torch.equal(merged(tmp_path, info, "a.norm.weight", full, full)[0], full)
    assert torch.equal(merged(tmp_path, info, "a.mean.weight", full, full + 2)[0], (full + (full + 2)) / 2)
    by_rows, tags = merged(tmp_path, info, "a.down.weight", full[:, :2], full[:, 2:])
    assert torch.equal(by_rows, full) and tags == {"cat_dim": 1}
    by_columns, tags = merged(tmp_path, info, "a.up.weight", full[:2], full[2:])
    assert torch.equal(by_columns, full) and tags == {"cat_dim": 0}
    vocabulary, tags = merged(tmp_path, info, "emb.weight", full[:3], full[3:])
    assert torch.equal(vocabulary, full[:5]) and tags == {"cat_dim": 0, "vocab_tensor": True}
    halves = [torch.cat([full[0:1], full[3:4]]), torch.cat([full[1:3], full[4:6]])]
    both, tags = merged(tmp_path, info, "a.swiglu.weight", *halves)
    assert torch.equal(both, full) and tags == {"cat_dim": 0, "param_n_sub_params": 2}


def test_fused_tensors_with_and_without_recorded_widths(tmp_path):
    q, k, v = torch.rand(4, 3), torch.rand(2, 3), torch.rand(2, 3)
    full = torch.cat([q, k, v])
    uneven = [torch.cat([q[:3], k[:1], v[:1]]), torch.cat([q[3:], k[1:], v[1:]])]
    described = {"patterns": [r".*qkv"], "shape": ((4, 2, 2), -1), "partition_dim": 0}
    info = {"parameter_with_sub_params": [described], "sub_param_shard_widths": {r".*qkv": [[3, 1], [1, 1], [1, 1]]}}
    found, tags = merged(tmp_path, info, "a.qkv", *uneven)
    assert torch.equal(found, full)
    assert tags["sub_param_shape"] == {"patterns": [r".*qkv"], "shape": ((4, 2, 2), -1), "partition_dim": 0}
    even = [torch.cat([q[:2], k[:1], v[:1]]), torch.cat([q[2:], k[1:], v[1:]])]
    assert torch.equal(merged(tmp_path, {"parameter_with_sub_params": [described]}, "a.qkv", *even)[0], full)
    three = torch.rand(6, 3)
    older = {"parameter_with_sub_params": [{"patterns": [r".*qkv"], "shape": (3, -1), "partition_dim": 0}]}
    found, tags = merged(tmp_path, older, "a.qkv", three[0::2], three[1::2])
    assert torch.equal(found, three) and tags["sub_param_shape"]["shape"] == ((2, 2, 2), -1)


def test_strided_pieces_with_scales(tmp_path):
    full = torch.rand(4, 6)
    entry = {
        "logical_shape": [4, 6],
        "ranks": {
            0: {"shard_shape": [4, 2], "pieces": [{"shape": [4, 2], "source": [0, [6, 1]], "dest": [0, [2, 1]], "locations": [0]}]},
            1: {
                "shard_shape": [4, 4],
                "pieces": [{"shape": [4, 4], "source": [2, [6, 1]], "dest": [0, [4, 1]], "locations": [1], "scale": 0.5}],
            },
        },
    }
    info = {"affine_map": {"version": 1, "params": {r"^a\.w$": entry}}}
    assert torch.equal(merged(tmp_path, info, "a.w", full[:, :2], full[:, 2:] * 0.5)[0], full)
    with pytest.raises(CheckpointError, match="affine map version 2"):
        rule_for("a.w", [(4, 2), (4, 4)], {"affine_map": {**info["affine_map"], "version": 2}}, "here")


def test_what_the_run_could_not_describe_is_refused():
    with pytest.raises(CheckpointError, match=r"a\.w.*cannot be joined: interleaved"):
        rule_for("a.w", [(4, 2)], {"autotp_unsupported_parameter_patterns": {r"^a\.w$": "interleaved"}}, "here")


def test_a_rule_that_does_not_fit_the_slices_is_an_error(tmp_path):
    info = {
        "parameter_with_sub_params": [{"patterns": ["w"], "shape": ((4, 2), 3), "partition_dim": 0}],
        "sub_param_shard_widths": {"w": [[3, 1], [1, 1]]},
    }
    with pytest.raises(CheckpointError, match="a slice of w has 9 elements"):
        merged(tmp_path, info, "w", torch.rand(3, 3), torch.rand(3, 3))


# ---- experts


def test_who_holds_which_experts_in_either_order_of_ranks():
    """Eight ranks, experts over two: rank by rank, or, data parallelism first, the lower and the upper half."""
    layer = "moe.deepspeed_moe.experts.deepspeed_experts."
    for data_first, lower, upper in ((False, (0, 2, 4, 6), (1, 3, 5, 7)), (True, (0, 1, 2, 3), (4, 5, 6, 7))):
        experts = Experts(counts={layer: 4}, by_data_first=data_first, ranks=8)
        first, second = experts.partitions({"moe": True}, 4)
        assert (first.ranks, second.ranks) == (lower, upper)
        assert [part.rename(f"{layer}1.weight") for part in (first, second)] == [f"{layer}1.weight", f"{layer}3.weight"]
        assert [part.ranks for part in experts.partitions({}, 8)] == [tuple(range(8))]


# ---- names for numbered states


def named(*shapes: tuple[int, ...], groups: frozenset[int] = NONE) -> list[Candidate]:
    return [Candidate(f"p{index}", shape, groups) for index, shape in enumerate(shapes)]


def exact(*shapes: tuple[int, ...] | None) -> Listed:
    return Listed(tuple(frozenset() if shape is None else frozenset([shape]) for shape in shapes))


def test_one_group_in_module_order():
    (pairs,), guessed = assign([exact((2, 3), (3,), None, (3,))], named((2, 3), (3,), (5, 5), (3,)))
    assert pairs == (("p0", 0), ("p1", 1), ("p2", 2), ("p3", 3)) and not guessed


def test_two_groups_and_a_frozen_parameter():
    candidates = named((2, 3), (3,), (9, 9), (3, 2), (2,), groups=frozenset([0, 1]))
    (matrices, vectors), _ = assign([exact((2, 3), (3, 2)), exact((3,), (2,))], candidates)
    assert [name for name, _ in matrices] == ["p0", "p3"] and [name for name, _ in vectors] == ["p1", "p4"]


def test_flat_groups_are_cut_where_they_fit():
    candidates = named((2, 3), (4,), (3, 3), (5,), groups=frozenset([0, 1]))
    (first, second), _ = assign([Poured(11), Poured(13)], candidates)
    assert first == (("p0", 0), ("p3", 6)) and second == (("p1", 0), ("p2", 4))


def test_what_cannot_be_told_is_not_guessed():
    with pytest.raises(Unmatched, match="more than one order fits"):
        assign([exact((3,))], named((3,), (3,)))
    with pytest.raises(Unmatched, match="no order"):
        assign([exact((3,), (4,))], named((4,), (3,)))


def test_values_decide_where_shapes_do_not():
    (pairs,), guessed = assign([exact((3,))], named((3,), (3,)), lambda group, at, candidate: candidate.name == "p1")
    assert pairs == (("p1", 0),) and not guessed


def test_the_usual_split_decides_last_and_says_so():
    names = ["a.weight", "a.bias", "norm.weight", "norm.bias"]
    candidates = [Candidate(name, (4,), frozenset([0, 1])) for name in names]
    with pytest.raises(Unmatched):
        assign(
            [exact((4,), (4,)), exact((4,), (4,))],
            [*candidates[:2], Candidate("x", (4,), frozenset([0, 1])), Candidate("y", (4,), frozenset([0, 1]))],
        )
    (first, second), guessed = assign([exact((4,)), exact((4,), (4,), (4,))], candidates)
    assert guessed and [name for name, _ in first] == ["a.weight"] and [name for name, _ in second] == names[1:]


def test_ten_thousand_parameters_are_matched_quickly():
    shapes = [(8, 8), (8,), (8, 32), (32,)] * 2500
    (pairs,), _ = assign([exact(*shapes)], named(*shapes))
    assert [name for name, _ in pairs] == [f"p{index}" for index in range(10_000)]
    assert all(a[1] + 1 == b[1] for a, b in pairwise(pairs))
