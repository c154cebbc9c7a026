"""Bad input: the message says what, where and what to do; nothing is executed; commands end with status 1."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from by_hand import FIXTURES
from checkpoint_truth import deepspeed_names
from stateroom import CheckpointError
from stateroom.__main__ import main as stateroom
from stateroom.checkpoint import archive, load_state_dict_from_checkpoint, open_source
from stateroom.checkpoint.ds_to_universal import main as convert

TAG = "global_step2"
RANK_1 = f"{TAG}/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.fixture
def folder(tmp_path) -> Path:
    shutil.copytree(FIXTURES / "z2bf16", tmp_path / "ckpt")
    return tmp_path / "ckpt"


def refused(folder: Path, capsys, *needles: str, tag: str | None = None) -> str:
    """The error of every way to read a checkpoint: raised by functions, status 1 of commands, no output left behind."""
    with pytest.raises(CheckpointError) as raised:
        load_state_dict_from_checkpoint(folder, tag)
    options = ["--tag", tag] if tag else []
    out = folder.parent / "out"
    assert convert(["--input_folder", str(folder), "--output_folder", str(out), *options]) == 1
    assert stateroom(["ckpt", "export", str(folder), str(out), *options]) == 1
    assert stateroom(["ckpt", "show", str(folder), *options]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.count(str(raised.value).splitlines()[0]) == 3
    assert not out.exists()
    for needle in needles:
        assert needle in str(raised.value), f"{needle!r} is not in: {raised.value}"
    return str(raised.value)


def test_no_such_directory(tmp_path, capsys):
    shutil.copytree(FIXTURES / "z1fp32", tmp_path / "good")
    refused(tmp_path / "god", capsys, f"{tmp_path / 'god'} does not exist", "checkpoints in")
    refused(tmp_path / "a" / "b", capsys, "does not exist", f"nor does {tmp_path / 'a'}")


def test_a_directory_without_checkpoints(tmp_path, capsys):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "notes.txt").write_text("hello")
    refused(tmp_path / "x", capsys, "is no checkpoint", "Name the directory in which checkpoints were saved")


def test_no_latest(folder, capsys):
    (folder / "latest").unlink()
    refused(folder, capsys, f"{folder / 'latest'} is missing", f"checkpoints in {folder}: {TAG}", "give one of them")
    assert open_source(folder, tag=TAG).parameters


def test_a_misspelt_tag(folder, capsys):
    refused(folder, capsys, f"{folder / 'globl_step2'} does not exist", f"checkpoints in {folder}: {TAG}", tag="globl_step2")


def test_latest_names_what_is_not_there(folder, capsys):
    (folder / "latest").write_text("global_step3\n")
    refused(folder, capsys, "names the tag 'global_step3', which does not exist", TAG, "give a tag, or correct the file")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("z2bf16", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("z1fp32", "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        ("z3bf16", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
        ("z3bf16", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        ("pipe_fp32", "mp_rank_01_model_states.pt"),
        ("moe2", "layer_0_expert_1_mp_rank_00_model_states.pt"),
    ],
)
def test_a_missing_file_is_named(name, file, tmp_path, capsys):
    shutil.copytree(FIXTURES / name, tmp_path / "x")
    (tmp_path / "x" / TAG / file).unlink()
    refused(tmp_path / "x", capsys, file, "is missing", "choose another tag")


def test_a_missing_layer_of_a_pipeline_is_named(tmp_path, capsys):
    shutil.copytree(FIXTURES / "written" / "p1_bf16_tied", tmp_path / "x")
    (tmp_path / "x" / "global_step3" / "layer_02-model_states.pt").unlink()
    refused(tmp_path / "x", capsys, "layer_02-model_states.pt is missing")


@pytest.mark.parametrize("kept", [0, 3, 100, 0.3, 0.6, 0.99])
def test_a_truncated_file(kept, folder, capsys):
    path = folder / RANK_1
    content = path.read_bytes()
    path.write_bytes(content[: int(kept if kept >= 1 or kept == 0 else kept * len(content))])
    refused(folder, capsys, str(path), "damaged", "restore it from a copy")


def test_every_flipped_byte_of_the_structure_is_seen(folder):
    """The pickle and the zip's own tables: each sampled flip is an error that names the file, or changes nothing at all."""
    path = folder / RANK_1
    good = path.read_bytes()
    before = {name: open_source(folder).tensor(name, "fp32") for name in ("l2.weight", "ln.bias")}
    with zipfile.ZipFile(path) as opened:
        pickled = next(info for info in opened.infolist() if info.filename.endswith("data.pkl"))
    seen = 0
    for at in [*range(pickled.header_offset, pickled.header_offset + pickled.file_size, 23), *range(len(good) - 400, len(good), 7)]:
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x41]) + good[at + 1 :])
        try:
            source = open_source(folder)
            same = all(torch.equal(source.tensor(name, "fp32"), value) for name, value in before.items())
            assert same, f"byte {at}"
        except CheckpointError as error:
            seen += 1
            assert str(path) in str(error)
    assert seen > 80


