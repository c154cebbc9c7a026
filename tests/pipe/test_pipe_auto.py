"""An ordinary model is cut by config alone, and trains as it does in one piece."""

from __future__ import annotations

import auto_jobs
import pipe_jobs as jobs
import pytest
import torch
from stateroom.errors import ConfigError
from stateroom.pipe.auto import find_trunk
from torch import nn


def config(count: int = 4, stages: int = 2, **pipeline):
    return jobs.config(count, stages, pipeline={"split": "auto", **pipeline})


def check(kind, got, data):
    want = auto_jobs.plain(kind, data)
    for rank in got:
        assert rank["losses"] == pytest.approx(want["losses"], rel=1e-5)
        for name, value in rank["weights"].items():
            torch.testing.assert_close(value, want["weights"][name], rtol=1e-5, atol=1e-5)
        assert set(rank["whole"]) == set(want["weights"])
        for name, value in rank["whole"].items():
            torch.testing.assert_close(value, want["weights"][name], rtol=1e-5, atol=1e-5)
    assert {name for rank in got for name in rank["weights"]} == set(want["weights"])
    return want


QUICK = {("tied", "1f1b"), ("tied", "zbv"), ("named", "1f1b"), ("listed", "interleaved-1f1b")}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=[] if (kind, name) in QUICK else pytest.mark.full)
        for kind in ("tied", "untied", "listed", "named")
        for name in ("1f1b", "interleaved-1f1b", "zbv")
    ],
)
def test_models_of_layers(pools, kind, name):
    data = jobs.batches(5, 4, 1, lengths=(5, 7))
    got = pools(2).run(auto_jobs.cut, kind, data, config(schedule=name))
    check(kind, got, data)
    total = sum(param.numel() for param in auto_jobs.model(kind).parameters())
    assert all(rank["numel"] < total for rank in got)  # no stage keeps the whole model


@pytest.mark.parametrize("kind", ("llama", pytest.param("gpt2", marks=pytest.mark.full)))
def test_models_of_transformers(pools, kind):
    pytest.importorskip("transformers")
    data = jobs.batches(3, 4, 1)
    check(kind, pools(2).run(auto_jobs.cut, kind, data, config()), data)


@pytest.mark.full
@pytest.mark.parametrize("kind", ("tied", "listed"))
@pytest.mark.parametrize("stages", (2, 4))
def test_four_ranks(pools, kind, stages):
    data = jobs.batches(5, 4, 4 // stages)
    check(kind, pools(4).run(auto_jobs.cut, kind, data, {**config(stages=stages), "zero_optimization": {"stage": 1}}), data)


@pytest.mark.parametrize(
    ("kind", "given"), [("tied", "optimizer"), ("listed", "parameters"), pytest.param("tied", "parameters", marks=pytest.mark.full)]
)
def test_what_the_script_built_over_the_whole_model(pools, kind, given):
    data = jobs.batches(3, 4, 1)
    check(kind, pools(2).run(auto_jobs.cut, kind, data, config(), None, given), data)


def test_a_checkpoint_of_stages_is_the_models_own(pools, tmp_path):
    data = jobs.batches(3, 4, 1)
    got = pools(2).run(auto_jobs.cut, "tied", data, config(), str(tmp_path))
    (found,) = pools(1).run(auto_jobs.load_plain, "tied", str(tmp_path), data[0][0])
    assert found == pytest.approx(got[0]["evaluated"], rel=1e-5) and got[0]["evaluated"] == got[1]["evaluated"]


def test_recomputation(pools):
    data = jobs.batches(3, 4, 1)
    cfg = {**config(), "activation_checkpointing": {"policy": "full"}}
    check("tied", pools(2).run(auto_jobs.cut, "tied", data, cfg), data)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.second = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))


class Loose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(2))
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))


@pytest.mark.parametrize(
    ("net", "split", "part"),
    [
        (Two(), "auto", "2 lists of layers (first, second); name one"),
        (Loose(), "auto", "parameter 'token' belongs to no module"),
        (nn.Linear(2, 2), "auto", "no nn.ModuleList of at least two layers"),
        (Loose(), "blocks", "'blocks' is no nn.ModuleList of the model; it has layers"),
    ],
)
def test_what_cannot_be_cut_is_said(net, split, part):
    with pytest.raises(ConfigError) as caught:
        find_trunk(net, split)
    assert part in str(caught.value)
