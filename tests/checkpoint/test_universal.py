"""Converting to the universal layout: equal to DeepSpeed's output, resumable, bounded, and never half done under its name."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import random
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from by_hand import FIXTURES, raw
from stateroom import CheckpointError
from stateroom.checkpoint import convert_to_universal, open_source, universal_work
from stateroom.checkpoint.ds_to_universal import main as command

OUT = "global_step2_universal"
WRITTEN = FIXTURES / "written"


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def tensors(value: object) -> dict[str, torch.Tensor]:
    return value if isinstance(value, dict) else {"bare": value}


@pytest.mark.parametrize("name", ["z2bf16", "z3bf16"])
def test_output_equals_deepspeeds_file_by_file(name, tmp_path):
    convert_to_universal(FIXTURES / name, tmp_path / OUT)
    ours, theirs = tmp_path / OUT, FIXTURES / f"u_{name}" / OUT
    assert content(ours).keys() == content(theirs).keys()
    for file in content(ours):
        if "model_states" in file:
            assert (ours / file).read_bytes() == (theirs / file).read_bytes()
        elif file != "zero/optimizer_state.pt":
            a, b = raw(ours / file), raw(theirs / file)
            assert type(a) is type(b)
            assert list(tensors(a)) == list(tensors(b))
            for key, value in tensors(a).items():
                other = tensors(b)[key]
                assert value == other if isinstance(value, int) else torch.equal(value, other) and value.dtype == other.dtype
    assert (tmp_path / "latest_universal").read_text() == (theirs.parent / "latest_universal").read_text()


@pytest.mark.parametrize("name", ["z2bf16", "z3bf16"])
def test_the_common_file_has_what_deepspeed_reads(name, tmp_path):
    convert_to_universal(FIXTURES / name, tmp_path / OUT)
    ours, theirs = (raw(folder / OUT / "zero" / "optimizer_state.pt") for folder in (tmp_path, FIXTURES / f"u_{name}"))
    assert ours["param_groups"] == theirs["param_groups"]
    assert set(theirs) - set(ours) <= {"fp32_flat_groups"}  # rank 0's shards, which no reader looks at
    for key in ("loss_scaler", "zero_stage"):
        assert type(ours[key]).__module__ == type(theirs[key]).__module__ and vars(ours[key]) == vars(theirs[key])
    if "optimizer_state_dict" in theirs:
        assert float(ours["optimizer_state_dict"]["state"][0]["step"]) == 2.0
        assert ours["optimizer_state_dict"]["param_groups"] == theirs["optimizer_state_dict"]["param_groups"]


@pytest.mark.parametrize("name", sorted(path.name for path in WRITTEN.iterdir() if path.name not in ("p0_bf16_tied", "z2_fp32_per_row")))
def test_every_optimizer_state_is_converted_under_its_own_name(name, tmp_path):
    convert_to_universal(WRITTEN / name, tmp_path / "u")
    before, after = open_source(WRITTEN / name), open_source(tmp_path / "u")
    for parameter, one in before.parameters.items():
        assert set(before.states(parameter)) - {"param"} <= set(after.states(parameter)) or not one.trainable
        for state in before.states(parameter):
            if state != "param":
                assert torch.equal(before.tensor(parameter, state).float(), after.tensor(parameter, state))
        assert {key: float(value) for key, value in before.scalars(parameter).items()} == {
            key: float(value) for key, value in after.scalars(parameter).items()
        }
        assert after.parameters[parameter].trainable == one.trainable
    assert [sorted(group["params"]) for group in before.groups()] == [sorted(group["params"]) for group in after.groups()]
    assert after.client_state() == {"my_epoch": 3}


@pytest.mark.parametrize(("name", "needle"), [("z2_fp32_per_row", "corner of emb.weight"), ("p0_bf16_tied", "fp32 of 1.bias")])
def test_missing_states_are_named_before_anything_is_written(name, needle, tmp_path, capsys):
    status = command(["--input_folder", str(WRITTEN / name), "--output_folder", str(tmp_path / "u")])
    said = capsys.readouterr().err
    assert status == 1 and needle in said and "nothing was written" in said and "--no_strict" in said
    assert list(tmp_path.iterdir()) == []
    assert command(["--input_folder", str(WRITTEN / name), "--output_folder", str(tmp_path / "u"), "--no_strict"]) == 0
    assert "left out: " + needle in capsys.readouterr().err


def test_weights_alone_are_refused(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"holds weights alone.*ckpt export"):
        convert_to_universal(tmp_path, tmp_path / "u")


def test_an_output_that_exists_is_left_alone(tmp_path, capsys):
    (tmp_path / "u").mkdir()
    (tmp_path / "u" / "mine").write_text("x")
    assert command(["--input_folder", str(FIXTURES / "z1fp32"), "--output_folder", str(tmp_path / "u")]) == 1
    assert "exists already" in capsys.readouterr().err and content(tmp_path / "u") == {"mine": b"x"}


# ---- several processes, kills, memory


@pytest.fixture(scope="module")
def larger(tmp_path_factory) -> Path:
    """A ZeRO-2 checkpoint of two ranks with 120 parameters of 64 kB, made by hand."""
    folder = tmp_path_factory.mktemp("larger")
    write_zero2(folder, count=120, numel=16 * 1024)
    return folder


def write_zero2(folder: Path, count: int, numel: int) -> None:
    """What DeepSpeed would write for `count` parameters of `numel` elements on two ranks."""
    tag = folder / "global_step1"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("global_step1")
    generator = torch.Generator().manual_seed(0)
    half = count * numel // 2
    shapes = {f"p{index}": torch.Size([numel // 8, 8]) for index in range(count)}
    for rank in range(2):
        state = {key: torch.rand(half, generator=generator) for key in ("exp_avg", "exp_avg_sq")}
        inner = {
            "zero_stage": 2,
            "base_optimizer_state": {"state": {0: {"step": torch.tensor(1.0), **state}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
            "single_partition_of_fp32_groups": [torch.rand(half, generator=generator)],
            "group_paddings": [0],
            "partition_count": [2],
            "ds_version": "0.19.8",
        }
        torch.save({"optimizer_state_dict": inner}, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    model = {"module": {}, "buffer_names": [], "param_shapes": [shapes], "dp_world_size": 2, "mp_world_size": 1, "global_steps": 1}
    torch.save({**model, "ds_version": "0.19.8", "ds_config": {}}, tag / "mp_rank_00_model_states.pt")


def start(source: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    arguments = ["--input_folder", str(source), "--output_folder", str(out), *options]
    return subprocess.Popen(
        [sys.executable, "-m", "stateroom.checkpoint.ds_to_universal", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_several_processes_write_the_same(larger, tmp_path):
    convert_to_universal(larger, tmp_path / "one", num_workers=1)
    convert_to_universal(larger, tmp_path / "three", num_workers=3)
    one, three = content(tmp_path / "one"), content(tmp_path / "three")
    assert one.keys() == three.keys() and len(one) == 120 * 4 + 2
    for file in one:
        if file.endswith(("fp32.pt", "exp_avg.pt")):
            a, b = (torch.load(tmp_path / name / file, weights_only=True) for name in ("one", "three"))
            assert torch.equal(a["param"], b["param"])
    assert [entry.name for entry in sorted(tmp_path.iterdir())] == ["latest_universal", "one", "three"]


@pytest.mark.parametrize(
    ("workers", "most"), [("1", 3), *(pytest.param(*case, marks=pytest.mark.full) for case in (("2", 3), ("1", 40), ("3", 40)))]
)
def test_killed_at_many_instants_the_next_run_ends_with_the_same(workers, most, larger, tmp_path):
    """SIGKILL again and again, each time later; nothing ever stands under the final name before it is complete."""
    convert_to_universal(larger, tmp_path / "whole", num_workers=1)
    wanted = content(tmp_path / "whole")
    out, chance, kills, reused = tmp_path / "u", random.Random(int(workers)), 0, 0
    while not (out.is_dir() and not (out / "plan.json").exists()):
        before = visible(out)
        process = start(larger, out, "--num_workers", workers)
        if kills < most and until(lambda: visible(out) > before or out.exists(), process):  # noqa: B023
            try:
                process.wait(chance.uniform(0.0, 0.15 if most > 3 else 0.05))  # three kills have to fit into one conversion
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                kills += 1
                assert not out.exists() or (out / "plan.json").exists() or content(out).keys() == wanted.keys()
        said = process.communicate(timeout=120)[1]
        reused += "going on in" in said
        assert process.returncode in (0, -signal.SIGKILL), said
    assert kills >= 3 or kills == most
    assert reused >= 1
    found = content(out)
    assert found.keys() == wanted.keys()
    assert all(same(out / file, tmp_path / "whole" / file) for file in found)
    assert (tmp_path / "latest_universal").read_text() in ("u", "whole")
    assert not [entry for entry in tmp_path.iterdir() if entry.name.endswith(".converting")]


def visible(out: Path) -> int:
    """How many files of an unfinished conversion stand under their names."""
    return len(glob.glob(f"{out.parent}/.{out.name}.converting/zero/*/*.pt"))  # unlike Path's, it bears that a folder goes meanwhile


def until(condition, process: subprocess.Popen[str]) -> bool:
    """Look until something is so; False if the process ends before."""
    while not condition():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.002)
            return condition()
    return True


def same(a: Path, b: Path) -> bool:
    if a.suffix != ".pt" or "model_states" in a.name or a.name == "optimizer_state.pt":
        return True
    left, right = (tensors(torch.load(path, weights_only=True)) for path in (a, b))
    return all(torch.equal(torch.as_tensor(value), torch.as_tensor(right[key])) for key, value in left.items())


def test_what_another_input_left_is_not_taken_over(larger, tmp_path):
    """A stopped conversion of one checkpoint, then the same output from another one."""
    left = tmp_path / ".u.converting"
    (left / "zero" / "l1.weight").mkdir(parents=True)
    torch.save({"param": torch.zeros(7, 6), "cat_dim": 0}, left / "zero" / "l1.weight" / "fp32.pt")
    size = (left / "zero" / "l1.weight" / "fp32.pt").stat().st_size
    (left / "journal.1").write_text(json.dumps(["zero/l1.weight/fp32.pt", size]) + "\n")
    (left / "plan.json").write_text(json.dumps({"input": "another"}))
    convert_to_universal(FIXTURES / "z1fp32", tmp_path / "u")
    assert open_source(tmp_path / "u").tensor("l1.weight", "fp32").any()


def test_a_truncated_finished_file_is_written_again(tmp_path, monkeypatch):
    """The journal says it is done, its length says no."""
    from stateroom.checkpoint import universal

    with monkeypatch.context() as patched:
        patched.setattr(universal, "_finish", stop)
        with pytest.raises(KeyboardInterrupt):
            convert_to_universal(FIXTURES / "z1fp32", tmp_path / "u")
    victim = tmp_path / ".u.converting" / "zero" / "l1.weight" / "fp32.pt"
    victim.write_bytes(victim.read_bytes()[:100])
    made = convert_to_universal(FIXTURES / "z1fp32", tmp_path / "u")
    assert made.reused_files == made.num_files - 1
    assert torch.equal(
        open_source(tmp_path / "u").tensor("l1.weight", "fp32"), open_source(FIXTURES / "z1fp32").tensor("l1.weight", "fp32")
    )


def test_a_disk_without_room_is_seen_before_anything_is_written(tmp_path, monkeypatch):
    from stateroom.checkpoint import universal

    monkeypatch.setattr(universal.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(CheckpointError, match=r"has 1\.0 kB free, .* are needed"):
        convert_to_universal(FIXTURES / "z1fp32", tmp_path / "u")
    assert not list(tmp_path.rglob("*.pt"))


def stop(*args: object) -> None:
    raise KeyboardInterrupt


def test_memory_is_bounded_by_the_largest_state(tmp_path):
    """200 MB of states in 8 MB pieces: the process grows by a few pieces, not by the checkpoint."""
    write_zero2(tmp_path / "in", count=10, numel=2 * 1024 * 1024)
    code = (
        "import resource, sys, torch\n"
        "from stateroom.checkpoint import convert_to_universal, open_source\n"
        "import stateroom.checkpoint.universal, stateroom.checkpoint.batch\n"
        "torch.save(torch.zeros(10), sys.argv[2] + '.warm')\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "convert_to_universal(sys.argv[1], sys.argv[2], num_workers=1)\n"
        "print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "in"), str(tmp_path / "u")], capture_output=True, text=True, check=True
    )
    grown = int(done.stdout.split()[-1])
    state = 2 * 1024 * 1024 * 4
    assert grown < 3 * state + 24 * 2**20, f"grew by {grown / 2**20:.0f} MiB for states of {state / 2**20:.0f} MiB"


# ---- the command


def test_help_is_quick_and_has_an_example():
    code = "import sys; from stateroom.checkpoint.ds_to_universal import main; main(['--help']); print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "example:" in said and said.strip().endswith("False")


def test_deepspeeds_spellings_are_honoured_or_explained(tmp_path, capsys):
    options = ["--num_extract_workers", "2", "--num_merge_workers", "1", "--keep_temp_folder", "--inject_missing_state"]
    assert command(["--input_folder", str(FIXTURES / "z1fp32"), "--output_folder", str(tmp_path / "u"), *options]) == 0
    said = capsys.readouterr()
    notes = [line for line in said.err.splitlines() if line.startswith("note: ")]
    assert len(notes) == 3 and "--keep_temp_folder has no effect" in said.err and "--inject_missing_state has no effect" in said.err
    assert f"wrote {tmp_path / 'u'}: " in said.out


def test_usage_errors_have_status_2(capsys):
    assert command(["--input_folder", "x"]) == 2
    assert command(["--input_folder", "x", "--output_folder", "y", "--num_workers", "0"]) == 2
    capsys.readouterr()


# ---- large tensors go past the page cache, in archives that are made here


@pytest.mark.parametrize("name", ["z1fp32", "z3bf16", "moe2", "written/z0_fp16_adamw", "written/t1_bf16", "written/m2_bf16_ep2"])
def test_archives_made_here_hold_what_torch_save_would_write(name, tmp_path, monkeypatch):
    """Every tensor of a checkpoint both ways; torch, zip and our own reader must find the same in both."""
    monkeypatch.setattr(universal_work, "DIRECT_BYTES", 1)
    monkeypatch.setattr(universal_work, "SUM_BYTES", 4096)  # so that data and trailers cross the edges of what is summed at once
    convert_to_universal(FIXTURES / name, tmp_path / "direct")
    monkeypatch.setattr(universal_work, "DIRECT_BYTES", 1 << 40)
    convert_to_universal(FIXTURES / name, tmp_path / "saved")
    files = sorted(path.relative_to(tmp_path / "saved") for path in (tmp_path / "saved" / "zero").rglob("*.pt"))
    assert files
    made_here = 0
    for file in files:
        direct, saved = tmp_path / "direct" / file, tmp_path / "saved" / file
        assert alike(raw(direct), raw(saved)), file
        with zipfile.ZipFile(direct) as archive:
            assert archive.testzip() is None
            made_here += archive.namelist()[0] == "archive/data.pkl" and "archive/.format_version" not in archive.namelist()
    assert made_here > 10
    for name in open_source(tmp_path / "saved").parameters:
        for state in open_source(tmp_path / "saved").states(name):
            assert torch.equal(open_source(tmp_path / "direct").tensor(name, state), open_source(tmp_path / "saved").tensor(name, state))


def alike(a: object, b: object) -> bool:
    """Whether two loaded values are of the same types, with the same tensors in them."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(alike(a[key], b[key]) for key in a)
    if hasattr(a, "__dict__"):
        return type(a).__name__ == type(b).__name__ and alike(vars(a), vars(b))
    return a == b
