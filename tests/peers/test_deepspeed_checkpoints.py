"""Checkpoints between DeepSpeed and here: read right, converted as DeepSpeed itself does where it can, and gone on with there."""

from __future__ import annotations

import ast
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_truth import folder_of_tag, problems, raw, truth_of
from stateroom.checkpoint import convert_to_universal

JOB = Path(__file__).with_name("checkpoint_job.py")

# One of each kind that DeepSpeed 0.19.8 can convert, and one that it converts wrongly.
CONVERTED = (
    *("z1_fp32_adamw", "z1_fp32_amsgrad", "z1_bf16_adamw", "z1_bf16_aligned", "z1_bf16_optimizer", "z2_fp16_adamw", "z2_bf16_offload"),
    *("z2_bf16_aligned_round_robin", "z3_fp32_adamw", "z3_bf16_adamw", "z3_bf16_sub_groups", "p1_fp32_tied", "p1_bf16_plain"),
    *("m2_bf16_ep1", "t1_bf16", "t2_fp32", "t3_fp32"),
)
WRONG = "z2_fp32_round_robin"
# It loads what it can convert, and other optimizers' states at stages 1 and 2.
RESUMED = (
    *(f"z{stage}_{dtype}_adamw" for stage in (1, 2) for dtype in ("fp32", "bf16", "fp16")),
    *("z1_fp32_sgd", "z2_fp32_rmsprop", "z1_bf16_optimizer", "z2_bf16_aligned", "z2_bf16_elastic"),
)
CROSSED = {
    "z2_fp32_adamw": "z3_fp32_adamw",
    "z1_fp32_sgd": "z3_fp32_sgd",
    "z1_fp32_adamw": "z0_fp32_adamw",
    "z2_bf16_adamw": "z1_bf16_optimizer",
}


def tables(peer: str) -> dict[str, list[str]]:
    """The names of the job's cases, which only an interpreter with DeepSpeed can import."""
    code = "import checkpoint_job as job; print([list(table) for _, table in job.KINDS])"
    done = subprocess.run([peer, "-c", code], env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(("net", "pipe", "moe", "tensor"), ast.literal_eval(done.stdout.strip().splitlines()[-1]), strict=True))


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    paths = os.pathsep.join([str(JOB.parent), str(JOB.parents[1])])
    return {**kept, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "TORCHDYNAMO_DISABLE": "1"}


def job(peer: str, ranks: int, mode: str, folder: Path, names: list[str]) -> None:
    launch = [peer, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(JOB)]
    done = subprocess.run([*launch, mode, str(folder), *names], env=environment(), capture_output=True, text=True, timeout=900, cwd=folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]


