"""Plain torch.distributed.checkpoint reads what the engine wrote: whole models, sharded ones, and its own tools."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from engine_jobs import build_any, differences, new_engine, save_here, train

pytestmark = pytest.mark.filterwarnings("ignore")


def weights(states):
    return {name: value for name, value in states.items() if f"{name} as computed with" in states}


@pytest.fixture(scope="module")
def saved(pools, tmp_path_factory):
    """Saved on 3 ranks, so that intervals end inside matrices."""
    folder = tmp_path_factory.mktemp("dcp")
    states = {name: pools(3).run(save_here, name, 3, "bf16", str(folder / name))[0] for name in ("gpt", "odd")}
    return folder, states


@pytest.mark.parametrize("name", ["gpt", "odd"])
def test_a_plain_model_loads(saved, name):
    """`dcp.load(model.state_dict(), checkpoint_id=dir)`, tied names and buffers included."""
    import torch.distributed.checkpoint as dcp

    folder, states = saved
    model = build_any(name)
    state = model.state_dict()
    for value in state.values():
        value.zero_()
    dcp.load(state, checkpoint_id=folder / name / "global_step2")
    for key, value in weights(states[name]).items():
        assert torch.equal(state[key], value), key
    for key, buffer in model.named_buffers():
        if not key.startswith("bn.") and key in state:
            assert torch.equal(buffer, states[name][f"buffer {key}"]), key
    bf16 = {key: torch.zeros_like(value, dtype=torch.bfloat16) for key, value in weights(states[name]).items()}
    dcp.load(bf16, checkpoint_id=folder / name / "global_step2")
    assert all(torch.equal(bf16[key], value.bfloat16()) for key, value in weights(states[name]).items())


def load_into_fsdp(folder):
    """torchtitan-style: fully_shard, then dcp.load of the model's DTensors and of its moments."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = build_any("gpt")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = model.state_dict()
    moments = {f"{key}::exp_avg": torch.zeros_like(value) for key, value in state.items() if key != "head.weight"}
    for value in state.values():
        value.zero_()
    dcp.load({**state, **moments}, checkpoint_id=Path(folder) / "gpt" / "global_step2")
    return {key: value.full_tensor() for key, value in {**state, **moments}.items()}


def test_an_fsdp2_model_loads(pools, saved):
    folder, states = saved
    for found in pools(2).run(load_into_fsdp, str(folder)):
        expected = {key: states["gpt"].get(key, states["gpt"]["emb.weight"]) for key in found}
        assert differences(expected, {key: value.detach() for key, value in found.items()}) == []


def test_torch_tools_convert_it(saved, tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    folder, states = saved
    dcp_to_torch_save(folder / "odd" / "global_step2", tmp_path / "all.pt")
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    for key, value in states["odd"].items():
        if isinstance(value, torch.Tensor) and key in loaded and "buffer" not in key and value.dim():
            assert torch.equal(loaded[key].float(), value.float()), key
    assert {"head.weight", "head.weight::exp_avg", "again.weight", "table", "empty"} <= set(loaded)


def large(folder):
    """Items are cut at a limit; here a small one."""
    from stateroom.checkpoint import container, job

    small = container.FRAMING._replace(limit_bytes=1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "FRAMING", small)
        engine = new_engine("gpt", 1)
        train(engine, "gpt", 1)
        engine.save_checkpoint(folder)
        found = {name: value.clone() for name, value in engine.module_state_dict().items()}
        engine.destroy()
    return found


def test_tensors_larger_than_an_item_are_cut(pools, tmp_path):
    import torch.distributed.checkpoint as dcp
    from stateroom.checkpoint.native import NativeSource
    from stateroom.checkpoint.verifying import verify

    expected = pools(2).run(large, str(tmp_path))[0]
    state = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp.load(state, checkpoint_id=tmp_path / "global_step1")
    assert differences(expected, state) == []
    source = NativeSource(tmp_path / "global_step1")
    assert len(list(source.elements("blocks.0.qkv.weight", "fp32").places())) > 3
    assert torch.equal(source.read("blocks.0.qkv.weight", "fp32", 100, 700), expected["blocks.0.qkv.weight"].flatten()[100:700])
    assert verify(tmp_path) == []
