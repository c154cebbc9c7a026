"""`stateroom env` says what a bug report needs, and keeps secrets."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
import torch
from stateroom.__main__ import main
from stateroom.environment import reportable
from stateroom.parallel import report


def test_the_report_has_every_section_and_says_what_is_true(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("STATEROOM_API_KEY", "do not tell")
    monkeypatch.setenv("STATEROOM_ACCELERATOR", "cpu")
    monkeypatch.setattr(report, "PROBE_BYTES", 2**20)
    assert main(["env", "--json"]) == 0
    text = capsys.readouterr().out
    found = json.loads(text)
    sections = ["stateroom", "packages", "processor", "accelerator", "compiled", "disk", "network", "communication", "variables"]
    assert list(found) == sections and all(found.values())
    assert found["packages"]["torch"] == torch.__version__
    assert found["processor"]["cores"] == len(os.sched_getaffinity(0))
    assert found["accelerator"]["device"] == "cpu" and found["communication"]["backend"] == "gloo"
    assert found["network"]["host"] == socket.gethostname() and "127.0.0.1" in found["network"]["lo"]
    assert found["variables"]["NCCL_DEBUG"] == "INFO"
    assert found["variables"]["STATEROOM_API_KEY"] == "(set, not shown)" and "do not tell" not in text
    assert main(["env"]) == 0
    plain = capsys.readouterr().out
    assert all(f"\n{name}\n" in f"\n{plain}" for name in sections)


def test_only_what_matters_is_shown() -> None:
    env = {"HOME": "/h", "PATH": "p", "RANK": "0", "CUDA_VISIBLE_DEVICES": "1", "SLURM_JOB_ID": "3", "HF_TOKEN": "t", "NCCL_SECRET": "s"}
    assert reportable(env) == {"CUDA_VISIBLE_DEVICES": "1", "NCCL_SECRET": "(set, not shown)", "RANK": "0", "SLURM_JOB_ID": "3"}


def test_a_disk_is_described_also_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "PROBE_BYTES", 2**20)
    assert "MiB/s (1 MiB, flushed)" in report.describe_disk(tmp_path) and "GiB free" in report.describe_disk(tmp_path)
    assert report.disk_class(Path("/dev/shm")) == "memory (tmpfs)"
    assert report.write_speed(Path("/proc")).startswith("not writable (")
    assert not list(tmp_path.iterdir())


def test_a_broken_launch_environment_does_not_end_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "RANK='x' is not an integer" in report.communication()["launcher"]