def test_damage_in_the_data_is_found_by_the_checksums(folder):
    path = folder / RANK_1
    assert list(archive.damage(path)) == []
    stored = archive.load(
        path,
        (
            "deepspeed.runtime.fp16.loss_scaler.LossScaler",
            "deepspeed.runtime.zero.config.ZeroStageEnum",
            "deepspeed.utils.tensor_fragment.fragment_address",
        ),
    )
    begin = stored["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].storage.begin
    content = bytearray(path.read_bytes())
    content[begin + 10] ^= 1
    path.write_bytes(content)
    ((first, last),) = archive.damage(path)
    assert first <= begin + 10 < last


# ---- pickles that would run code


class Runs:
    """Unpickling this the ordinary way makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def poison(path: Path, value: object) -> None:
    """Put an object into the client state of a file."""
    content = torch.load(path, weights_only=True)
    content["my_epoch"] = value
    torch.save(content, path)


def test_nothing_is_executed(folder, tmp_path, capsys):
    model = folder / TAG / "mp_rank_00_model_states.pt"
    poison(model, Runs(tmp_path / "executed"))
    refused(folder, capsys, str(model), "refused", "posix.system", "nothing was executed")
    assert not (tmp_path / "executed").exists()
    torch.load(model, weights_only=False)
    assert (tmp_path / "executed").exists()  # negative control: the file would have run it


@pytest.mark.parametrize(
    "code",
    [
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cbuiltins\ngetattr\n(S'1'\nS'2'\ntR.",
        b"ctorch\nload\n(S'x'\ntR.",
        b"ctorch.serialization\nload\n(S'x'\ntR.",
        b"csubprocess\nPopen\n(S'true'\ntR.",
        b"cnumpy\nload\n(S'x'\ntR.",
        b"cnumpy.testing._private.utils\nrunstring\n(S'1'\n}tR.",
        b"c_codecs\nencode\n(S'x'\nS'idna'\ntR.",
        b"ccollections\nnamedtuple\n(S'x'\nS'y'\ntR.",
        b"cargparse\nNamespace\n}S'__init__'\nI1\nsb.",  # attributes set on a class
        b"ctorch._utils\n_rebuild_tensor_v2\n}S'__defaults__'\nI1\nsb.",  # and on a function
    ],
)
def test_names_that_are_not_on_the_list_are_refused(code, tmp_path):
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("x/data.pkl", code)
    with pytest.raises(CheckpointError, match=r"is refused|is damaged"):
        archive.load(path)


def test_a_tensor_cannot_reach_beyond_its_storage(tmp_path):
    torch.save(torch.arange(4.0), tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as opened:
        content = {info.filename: opened.read(info) for info in opened.infolist()}
    pickled = next(name for name in content if name.endswith("data.pkl"))
    assert content[pickled].count(b"K\x04\x85") == 1  # the shape, a tuple of one small number
    content[pickled] = content[pickled].replace(b"K\x04\x85", b"K\x09\x85")
    with zipfile.ZipFile(tmp_path / "y.pt", "w") as made:
        for name, data in content.items():
            made.writestr(name, data)
    with pytest.raises(CheckpointError, match="reaches beyond its storage"):
        archive.load(tmp_path / "y.pt")


class Settings:
    """A class of the user's own in the client state."""

    def __init__(self) -> None:
        self.depth = 12


def test_a_users_own_class_is_refused_by_name_and_read_as_data_on_request(folder, capsys):
    import __main__

    poison(folder / TAG / "mp_rank_00_model_states.pt", Settings())
    name = f"{Settings.__module__}.Settings"
    refused(folder, capsys, name, "--inert MODULE.CLASS")
    record = open_source(folder, inert=(name,)).client_state()["my_epoch"]
    assert record.get("depth") == 12 and not isinstance(record, Settings)
    assert stateroom(["ckpt", "show", str(folder), "--inert", name]) == 0
    out = folder.parent / "u"
    assert convert(["--input_folder", str(folder), "--output_folder", str(out), "--inert", name]) == 0
    del __main__
    capsys.readouterr()


def test_usual_client_states_need_no_permission(folder):
    import argparse
    import collections
    import datetime

    value = {
        "args": argparse.Namespace(lr=0.1, sizes=[1, 2]),
        "rng": np.random.RandomState(0).get_state(),
        "loss": np.float64(0.5),
        "seen": collections.defaultdict(list, {"a": [1]}),
        "count": collections.Counter("aab"),
        "when": datetime.datetime(2026, 1, 2),
        "path": Path("/x/y"),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "dtype": torch.float16,
        "device": torch.device("cpu"),
        "shape": torch.Size([2, 3]),
        "raw": b"\x00\xff",
        "set": {1, 2},
    }
    path = folder / TAG / "mp_rank_00_model_states.pt"
    content = torch.load(path, weights_only=True)
    content.update(value)
    torch.save(content, path)
    found = open_source(folder).client_state()
    assert found["args"] == value["args"] and found["seen"] == value["seen"] and found["count"] == value["count"]
    assert np.array_equal(found["rng"][1], value["rng"][1]) and found["loss"] == 0.5 and found["when"] == value["when"]
    assert str(found["path"]) == "/x/y" and torch.equal(found["half"], value["half"])
    assert all(found[key] == value[key] for key in ("dtype", "device", "shape", "raw", "set"))


def test_files_of_the_older_stream_format(tmp_path):
    value = {"a": torch.arange(12.0).view(3, 4).t(), "b": torch.ones(5, dtype=torch.bfloat16), "c": [torch.tensor(3), "text"]}
    torch.save(value, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    found = archive.materialize(archive.load(tmp_path / "old.pt"))
    assert torch.equal(found["a"], value["a"]) and torch.equal(found["b"], value["b"]) and found["c"] == [torch.tensor(3), "text"]
    content = (tmp_path / "old.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(content[:-4])
    with pytest.raises(CheckpointError, match="damaged"):
        archive.load(tmp_path / "cut.pt")
    (tmp_path / "evil.pt").write_bytes(pickle.dumps(Runs(tmp_path / "executed"), protocol=2))
    with pytest.raises(CheckpointError, match="refused"):
        archive.load(tmp_path / "evil.pt")
    assert not (tmp_path / "executed").exists()


def test_files_of_different_runs_are_not_mixed(tmp_path):
    shutil.copytree(FIXTURES / "z3bf16", tmp_path / "x")
    other = FIXTURES / "z3sub" / TAG / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    shutil.copy(other, tmp_path / "x" / TAG / other.name)
    path = tmp_path / "x" / TAG / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    model = torch.load(path, weights_only=True)
    model["param_shapes"][0]["emb.weight"] = torch.Size([11, 6])
    torch.save(model, path)
    with pytest.raises(CheckpointError, match=r"do not fit the optimizer's flat tensors"):
        open_source(tmp_path / "x")


def test_tensor_parallel_files_without_rules(tmp_path):
    shutil.copytree(FIXTURES / "z1fp32", tmp_path / "x")
    folder = tmp_path / "x" / TAG
    for kind in ("mp_rank_{}_model_states.pt", "zero_pp_rank_0_mp_rank_{}_optim_states.pt", "zero_pp_rank_1_mp_rank_{}_optim_states.pt"):
        shutil.copy(folder / kind.format("00"), folder / kind.format("01"))
    for rank in ("00", "01"):
        path = folder / f"mp_rank_{rank}_model_states.pt"
        model = torch.load(path, weights_only=True)
        model.update(mp_world_size=2, checkpoint_parallel_dimensions={"pp_degree": 1, "tp_degree": 2})
        torch.save(model, path)
    with pytest.raises(CheckpointError, match=r"tensor parallelism over 2 ranks and does not say how"):
        open_source(tmp_path / "x")


def change_model(folder: Path, **changes: object) -> None:
    """Set keys in every file of model states."""
    for path in folder.glob("*/*mp_rank_*_model_states.pt"):
        if "expert" not in path.name:
            model = torch.load(path, weights_only=True)
            model.update(changes)
            torch.save(model, path)


def test_rules_of_a_newer_version_are_refused(tmp_path):
    shutil.copytree(FIXTURES / "written" / "t1_bf16", tmp_path / "x")
    change_model(tmp_path / "x", universal_checkpoint_info={"universal_checkpoint_version": 0.5})
    with pytest.raises(CheckpointError, match=r"rules of version 0\.5; version 0\.4 is the newest known here.*newer Stateroom"):
        open_source(tmp_path / "x")


def test_fused_experts_are_refused(tmp_path):
    shutil.copytree(FIXTURES / "moe2", tmp_path / "x")
    change_model(tmp_path / "x", ds_autoep_layers=[{"expert_key_prefix": "moe.experts"}])
    with pytest.raises(CheckpointError, match=r"AutoEP has fused"):
        open_source(tmp_path / "x")


def test_an_optimizer_that_was_swapped_out_is_said_to_be(tmp_path):
    shutil.copytree(FIXTURES / "written" / "z3_fp32_sgd", tmp_path / "x")
    for path in (tmp_path / "x").glob("*/*optim_states.pt"):
        with deepspeed_names():
            value = torch.load(path, weights_only=False)
            inner = value["optimizer_state_dict"]
            inner["fp32_flat_groups"] = [torch.empty(0) for _ in inner["fp32_flat_groups"]]
            inner.update(zero_stage=3, loss_scaler=None)
        torch.save(value, path)
    with pytest.raises(CheckpointError, match=r"there is no room for .*swapped to NVMe"):
        open_source(tmp_path / "x")


def test_commands_end_with_status_1_in_a_process_of_their_own(tmp_path):
    arguments = ["--input_folder", str(tmp_path / "none"), "--output_folder", str(tmp_path / "u")]
    done = subprocess.run([sys.executable, "-m", "stateroom.checkpoint.ds_to_universal", *arguments], capture_output=True, text=True)
    assert done.returncode == 1 and "does not exist" in done.stderr and "Traceback" not in done.stderr
