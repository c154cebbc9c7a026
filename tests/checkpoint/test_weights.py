"""Weights in and out: state dicts, safetensors, folders for transformers, and DeepSpeed's own function names."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import stateroom
import torch
from by_hand import FIXTURES, flat_states
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stateroom import CheckpointError
from stateroom.checkpoint import export, load_state_dict_from_checkpoint, open_source
from stateroom.checkpoint.exporting import size_of
from stateroom.utils import zero_to_fp32
from torch import nn


class Net(nn.Module):
    """The model of the fixtures."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 6)
        self.l1 = nn.Linear(6, 7)
        self.ln = nn.LayerNorm(7)
        self.l2 = nn.Linear(7, 6, bias=False)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.emb.weight
        self.frozen = nn.Linear(6, 6, bias=False)
        self.register_buffer("buf", torch.zeros(3))


@pytest.mark.parametrize("name", ["z1fp32", "z2bf16", "z3bf16", "z3sub", "u_z2bf16", "u_z3bf16"])
def test_a_plain_module_loads_it_strictly(name):
    net = Net()
    assert zero_to_fp32.load_state_dict_from_zero_checkpoint(net, FIXTURES / name) is net
    state = load_state_dict_from_checkpoint(FIXTURES / name)
    assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())
    assert net.head.weight is net.emb.weight and torch.equal(net.buf, torch.arange(3.0))
    assert state["head.weight"] is state["emb.weight"]


def test_a_module_that_does_not_fit_is_told_what_is_missing():
    net = Net()
    net.extra = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"missing there \['extra.weight', 'extra.bias'\]"):
        zero_to_fp32.load_state_dict_from_zero_checkpoint(net, FIXTURES / "z1fp32")


def test_dtypes():
    masters = flat_states(FIXTURES / "z2bf16" / "global_step2")
    for given, wanted in (
        (None, torch.float32),
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        (torch.float16, torch.float16),
        ("auto", torch.bfloat16),
    ):
        state = load_state_dict_from_checkpoint(FIXTURES / "z2bf16", dtype=given)
        assert {value.dtype for key, value in state.items() if key != "buf"} == {wanted}
        assert torch.equal(state["l1.weight"], masters["l1.weight"]["fp32"].to(wanted)) and state["buf"].dtype == torch.float32
    with pytest.raises(CheckpointError, match="dtype 'int3' is not known"):
        load_state_dict_from_checkpoint(FIXTURES / "z2bf16", dtype="int3")


def test_lazy_tensors_are_read_when_they_are_asked_for():
    state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(FIXTURES / "z3bf16", lazy_mode=True)
    whole = load_state_dict_from_checkpoint(FIXTURES / "z3bf16")
    assert set(state) == set(whole) and tuple(state["l1.weight"].shape) == (7, 6)
    assert torch.equal(state["head.weight"].contiguous(), whole["head.weight"])


def test_helpers_name_the_files_in_the_order_of_ranks():
    folder = FIXTURES / "z3bf16" / "global_step2"
    assert [Path(file).name for file in zero_to_fp32.get_optim_files(folder)] == [
        f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)
    ]
    assert Path(zero_to_fp32.get_model_state_file(folder, 3)).name == "zero_pp_rank_0_mp_rank_00_model_states.pt"
    assert stateroom.utils.zero_to_fp32 is zero_to_fp32 and stateroom.checkpoint.export is export


# ---- out


@pytest.mark.parametrize("name", ["z2bf16", "z3bf16", "pipe_fp32", "moe2", "u_z3bf16"])
def test_safetensors_hold_every_weight_once(name, tmp_path):
    made = export(FIXTURES / name, tmp_path / "out")
    state = load_state_dict_from_checkpoint(FIXTURES / name)
    found = load_file(tmp_path / "out" / "model.safetensors")
    aliases = {alias for one in open_source(FIXTURES / name).parameters.values() for alias in one.aliases}
    assert set(found) == set(state) - aliases and made.num_tensors == len(found)
    assert all(torch.equal(found[key], state[key]) for key in found)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt", **({"head.weight": "emb.weight"} if aliases else {})}
    again = load_state_dict_from_checkpoint(tmp_path / "out")
    assert set(again) == set(state) and all(torch.equal(again[key], state[key]) for key in state)


