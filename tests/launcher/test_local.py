"""The launcher: what reaches the ranks, what comes back from them, and that none is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stateroom.launcher.cli import parse

ENV = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
ENV["STATEROOM_ACCELERATOR"] = "cpu"  # ranks as processes, on any machine
LAUNCHER = [sys.executable, "-m", "stateroom.launcher"]


def launch(tmp_path: Path, source: str, *options: str, args: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    (tmp_path / "job.py").write_text(source)
    command = [*LAUNCHER, *options, "job.py", *args]
    return subprocess.run(command, cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=60)


SHOW = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
seen = {"argv": sys.argv, "path": sys.path[0], "name": __name__, **{n: os.environ.get(n) for n in names}}
open(f"seen-{os.environ['RANK']}.json", "w").write(json.dumps(seen))
"""


def test_ranks_get_their_place_and_the_arguments_unchanged(tmp_path: Path) -> None:
    args = ("--x", "a b", "--", "-y", "", "--num_gpus", "7", "-m")
    done = launch(tmp_path, SHOW, "--num_gpus", "2", args=args)
    assert done.returncode == 0, done.stderr
    seen = [json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in (0, 1)]
    for rank, one in enumerate(seen):
        assert one["argv"] == ["job.py", *args]
        assert (one["path"], one["name"]) == (str(tmp_path), "__main__")
        assert [one[n] for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")] == [str(rank), str(rank), "2", "2"]
        assert one["MASTER_ADDR"] == "127.0.0.1"
        assert int(one["OMP_NUM_THREADS"]) >= 1
    assert seen[0]["MASTER_PORT"] == seen[1]["MASTER_PORT"]


def test_a_module_runs_too_and_without_accelerators_one_rank_is_the_default(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SHOW)
    done = subprocess.run([*LAUNCHER, "-m", "job", "--", "a"], cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    seen = json.loads((tmp_path / "seen-0.json").read_text())
    assert (seen["WORLD_SIZE"], seen["argv"][1:]) == ("1", ["--", "a"])
    assert "1 rank on this host (no accelerator" in done.stderr


FAIL = """
import os, sys, time
def deep():
    raise ValueError("rank one says no")
if os.environ["RANK"] == "1":
    deep()
time.sleep(50)
"""


def test_a_rank_that_raises_ends_the_others_and_its_traceback_comes_last(tmp_path: Path) -> None:
    begin = time.monotonic()
    done = launch(tmp_path, FAIL, "--nproc_per_node", "2")
    assert time.monotonic() - begin < 30  # the other rank sleeps for 50
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("launcher: rank 1 failed first, with status 1") :]
    assert "in deep" in report and "runpy" not in report
    assert report.splitlines()[-1] == "ValueError: rank one says no"


@pytest.mark.parametrize(
    ("source", "status", "said"),
    [
        ("import sys; sys.exit(7)", 7, "status 7"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL"),
    ],
)
def test_the_exit_status_is_that_of_the_failed_rank(tmp_path: Path, source: str, status: int, said: str) -> None:
    done = launch(tmp_path, source)
    assert done.returncode == status
    assert said in done.stderr.splitlines()[-1]


WAIT = """
import os, time
open(f"pid-{os.environ['RANK']}.part", "w").write(str(os.getpid()))
os.rename(f"pid-{os.environ['RANK']}.part", f"pid-{os.environ['RANK']}")
time.sleep(50)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_every_rank(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "job.py").write_text(WAIT)
    process = subprocess.Popen([*LAUNCHER, "--num_gpus", "2", "job.py"], cwd=tmp_path, env=ENV, stderr=subprocess.PIPE, text=True)
    files = [tmp_path / "pid-0", tmp_path / "pid-1"]
    deadline = time.monotonic() + 30
    while not all(f.exists() for f in files):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert "Traceback" not in said
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ([], "no script given"),
        (["--num_gpus", "2"], "no script given"),
        (["nothing-here.py"], "no file 'nothing-here.py'"),
        (["--num_gpus", "0", __file__], "'0' is not a number of ranks"),
        (["--master_port=99999", __file__], "'99999' is not a port"),
        (["--num", "2", __file__], "unrecognized arguments"),
    ],
)
def test_a_wrong_command_line_is_named_with_status_2(argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse(argv)
    assert left.value.code == 2
    assert problem in capsys.readouterr().err


def test_options_end_where_the_script_begins() -> None:
    request = parse(["--num_gpus=2", "--master_port", "1234", "--", __file__, "--", "--num_gpus", "3"])
    assert (request.num_ranks, request.master_port, request.is_module) == (2, 1234, False)
    assert request.script_args == ("--", "--num_gpus", "3")


def test_help_needs_no_torch() -> None:
    code = "import sys; from stateroom.launcher.cli import build_parser; build_parser().format_help(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
