"""The memory estimators say what an engine then holds, for tied, frozen, padded and meta-device models (P33)."""

from __future__ import annotations

import pytest
import torch
from models import build
from stateroom.zero.estimate import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
    held,
    unit_sizes,
)
from stateroom.zero.placement import STAGES
from torch import nn
from training import config_for


class Mixed(nn.Module):
    """Odd sizes, frozen parts, and a batch norm, whose parameters stay fp32."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3))
        for param in self.blocks[1].parameters():
            param.requires_grad_(False)

    def forward(self, x):
        x = self.norm(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def make(name):
    torch.manual_seed(0)
    return Mixed() if name == "mixed" else build(name)


def bytes_of(tensors):
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def live(name, stage):
    """Return what an engine holds at rest after a step, and the arithmetic, on each rank."""
    import stateroom

    model = make(name)
    world = torch.distributed.get_world_size()
    expected = held(unit_sizes(model), STAGES[stage], world)
    config = config_for(stage, "bf16", 1)
    del config["units"]
    engine, *_ = stateroom.initialize(model, config=config)
    ids = tuple(torch.randint(17, (2, 6)) for _ in range(2))
    inputs = (torch.randn(4, 7, dtype=torch.bfloat16),) if name == "mixed" else ids
    engine.backward(engine(*inputs))
    engine.step()
    units = engine.sharded.units
    trained = [unit for unit in units if unit.trainable]
    found = (
        bytes_of(t for unit in units for t in (unit.full, unit.shard)),
        bytes_of(t for unit in trained for t in unit.gradients.tensors()),
        bytes_of(unit.master for unit in trained if not unit.master_is_shard),
        bytes_of(v for s in engine.optimizer.inner.state.values() for v in s.values() if v.dim()),
    )
    engine.destroy()
    return found, (expected.parameters, expected.gradients, expected.master, expected.optimizer)


@pytest.mark.parametrize("name", ["gpt", "mixed"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_estimate_equals_what_an_engine_holds(pools, name, stage):
    for found, expected in pools(2).run(live, name, stage):
        assert found == expected


def test_a_model_on_the_meta_device_is_counted_by_shape():
    with torch.device("meta"):
        meta = make("gpt")
    assert unit_sizes(meta) == unit_sizes(make("gpt"))
    assert sum(unit.numel for unit in unit_sizes(meta)) == sum(p.numel() for p in make("gpt").parameters())


def test_bytes_of_an_element_are_2_4_4_and_8_over_the_ranks():
    units = unit_sizes(make("mlp"))
    numel = sum(unit.numel for unit in units)
    alone = held(units, STAGES[3], 1)
    assert (alone.parameters, alone.gradients, alone.master, alone.optimizer) == (2 * numel, 4 * numel, 4 * numel, 8 * numel)
    assert held(units, STAGES[2], 1).at_rest == alone.at_rest
    assert abs(held(units, STAGES[2], 4).at_rest - (2 + 16 / 4) * numel) <= 18 * 4 * len(units)


def test_tables_name_every_offload_option(capsys):
    estimate_zero2_model_states_mem_needs_all_live(make("gpt"), num_gpus_per_node=2, num_nodes=1)
    two = capsys.readouterr().out.splitlines()
    assert [row.rpartition("| ")[2] for row in two[-2:]] == ["offload_optimizer=cpu", "offload_optimizer=none"]
    estimate_zero3_model_states_mem_needs_all_live(make("gpt"), num_gpus_per_node=2)
    three = capsys.readouterr().out.splitlines()
    assert len(three) == 9 and three[-1].endswith("offload_param=none, offload_optimizer=none, zero_init=0")


def test_cold_tables_take_numbers_alone(capsys):
    estimate_zero2_model_states_mem_needs_all_cold(100_000_000, num_gpus_per_node=2, num_nodes=2)
    two = capsys.readouterr().out.splitlines()[-1]
    assert f"{1e8 * (2 + 16 / 4) / 2**30:.2f} GiB" in two and f"{1.5 * 1e8 * 4 * 2 / 2**30:.2f} GiB" in two
    estimate_zero3_model_states_mem_needs_all_cold(100_000_000, 10_000_000, num_gpus_per_node=2, num_nodes=2)
    three = capsys.readouterr().out.splitlines()[-1]
    assert f"{1e8 * 18 / 4 / 2**30:.2f} GiB" in three and f"{1e7 * 6 / 2**20:.2f} MiB" in three
