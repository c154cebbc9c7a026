"""Where the bytes are: shards at rest, and no more gathered at once than the prefetch depth allows. Storages are walked."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from models import batch, build
from training import cast, config_for

LAYERS = 6


def deep_gpt():
    from models import TiedGPT

    torch.manual_seed(3)
    return TiedGPT(LAYERS)


def storage_bytes(tensors):
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def gathered_bytes(engine):
    return storage_bytes(unit.full for unit in engine.sharded.units if unit.sharded)


def step(engine, number):
    loss = engine(*batch("gpt", number, 0, engine.global_rank))
    engine.backward(loss)
    engine.step()


def walk(precision, extra):
    """Return bytes at rest by state and the highest gathered bytes seen by hooks on every module, at stage 3."""
    import stateroom

    model = deep_gpt()
    numel = sum(p.numel() for p in model.parameters())
    engine, *_ = stateroom.initialize(model, config=config_for(3, precision, 1, **extra))
    seen = []
    for module in model.modules():
        module.register_forward_hook(lambda *_: seen.append(gathered_bytes(engine)))
        module.register_full_backward_hook(lambda *_: seen.append(gathered_bytes(engine)))
    for number in range(3):
        inputs = cast(batch("gpt", number, 0, engine.global_rank), precision)
        loss = engine(*inputs)
        engine.backward(loss)
        engine.step()
    units = engine.sharded.units
    params = storage_bytes(t for unit in units for t in (unit.full, unit.shard))
    grads = storage_bytes(t for unit in units for t in unit.gradients.tensors())
    states = storage_bytes(v for s in engine.optimizer.inner.state.values() for v in s.values() if v.dim())
    outside = storage_bytes(p.grad for p in model.parameters() if p.grad is not None)
    sizes = {unit.name: unit.full_bytes for unit in units}
    engine.destroy()
    return numel, params, grads, states, outside, max(seen), sizes, len(units)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_stage_3_rests_at_one_share(pools, precision, ranks):
    for numel, params, grads, states, outside, *_, count in pools(ranks).run(walk, precision, {}):
        share = -(-numel // ranks) + count  # one padding a unit
        itemsize = 4 if precision == "fp32" else 2
        assert params <= share * itemsize
        assert grads <= share * 4
        assert states <= 2 * share * 4
        assert outside == 0


@pytest.mark.parametrize(("extra", "ahead"), [({}, 1), ({"zero_optimization": {"stage": 3, "overlap_comm": False}}, 0)])
def test_no_more_units_gathered_than_prefetch_allows(pools, extra, ahead):
    for *_, peak, sizes, _ in pools(2).run(walk, "fp32", extra):
        blocks = [size for name, size in sizes.items() if name != "root"]
        assert peak <= sizes["root"] + (1 + ahead) * max(blocks)
        assert peak >= sizes["root"] + max(blocks)  # the walk sees gathered units at all


def frozen_walk():
    """Return the highest gathered bytes with all blocks frozen but a trainable bias in each."""
    import stateroom

    model = deep_gpt()
    for name, param in model.named_parameters():
        param.requires_grad_(name.endswith("out.bias") or not name.startswith("blocks"))
    engine, *_ = stateroom.initialize(model, config=config_for(3, "fp32", 1))
    seen = []
    for block in model.blocks:
        block.register_full_backward_hook(lambda *_: seen.append(gathered_bytes(engine)))
    for number in range(2):
        step(engine, number)
    block = sum(unit.full_bytes for unit in engine.sharded.units if unit.name.startswith("blocks.0"))
    root = sum(unit.full_bytes for unit in engine.sharded.units if unit.name.startswith("root"))
    left = gathered_bytes(engine)
    engine.destroy()
    return max(seen), root, block, left


def test_frozen_weights_are_released_during_backward(pools):
    for peak, root, block, left in pools(2).run(frozen_walk):
        assert peak <= root + 2 * block
        assert left == 0


def replicated_walk(stage):
    import stateroom

    model = build("gpt")
    numel = sum(p.numel() for p in model.parameters())
    engine, *_ = stateroom.initialize(model, config=config_for(stage, "fp32", 2))
    for number in range(4):
        loss = engine(*batch("gpt", number, 0, engine.global_rank))
        engine.backward(loss)
        engine.step()
    views = storage_bytes(p for p in model.parameters())
    grads = storage_bytes(t for unit in engine.sharded.units for t in unit.gradients.tensors())
    count = len(engine.sharded.units)
    engine.destroy()
    return numel, views, grads, count


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_are_the_flat_buffer_itself(pools, stage):
    """Zero copies: the storages behind the parameters are the whole memory of the parameters."""
    for numel, views, grads, count in pools(2).run(replicated_walk, stage):
        assert numel * 4 <= views <= (numel + 2 * count) * 4
        whole = 1 if stage < 2 else 2
        assert grads <= (numel + 2 * count) * 4 / whole


BILLION = """
import torch, stateroom
from torch import nn

class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

class Model(nn.Module):
    def __init__(self, dim=2048, layers=20, vocab=8000):
        super().__init__()
        self.emb, self.head = nn.Embedding(vocab, dim), nn.Linear(dim, vocab, bias=False)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))

def peak():
    status = open("/proc/self/status").read()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

stateroom.init_distributed()
with torch.device("meta"):
    model = Model()
total = sum(p.numel() for p in model.parameters()) * 4
unit = sum(p.numel() for p in model.blocks[0].parameters()) * 4
before = peak()
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
engine, *_ = stateroom.initialize(model, config=config)
print(f"peak {total} {unit} {peak() - before}\\n", end="", flush=True)  # in one piece: four ranks write
"""


@pytest.mark.full
def test_a_billion_parameters_on_the_meta_device_come_to_life_sharded(tmp_path):
    """Four ranks; each may use 1.3 times a quarter of the bytes and one unit, resident, at any time."""
    script = tmp_path / "billion.py"
    script.write_text(BILLION)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [list(map(int, row)) for row in re.findall(r"peak (\d+) (\d+) (\d+)", done.stdout)]
    assert len(rows) == 4
    for total, unit, used in rows:
        assert total > 4e9
        assert used <= 1.3 * (total / 4 + unit), f"{used / 1e9:.2f} GB of {(total / 4 + unit) / 1e9:.2f}"
