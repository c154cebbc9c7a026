"""Cuts of a list of layers: nothing lost, nothing empty, and the largest part as light as any cut allows."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from stateroom.errors import ConfigError
from stateroom.ledger.pipeline.partition import balanced, by_type, explicit, lightest, uniform
from stateroom.pipe import LayerSpec, PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology, TiedLayerSpec
from stateroom.pipe.specs import outline
from stateroom.pipe.topology import Grid
from stateroom.pipe.weigh import weigh
from torch import nn


def sizes(bounds):
    return [high - low for low, high in itertools.pairwise(bounds)]


def heaviest(weights, bounds):
    return max(sum(weights[low:high]) for low, high in itertools.pairwise(bounds))


def brute_force(weights, parts):
    count = len(weights)
    return min(heaviest(weights, (0, *cut, count)) for cut in itertools.combinations(range(1, count), parts - 1))


@pytest.mark.parametrize("seed", range(40))
def test_parameters_is_optimal(seed):
    made = random.Random(seed)
    for _ in range(25):
        count = made.randint(1, 10)
        parts = made.randint(1, count)
        weights = [made.choice((0, 1, 1, 2, 5, 9, 30)) for _ in range(count)]
        bounds = balanced(weights, parts)
        assert bounds[0] == 0 and bounds[-1] == count and min(sizes(bounds)) >= 1
        assert heaviest(weights, bounds) == brute_force(weights, parts)


def test_a_greedy_cut_would_not_pass():
    """Negative control: filling each part up to the mean is what the property test must tell from the optimum."""
    weights, parts = [5, 5, 1, 9, 1, 5], 3
    mean, bounds, held = sum(weights) / parts, [0], 0
    for number, weight in enumerate(weights):
        if held and held + weight > mean and len(bounds) < parts:
            bounds.append(number)
            held = 0
        held += weight
    assert heaviest(weights, [*bounds, len(weights)]) > brute_force(weights, parts)


@pytest.mark.parametrize(("weights", "parts", "best"), [([1] * 5, 4, 2), ([8, 1, 1, 1, 1, 8], 3, 8), ([0, 0, 1, 1, 1, 1, 0], 3, 2)])
def test_c39_by_weight(weights, parts, best):
    assert heaviest(weights, balanced(weights, parts)) == best


@pytest.mark.parametrize(("layers", "parts"), [(38, 8), (10, 3), (5, 4), (3, 3), (7, 1)])
def test_c39_uniform(layers, parts):
    found = sizes(uniform(layers, parts))
    assert sum(found) == layers and max(found) - min(found) <= 1 and min(found) >= 1


def test_fewer_layers_than_parts_names_both():
    for call in (lambda: uniform(2, 3), lambda: balanced([1, 1], 3), lambda: explicit([1, 1], 2, 3)):
        with pytest.raises(ConfigError, match="2 layers cannot be cut into 3 parts"):
            call()


def test_by_type_shares_out_what_matches():
    names = ["Embedding", "Block", "Block", "Block", "Block", "Norm", "Head"]
    bounds = by_type(names, "block", 2)
    assert [sum(name == "Block" for name in names[low:high]) for low, high in itertools.pairwise(bounds)] == [2, 2]
    with pytest.raises(ConfigError, match="matches none of the layers: Embedding, Block, Norm, Head"):
        by_type(names, "attention", 2)
    with pytest.raises(ConfigError, match="unterminated"):
        by_type(names, "(", 2)


@pytest.mark.parametrize(("given", "bounds"), [([3, 4], [0, 3, 7]), ([0, 5, 7], [0, 5, 7])])
def test_explicit_cuts(given, bounds):
    assert explicit(given, 7, 2) == bounds
    for bad in ([3, 5], [0, 7, 7], [1, 5, 7], [7]):
        with pytest.raises(ConfigError, match="does not cut 7 layers into 2 parts"):
            explicit(bad, 7, 2)


def test_a_cost_that_depends_on_the_part():
    """The first part pays double: it gets fewer layers."""
    bounds = lightest(lambda part, start, stop: (2 if part == 0 else 1) * (stop - start), 9, 2)
    assert bounds == [0, 3, 9]


def test_weights_of_layers_are_counted_and_measured():
    layers = [LayerSpec(nn.Embedding, 100, 8), LayerSpec(nn.Linear, 8, 16), torch.relu, nn.Linear(16, 4)]
    state = torch.get_rng_state()
    outlines = [outline(layer) for layer in layers]
    assert torch.equal(torch.get_rng_state(), state) and outlines[0].weight.is_meta
    assert [found.parameters for found in weigh(layers, outlines)] == [800, 8 * 16 + 16, 0, 16 * 4 + 4]
    measured = weigh(layers, outlines, torch.zeros(3, 5, dtype=torch.long))
    assert [found.flops for found in measured] == [0, 2 * 15 * 8 * 16, 0, 2 * 15 * 16 * 4]
    assert measured[1].activation_bytes == 15 * 8 * 4 and measured[3].activation_bytes == 15 * 16 * 4
    with pytest.raises(ConfigError, match=r"layer 1 \(Linear\) cannot be weighed"):
        weigh(layers, [outlines[0], nn.Linear(9, 9), *outlines[2:]], torch.zeros(3, 5, dtype=torch.long))


def test_specs_refuse_what_they_cannot_build():
    for call, part in (
        (lambda: LayerSpec("Linear"), "takes a class"),
        (lambda: TiedLayerSpec("a.b", nn.Linear, 2, 2), "without dots"),
        (lambda: TiedLayerSpec("a", nn.Linear, 2, 2, tied_weight_attr="kernel").check(nn.Linear(2, 2)), "has no parameter 'kernel'"),
    ):
        with pytest.raises(ConfigError, match=part):
            call()
    assert repr(LayerSpec(nn.Linear, 2, 3, bias=False)) == "LayerSpec(Linear, 2, 3, bias=False)"


def test_topologies():
    grid = PipeDataParallelTopology(2, 3)
    assert [grid.get_rank(pipe=1, data=0), grid.get_coord(4).pipe, grid.get_coord(4).data, grid.world_size()] == [3, 1, 1, 6]
    assert grid.get_axis_comm_lists("data") == [[0, 1, 2], [3, 4, 5]] and grid.get_axis_comm_lists("pipe") == [[0, 3], [1, 4], [2, 5]]
    assert grid.filter_match(data=2) == [2, 5] and grid.get_axis_comm_lists("model") == [] and grid.get_dim("model") == 0
    three = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert three.get_axis_names() == ["pipe", "data", "model"] and three.get_rank(pipe=1, data=1, model=0) == 6
    assert three.get_rank_repr(3) == "model_01" and three.get_axis_list("pipe", 1) == [4, 5, 6, 7]
    for call in (
        lambda: grid.get_rank(pipe=1),
        lambda: grid.get_rank(pipe=2, data=0),
        lambda: grid.filter_match(model=1),
        lambda: grid.get_coord(6),
    ):
        with pytest.raises(ConfigError):
            call()


def test_grids_follow_a_topology():
    assert Grid.over(4, 2).ranks == [[0, 1], [2, 3]]
    seen = Grid.over(4, 2).seen_from(3)
    assert (seen.get_stage_id(), seen.get_data_parallel_rank(), seen.stage_to_global(0), seen.get_global_rank()) == (1, 1, 1, 3)
    assert (seen.get_pipe_parallel_world_size(), seen.get_data_parallel_world_size(), seen.get_model_parallel_world_size()) == (2, 2, 2)
    assert Grid.over(4, 2, ProcessTopology(["data", "pipe"], [2, 2])).ranks == [[0, 2], [1, 3]]
    with pytest.raises(ConfigError, match="are 4 ranks, but 2 were started"):
        Grid.over(2, 2, PipeDataParallelTopology(2, 2))
    with pytest.raises(ConfigError, match="'model' has 2 ranks"):
        Grid.over(8, 2, PipeModelDataParallelTopology(2, 2, 2))
