"""`stateroom ckpt ls|show|diff|export`: what they print, as text and as JSON, and their exit status."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from by_hand import FIXTURES
from stateroom.__main__ import main

TAG = "global_step2"


def ckpt(capsys, *arguments: object) -> tuple[int, str, str]:
    status = main(["ckpt", *map(str, arguments)])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_ls_tells_complete_from_broken(tmp_path, capsys):
    shutil.copytree(FIXTURES / "z2bf16" / TAG, tmp_path / "global_step2")
    shutil.copytree(FIXTURES / "z3bf16" / TAG, tmp_path / "global_step3")
    shutil.copytree(FIXTURES / "u_z2bf16" / f"{TAG}_universal", tmp_path / "uni")
    (tmp_path / "notes").mkdir()
    (tmp_path / "global_step3" / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    (tmp_path / "latest").write_text("global_step2")
    status, text, _ = ckpt(capsys, "ls", tmp_path)
    assert status == 0
    rows = {line.split()[0]: line for line in text.splitlines()}
    assert "complete <- latest" in rows["global_step2"] and "DeepSpeed 0.19.8, stage 2" in rows["global_step2"]
    assert "broken" in rows["global_step3"] and "complete" in rows["uni"] and "universal" in rows["uni"]
    assert "zero_pp_rank_1_mp_rank_00_model_states.pt is missing" in text and "notes" not in rows
    listed = json.loads(ckpt(capsys, "ls", tmp_path, "--json")[1])
    by_tag = {row["tag"]: row for row in listed}
    assert set(by_tag) == {"global_step2", "global_step3", "uni"} and by_tag["global_step2"]["step"] == 2
    assert by_tag["global_step2"]["complete"] and not by_tag["global_step3"]["complete"]
    size = sum(path.stat().st_size for path in (tmp_path / "global_step2").iterdir())
    assert by_tag["global_step2"]["bytes"] == size and by_tag["global_step2"]["named_by"] == "latest"


def test_ls_of_one_checkpoint_and_of_none(tmp_path, capsys):
    assert ckpt(capsys, "ls", FIXTURES / "z1fp32" / TAG)[1].splitlines()[1].startswith(TAG)
    status, out, err = ckpt(capsys, "ls", tmp_path)
    assert status == 1 and out == "" and "holds no checkpoints" in err
    assert ckpt(capsys, "ls", tmp_path / "x")[0] == 1


def test_show_lists_parameters_states_and_files(capsys):
    status, text, _ = ckpt(capsys, "show", FIXTURES / "z2bf16", "--files")
    assert status == 0
    assert "emb.weight     10 x 6  bfloat16  fp32, exp_avg, exp_avg_sq, param (also head.weight)" in text
    assert "frozen.weight  6 x 6   bfloat16  param (frozen)" in text and "(buffer)" in text
    file = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
    assert f"l1.weight fp32: {file.format(0)} [0, 12), {file.format(1)} [12, 42)" in text
    assert "7 parameters, 201 elements; client state: my_epoch" in text


@pytest.mark.parametrize("name", ["z1fp32", "z3sub", "u_z3bf16", "pipe_fp32", "moe2", "written/p0_bf16_tied", "written/t1_bf16"])
def test_show_as_json_adds_up(name, capsys):
    status, text, _ = ckpt(capsys, "show", FIXTURES / name, "--json")
    shown = json.loads(text)
    assert status == 0 and shown["parameters"]
    for one in shown["parameters"]:
        numel = torch.Size(one["shape"]).numel()
        for state in one["states"].values():
            held = sum(part["numel"] for part in state["files"])
            assert held == numel or name == "written/t1_bf16"  # copies and slices of tensor-parallel ranks
    assert bool(shown["missing"]) == (name == "written/p0_bf16_tied")


def test_diff_of_the_same_and_of_others(tmp_path, capsys):
    assert ckpt(capsys, "diff", FIXTURES / "z2bf16", FIXTURES / "z3bf16")[:2] == (0, "equal: 7 parameters, all states bit for bit\n")
    status, text, _ = ckpt(capsys, "diff", FIXTURES / "z1fp32", FIXTURES / "z2bf16")
    assert status == 1 and "l1.weight fp32: elements differ, at most" in text
    shutil.copytree(FIXTURES / "u_z2bf16", tmp_path / "u")
    folder = tmp_path / "u" / f"{TAG}_universal" / "zero" / "l1.weight"
    (folder / "exp_avg.pt").unlink()
    held = torch.load(folder / "exp_avg_sq.pt", weights_only=True)
    held["param"][0, 0] += 1.0
    torch.save(held, folder / "exp_avg_sq.pt")
    torch.save(torch.tensor(5.0), folder / "step.pt")
    found = json.loads(ckpt(capsys, "diff", FIXTURES / "z2bf16", tmp_path / "u", "--json")[1])
    said = {(one["name"], one["state"]): one for one in found["differences"]}
    assert set(said) == {("l1.weight", "exp_avg"), ("l1.weight", "exp_avg_sq"), ("l1.weight", "step")} and not found["equal"]
    assert said["l1.weight", "exp_avg"]["what"] == "only in A"
    assert said["l1.weight", "exp_avg_sq"]["largest"] == pytest.approx(1.0) and said["l1.weight", "step"]["largest"] == 3.0
    assert ckpt(capsys, "diff", FIXTURES / "z2bf16", tmp_path / "u", "--weights_only")[0] == 0


def test_diff_counts_nan_as_equal_to_nan_and_only_to_it(tmp_path, capsys):
    torch.save({"w": torch.tensor([1.0, float("nan")])}, tmp_path / "a.pt")
    torch.save({"w": torch.tensor([1.0, 2.0])}, tmp_path / "b.pt")
    assert ckpt(capsys, "diff", tmp_path / "a.pt", tmp_path / "a.pt")[0] == 0
    assert ckpt(capsys, "diff", tmp_path / "a.pt", tmp_path / "b.pt")[0] == 1


def test_export_says_what_it_wrote(tmp_path, capsys):
    status, text, _ = ckpt(capsys, "export", FIXTURES / "z3bf16", tmp_path / "out", "--json")
    assert status == 0 and json.loads(text) == {"files": [str(tmp_path / "out" / "model.safetensors")], "tensors": 8, "bytes": 816}
    status, _, err = ckpt(capsys, "export", FIXTURES / "z3bf16", tmp_path / "out")
    assert status == 1 and "--overwrite" in err


def test_help_usage_and_unknown_commands(capsys):
    for arguments, status in ((["--help"], 0), ([], 2), (["frobnicate"], 2), (["ls"], 2), (["show", "--help"], 0), (["export", "x"], 2)):
        found, out, err = ckpt(capsys, *arguments)
        assert found == status and (out or err)
    for command in ("ls", "show", "diff", "export", "import"):
        assert "example: stateroom ckpt" in ckpt(capsys, command, "--help")[1]


def test_help_needs_no_tensor_library():
    code = "import sys; from stateroom.__main__ import main\n"
    code += "for c in ('ls', 'show', 'diff', 'export', 'import'): main(['ckpt', c, '--help'])\n"
    code += "import stateroom.checkpoint; print(sorted({'torch', 'numpy', 'rich', 'safetensors'} & set(sys.modules)))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip().endswith("[]")