@pytest.mark.parametrize("format", ["safetensors", "pt"])
def test_shards_and_their_index(format, tmp_path):
    made = export(FIXTURES / "z2bf16", tmp_path / "out", format=format, max_shard_size=400)
    stem, ending = ("model", "safetensors") if format == "safetensors" else ("pytorch_model", "bin")
    index = json.loads((tmp_path / "out" / f"{stem}.{ending}.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"{stem}-{number:05d}-of-{len(files):05d}.{ending}" for number in range(1, len(files) + 1)] and len(files) > 2
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted([*files, f"{stem}.{ending}.index.json"])
    assert sorted(path.name for path in made.files) == sorted([*files, f"{stem}.{ending}.index.json"])
    state = load_state_dict_from_checkpoint(FIXTURES / "z2bf16")
    for file in files:
        path = tmp_path / "out" / file
        held = load_file(path) if ending == "safetensors" else torch.load(path, weights_only=True)
        assert all(torch.equal(value, state[key]) and index["weight_map"][key] == file for key, value in held.items())
        own = sum(value.numel() * 4 for key, value in held.items() if key != "head.weight")
        assert own <= 400 or len(held) == 1
    assert index["metadata"]["total_size"] == sum(value.numel() * 4 for key, value in state.items() if key != "head.weight")
    assert ("head.weight" in index["weight_map"]) == (format == "pt")
    assert set(load_state_dict_from_checkpoint(tmp_path / "out")) == set(state)


def test_files_of_torch_save_have_all_names(tmp_path):
    export(FIXTURES / "z2bf16", tmp_path / "out", format="pt", dtype="bf16", exclude_frozen=True)
    state = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert set(state) == set(Net().state_dict()) - {"frozen.weight"}
    assert state["head.weight"].data_ptr() == state["emb.weight"].data_ptr() and state["l1.weight"].dtype == torch.bfloat16


def test_weights_that_are_there_are_not_overwritten_unless_told(tmp_path):
    export(FIXTURES / "z2bf16", tmp_path / "out", max_shard_size=300)
    with pytest.raises(CheckpointError, match=r"holds model-00001-of-.*already.*--overwrite"):
        export(FIXTURES / "z2bf16", tmp_path / "out")
    export(FIXTURES / "z2bf16", tmp_path / "out", overwrite=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_transformers_loads_the_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, tie_word_embeddings=True
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    write_stage_0(model, tmp_path / "ckpt")
    config.save_pretrained(tmp_path / "ckpt")
    made = export(tmp_path / "ckpt", tmp_path / "out", format="hf", max_shard_size="20KB")
    assert not [line for line in made.remarks if "config.json" in line]
    back, report = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert all(torch.equal(value, back.state_dict()[key]) for key, value in model.state_dict().items())
    assert back.lm_head.weight is back.model.embed_tokens.weight


def write_stage_0(model: nn.Module, folder: Path) -> None:
    """What DeepSpeed writes of a model in fp32 without ZeRO."""
    (folder / "global_step1").mkdir(parents=True)
    (folder / "latest").write_text("global_step1")
    optimizer = torch.optim.AdamW(model.parameters())
    head = {"module": model.state_dict(), "buffer_names": [], "optimizer": optimizer.state_dict(), "dp_world_size": 1, "mp_world_size": 1}
    torch.save({**head, "global_steps": 1, "ds_version": "0.19.8"}, folder / "global_step1" / "mp_rank_00_model_states.pt")


def test_without_config_json_the_remark_says_what_to_do(tmp_path):
    made = export(FIXTURES / "z2bf16", tmp_path / "out", format="hf")
    assert any("--config FOLDER" in line for line in made.remarks)
    assert load_file(tmp_path / "out" / "model.safetensors")["l1.weight"].dtype == torch.bfloat16
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"torch_dtype": "bfloat16", "a": 1}')
    made = export(FIXTURES / "z2bf16", tmp_path / "again", format="hf", dtype="fp16", config=tmp_path / "model")
    assert made.remarks == [] and json.loads((tmp_path / "again" / "config.json").read_text()) == {"torch_dtype": "float16", "a": 1}


def test_deepspeeds_converter_by_its_own_name_and_as_a_script(tmp_path):
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(FIXTURES / "z3sub", tmp_path / "a", safe_serialization=True)
    state = load_state_dict_from_checkpoint(FIXTURES / "z3sub")
    assert torch.equal(load_file(tmp_path / "a" / "model.safetensors")["l1.weight"], state["l1.weight"])
    command = [sys.executable, "-m", "stateroom.utils.zero_to_fp32"]
    assert subprocess.run([*command, str(FIXTURES / "z3sub"), str(tmp_path / "b")], capture_output=True).returncode == 0
    assert torch.equal(torch.load(tmp_path / "b" / "pytorch_model.bin", weights_only=True)["head.weight"], state["head.weight"])
    failed = subprocess.run([*command, str(tmp_path / "none"), str(tmp_path / "c")], capture_output=True, text=True)
    assert failed.returncode == 1 and "does not exist" in failed.stderr and "Traceback" not in failed.stderr


def test_sizes():
    assert [size_of(text) for text in ("5GB", "1.5 MB", "2MiB", "100", 7, None)] == [5 * 10**9, 1_500_000, 2 << 20, 100, 7, None]
    with pytest.raises(CheckpointError, match="write it like 5GB"):
        size_of("five")


# ---- in


def test_safetensors_in_files_and_folders(tmp_path):
    tensors = {
        "a.w": torch.rand(4, 5),
        "b": torch.rand(3).to(torch.bfloat16),
        "ids": torch.arange(4),
        "empty": torch.empty(0, 3),
        "one": torch.tensor(2.0),
    }
    (tmp_path / "x").mkdir()
    save_file(tensors, tmp_path / "x" / "model.safetensors", metadata={"format": "pt", "tied": "a.w"})
    for path in (tmp_path / "x", tmp_path / "x" / "model.safetensors"):
        source = open_source(path)
        assert set(source.parameters) == {"a.w", "b", "empty", "one"} and source.parameters["a.w"].aliases == ("tied",)
        assert all(torch.equal(source.tensor(name, "param"), tensors[name]) for name in source.parameters)
        assert torch.equal(source.buffers()["ids"], tensors["ids"])
        assert torch.equal(source.read("a.w", "param", 3, 11), tensors["a.w"].flatten()[3:11])


def test_state_dicts_of_torch_save(tmp_path):
    net = Net()
    for wrap in (lambda state: state, lambda state: {"state_dict": state, "epoch": 3}, lambda state: {"model": state}):
        torch.save(wrap(net.state_dict()), tmp_path / "x.pt")
        source = open_source(tmp_path / "x.pt")
        assert source.parameters["emb.weight"].aliases == ("head.weight",)
        state = load_state_dict_from_checkpoint(tmp_path / "x.pt")
        assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())


def test_bad_weights_are_named(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    good = (tmp_path / "model.safetensors").read_bytes()
    for name, content in (("cut", good[:-2]), ("header", b"\xff" * 8 + good[8:]), ("empty", b""), ("json", good[:12] + b"!!!" + good[15:])):
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{name}.safetensors is damaged or no safetensors file"):
            open_source(path)
    (tmp_path / "i").mkdir()
    (tmp_path / "i" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors is missing: the index names it"):
        open_source(tmp_path / "i")
    (tmp_path / "t.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"is no checkpoint: weights end in"):
        open_source(tmp_path / "t.txt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="holds a list, not a state dict"):
        open_source(tmp_path / "list.pt")
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "i" / "other.safetensors")