@pytest.fixture(scope="module")
def written(peer: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases, written by DeepSpeed; experts of either kind in a job of their own, whose groups they share."""
    folder, cases = tmp_path_factory.mktemp("written"), tables(peer)
    job(peer, 2, "write", folder, cases["net"])
    job(peer, 4, "write", folder, cases["pipe"])
    for kind in ("ep1", "ep2"):
        job(peer, 4, "write", folder, [name for name in cases["moe"] if name.endswith(kind)])
    job(peer, 4, "write", folder, cases["tensor"])
    return folder


def test_every_case_is_read_right(written: Path) -> None:
    found = {path.name: problems(path.name, path) for path in sorted(written.iterdir())}
    assert len(found) > 60 and {name: wrong for name, wrong in found.items() if wrong} == {}


def test_universal_output_equals_deepspeeds(peer: str, written: Path, tmp_path: Path) -> None:
    different = {}
    for name in (*CONVERTED, WRONG):
        convert_to_universal(written / name, tmp_path / name / "ours")
        theirs = tmp_path / name / "theirs"
        convert_there(peer, folder_of_tag(written / name), theirs)
        different[name] = unlike(tmp_path / name / "ours", theirs)
    assert {name for name, files in different.items() if files} == {WRONG}, different


def convert_there(peer: str, tag: Path, out: Path) -> None:
    """Run DeepSpeed's own converter."""
    arguments = ["--input_folder", str(tag), "--output_folder", str(out), "--inject_missing_state"]
    command = [peer, "-m", "deepspeed.checkpoint.ds_to_universal", *arguments, "--num_extract_workers", "1", "--num_merge_workers", "1"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{tag}: {done.stderr[-3000:]}"


def unlike(ours: Path, theirs: Path) -> list[str]:
    """The parameter files of DeepSpeed's that are not the same here."""
    found = []
    for path in sorted((theirs / "zero").glob("*/*.pt")):
        here = ours / path.relative_to(theirs)
        if not here.exists():
            found.append(str(here))
            continue
        a, b = (raw(file) for file in (here, path))
        if isinstance(a, dict) != isinstance(b, dict):
            found.append(str(path.relative_to(theirs)))
        elif not isinstance(a, dict):
            found += [] if torch.equal(torch.as_tensor(a), torch.as_tensor(b)) else [str(path.relative_to(theirs))]
        elif a.keys() != b.keys() or not all(alike(a[key], b[key]) for key in b):
            found.append(str(path.relative_to(theirs)))
    return found


def alike(a: Any, b: Any) -> bool:
    if isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return a == b if isinstance(b, (int, bool)) else vars(a) == vars(b)  # a description of sub-tensors


def test_deepspeed_goes_on_from_what_was_converted_here(peer: str, written: Path) -> None:
    """Same stage and ranks: the three steps after loading have the losses that the run itself had, bit for bit."""
    for name in RESUMED:
        convert_to_universal(written / name, written / name / "universal" / "u")
    job(peer, 2, "resume", written, list(RESUMED))
    for name in RESUMED:
        check_resumed(name, written / name, truth_of(written / name), 0.0)


def test_deepspeed_goes_on_at_another_stage(peer: str, written: Path, tmp_path: Path) -> None:
    """DeepSpeed's own converter cannot cross between stage 3 and the others, nor come from stage 0."""
    for target, origin in CROSSED.items():
        convert_to_universal(written / origin, tmp_path / target / "universal" / "u", stage=int(target[1]))
    job(peer, 2, "resume", tmp_path, list(CROSSED))
    for target, origin in CROSSED.items():
        check_resumed(target, tmp_path / target, truth_of(written / origin), 1e-5)


def test_deepspeed_goes_on_from_round_robin_gradients(peer: str, written: Path, tmp_path: Path) -> None:
    """What its own converter garbles, once the order of the target is the plain one (its loader garbles the other)."""
    convert_to_universal(written / "z2_fp32_round_robin", tmp_path / "z2_fp32_adamw" / "universal" / "u")
    job(peer, 2, "resume", tmp_path, ["z2_fp32_adamw"])
    check_resumed("z2_fp32_adamw", tmp_path / "z2_fp32_adamw", truth_of(written / "z2_fp32_round_robin"), 1e-5)


def test_stage_3_goes_on_as_from_deepspeeds_own_conversion(peer: str, written: Path, tmp_path: Path) -> None:
    """Its loader gives every parameter group the first one's options, so the losses are not the run's; they are those of its converter."""
    names = ["z3_fp32_adamw", "z3_bf16_sub_groups"]
    results = []
    for kind in ("ours", "theirs"):
        folder = tmp_path / kind
        for name in names:
            out = folder / name / "universal" / "u"
            if kind == "ours":
                convert_to_universal(written / name, out)
            else:
                out.parent.mkdir(parents=True)
                convert_there(peer, folder_of_tag(written / name), out)
        job(peer, 2, "resume", folder, names)
        results.append({name: torch.load(folder / name / "resumed.pt", weights_only=True) for name in names})
    for name in names:
        for ours, theirs in zip(results[0][name], results[1][name], strict=True):
            assert ours["losses"] == theirs["losses"] and all(
                torch.equal(ours["weights"][key], theirs["weights"][key]) for key in ours["weights"]
            )


def check_resumed(name: str, folder: Path, truth: list[dict[str, Any]], tolerance: float) -> None:
    resumed = torch.load(folder / "resumed.pt", weights_only=True)
    for rank, (found, wanted) in enumerate(zip(resumed, truth, strict=True)):
        assert found["step"] == 6 and found["my_epoch"] == 3
        for key, weight in wanted["module"].items():
            if key in found["weights"]:
                assert torch.equal(found["weights"][key], weight), f"{name}: {key} on rank {rank}"
        for a, b in zip(found["losses"], wanted["losses"], strict=True):
            assert abs(a - b) <= tolerance * abs(b), f"{name}: losses {found['losses']} instead of {wanted['losses']}"
