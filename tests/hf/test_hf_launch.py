"""Unmodified scripts started from the command line: by Stateroom's runner, its launcher, and accelerate's launcher."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from stateroom.hf.__main__ import main

SCRIPT = Path(__file__).parent / "scripts" / "accelerate_script.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "hf"


def run(folder: Path, *command: str) -> subprocess.CompletedProcess:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    env = {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "STATEROOM_ACCELERATOR": "cpu"}
    return subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=240)


def accelerate_launch(ranks: int) -> tuple[str, ...]:
    machine = ("--num_processes", str(ranks), "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no")
    options = ("--use_deepspeed", "--zero_stage", "3", "--gradient_accumulation_steps", "2", "--gradient_clipping", "1.0")
    return ("-m", "stateroom.hf", "accelerate", "launch", *machine, *options, "--main_process_port", "0")


def test_accelerate_launch_starts_ranks_that_run_on_stateroom(tmp_path):
    done = run(tmp_path, *accelerate_launch(2), str(SCRIPT), "--out", "out.json")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["engine"] == "stateroom.engine.engine.Engine" and found["kind"] == "DistributedType.DEEPSPEED"
    assert found["ranks"] == 2 and found["stage"] == 3 and found["accumulation"] == 2
    assert found["losses"][-1] < 0.9 * found["losses"][0] and len(set(found["losses"])) == len(found["losses"])


@pytest.mark.full
def test_torchrun_starts_it_as_a_module(tmp_path):
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "stateroom.hf", str(SCRIPT))
    done = run(tmp_path, *command, "--out", "out.json", "--plugin")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    assert json.loads((tmp_path / "out.json").read_text())["ranks"] == 2


@pytest.mark.full
def test_the_example_runs_under_stateroom_s_launcher(tmp_path):
    options = ("--deepspeed", str(EXAMPLE / "zero3.json"), "--use_cpu", "--output_dir", "out", "--max_steps", "8", "--logging_steps", "1")
    quick = (
        "--per_device_train_batch_size",
        "2",
        "--block",
        "32",
        "--learning_rate",
        "5e-3",
        "--report_to",
        "none",
        "--save_strategy",
        "no",
    )
    done = run(
        tmp_path, "-m", "stateroom.launcher", "--num_gpus", "2", "-m", "stateroom.hf", str(EXAMPLE / "finetune.py"), *options, *quick
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    losses = [float(loss) for loss in re.findall(r"'loss': '([\d.]+)'", done.stdout)]
    assert len(losses) == 8 and losses[-1] < 0.9 * losses[0] and "def " in done.stdout
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.full
def test_a_failing_rank_is_a_failing_launch(tmp_path):
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    done = run(tmp_path, *accelerate_launch(1), "bad.py")
    assert done.returncode != 0 and "exitcode" in done.stderr


def test_a_script_sees_its_own_arguments_name_and_folder(tmp_path):
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "beside.py").write_text("import deepspeed\nVERSION = deepspeed.__version__\n")
    (folder / "show.py").write_text("import sys, beside\nprint(__name__, __file__, sys.argv, beside.VERSION)\n")
    done = run(tmp_path, "-m", "stateroom.hf", "scripts/show.py", "--lr", "-m")
    assert done.stdout.split() == ["__main__", "scripts/show.py", "['scripts/show.py',", "'--lr',", "'-m']", done.stdout.split()[-1]], done
    assert "stateroom" in done.stdout.split()[-1]


@pytest.mark.parametrize("argv", [[], ["nothing_here.py"], ["-m"]])
def test_nothing_to_run_is_a_usage_error(argv, capsys):
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert "python -m stateroom.hf" in printed.out + printed.err


def test_several_hosts_need_accelerates_standard_launcher(tmp_path):
    """Accelerate would start the `deepspeed` program on the first host, which is not here."""
    (tmp_path / "hosts").write_text("one slots=1\ntwo slots=1\n")
    (tmp_path / "train.py").write_text("")
    options = ("--num_processes", "2", "--num_machines", "2", "--machine_rank", "0", "--main_process_ip", "127.0.0.1")
    rest = ("--deepspeed_hostfile", "hosts", "--mixed_precision", "no", "--dynamo_backend", "no")
    done = run(
        tmp_path, "-m", "stateroom.hf", "accelerate", "launch", "--use_deepspeed", *options, "--main_process_port", "0", *rest, "train.py"
    )
    assert done.returncode == 2 and "--deepspeed_multinode_launcher standard" in done.stderr, done.stderr[-3000:]
