"""Modules marked as leaf are one unit: their parameters are gathered together however they are used inside."""

from __future__ import annotations

import pytest
import stateroom
import torch
from models import DIM
from stateroom.errors import ConfigError, LayoutError
from stateroom.utils import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    unset_z3_leaf_modules,
    z3_leaf_module,
)
from stateroom.zero.pick import pick_sites
from torch import nn


class Experts(nn.Module):
    """Which expert is used depends on the data."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(4))

    def forward(self, x):
        return self.experts[int(x.abs().sum() * 100) % 4](x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.moe, self.last = nn.Linear(DIM, DIM), Experts(), nn.Linear(DIM, DIM)

    def forward(self, x):
        return self.last(self.moe(self.first(x))).square().mean()


def names(model, **options):
    return [site.name for site in pick_sites(model, **options)]


@pytest.mark.parametrize("given", [[Experts], Experts, ["Experts"], [f"{__name__}.Experts"]])
def test_a_marked_module_is_one_site(given):
    model = Model()
    assert names(model, min_numel=0) == ["root", "moe.experts.0", "moe.experts.1", "moe.experts.2", "moe.experts.3"]
    assert set_z3_leaf_modules(model, given) == [model.moe]
    assert names(model) == names(model, max_numel=1) == ["root", "moe"]
    assert get_z3_leaf_modules(model) == [model.moe] and z3_leaf_module(model.moe)
    assert unset_z3_leaf_modules(model, given) == [model.moe]
    assert len(names(model, min_numel=0)) == 5 and get_z3_leaf_modules(model) == []


def test_single_modules_and_names():
    model = Model()
    set_z3_leaf_module(model.first, True)
    assert names(model, classes=["Experts"]) == ["root", "first", "moe"]
    assert set_z3_leaf_modules_by_name(model, ["moe", "none"], raise_if_not_found=False) == ([model.moe], ["none"])


def test_a_class_that_is_not_there_is_an_error_unless_asked_not_to():
    with pytest.raises(LayoutError, match="Expertz"):
        set_z3_leaf_modules(Model(), ["Expertz"])
    assert set_z3_leaf_modules(Model(), ["Expertz"], raise_if_not_found=False) == []


def train(way):
    """At stage 3 ranks that use different experts would wait for each other, were the experts units of their own."""
    torch.manual_seed(0)
    model = Model()
    leaf = {"leaf_module": {"names": ["moe"]}} if way == "config" else {}
    if way == "mark":
        stateroom.utils.set_z3_leaf_modules(model, [Experts])
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 0 if way == "none" else 3, **leaf},
        "units": {"min_numel": 0},
    }
    engine, *_ = stateroom.initialize(model, config=config)
    losses = []
    for step in range(6):
        generator = torch.Generator().manual_seed(10 * step + engine.global_rank)
        loss = engine(torch.randn(2, DIM, generator=generator))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    units = [unit.name for unit in engine.sharded.units]
    engine.destroy()
    return losses, units


def test_ranks_that_use_different_experts_train_at_stage_3_as_at_stage_0(pools):
    without, marked, configured = (pools(2).run(train, way) for way in ("none", "mark", "config"))
    assert [losses for losses, _ in without] == [losses for losses, _ in marked] == [losses for losses, _ in configured]
    assert marked[0][1] == configured[0][1] == ["root", "moe"] and len(without[0][1]) == 5


def misspelt():
    with pytest.raises(ConfigError, match=r"leaf_module\.names.*'mow'"):
        stateroom.initialize(
            Model(),
            config={"train_batch_size": 2, "zero_optimization": {"stage": 3, "leaf_module": {"names": ["mow"]}}},
        )


def test_a_misspelt_name_in_the_config_is_an_error(pools):
    pools(2).run(misspelt)


def test_a_marked_module_is_not_grouped_with_its_neighbours():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(5)))
    assert names(model) == names(model, min_numel=10**9) == ["root", "0..4"]
    set_z3_leaf_module(model[2], True)
    assert names(model) == names(model, min_numel=10**9) == ["root", "0..1", "2", "3..4"]
    assert names(model, closed=["0"]) == ["root", "0", "1", "2", "3..4"]
