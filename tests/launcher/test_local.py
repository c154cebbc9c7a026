"""The launcher: what reaches the ranks, what comes back from them, and that none is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from stateroom.launcher.options import parse

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


def test_every_line_has_its_host_and_rank_and_a_single_rank_keeps_the_terminal(tmp_path: Path) -> None:
    source = "import os, sys; print('out', os.environ['RANK']); print('err', file=sys.stderr); sys.stdout.write('no end')"
    done = launch(tmp_path, source, "--num_gpus", "2")
    host = socket.gethostname()
    assert sorted(done.stdout.splitlines()) == sorted(f"[{host}:{r}] {text}" for r in (0, 1) for text in (f"out {r}", "no end"))
    assert sorted(line for line in done.stderr.splitlines() if "launcher:" not in line) == [f"[{host}:0] err", f"[{host}:1] err"]
    assert launch(tmp_path, source, "--num_gpus", "1").stdout == "out 0\nno end"
    assert launch(tmp_path, "print('x')", "--num_gpus", "2", "--no_tags").stdout.replace("\n", "") == "xx"


def test_quiet_ranks_and_a_file_for_each_rank(tmp_path: Path) -> None:
    source = "import os; print('hello from', os.environ['RANK']); assert os.environ['RANK'] == '0', 'not me'"
    done = launch(tmp_path, source, "--num_gpus", "2", "--quiet_ranks", "--enable_each_rank_log", "logs")
    assert "hello from 0" in done.stdout and "hello from 1" not in done.stdout
    assert done.returncode == 1 and done.stderr.rstrip().endswith("AssertionError: not me")
    logs = [(tmp_path / "logs" / f"rank_{rank}.log").read_text() for rank in (0, 1)]
    assert logs[0] == "hello from 0\n"
    assert logs[1].startswith("hello from 1\nTraceback") and logs[1].endswith("AssertionError: not me\n")


BARS = """
import sys, time
for i in range(200):
    sys.stderr.write(f"\\r{i + 1}/200 " + "#" * (i // 4))
    sys.stderr.flush()
sys.stderr.write("\\n")
print("done")
"""


def test_progress_bars_come_whole(tmp_path: Path) -> None:
    done = launch(tmp_path, BARS, "--num_gpus", "2")
    bars = [line for line in done.stderr.splitlines() if "/200" in line]
    whole = re.compile(rf"\[{socket.gethostname()}:[01]\] (\d+)/200 (#*)")
    found = [whole.fullmatch(bar) for bar in bars]
    assert all(match and len(match[2]) == (int(match[1]) - 1) // 4 for match in found), bars
    assert sum(match is not None and match[1] == "200" for match in found) == 2


def test_named_slots_are_the_devices_that_ranks_see(tmp_path: Path) -> None:
    source = "import os; print(os.environ['WORLD_SIZE'], os.environ['CUDA_VISIBLE_DEVICES'])"
    assert "2 1,3" in launch(tmp_path, source, "-i", "localhost:1,3").stdout
    env = {**ENV, "CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    words = [*LAUNCHER, "-i", "localhost:3", "job.py"]
    assert "1 7" in subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True).stdout
    done = subprocess.run([*LAUNCHER, "-i", "localhost:4", "job.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "slot 4 was asked for, but CUDA_VISIBLE_DEVICES=4,5,6,7 shows 4 devices" in done.stderr


def test_cores_are_bound_and_threads_follow(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("one core cannot be shared out to two ranks")
    source = "import os; print(os.environ['RANK'], sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])"
    done = launch(tmp_path, source, "--num_gpus", "2", "--bind_core_list", ",".join(map(str, cores)))
    assert all(f"{rank} [{core}] 1" in done.stdout for rank, core in enumerate(cores)), done.stdout + done.stderr
    done = launch(tmp_path, source, "--num_gpus", "3", "--bind_core_list", ",".join(map(str, cores)))
    assert done.returncode == 1 and "3 ranks cannot be bound to 2 cores" in done.stderr


def test_programs_and_the_rank_as_an_argument(tmp_path: Path) -> None:
    done = subprocess.run(
        [*LAUNCHER, "--num_gpus", "1", "--no_python", "sh", "-c", "echo $RANK of $WORLD_SIZE"],
        cwd=tmp_path,
        env=ENV,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "0 of 1\n", done.stderr
    done = launch(tmp_path, "import sys; print(sys.argv[1:])", "--num_gpus", "2", "--pass_local_rank", args=("-x",))
    assert all(f"['--local_rank={rank}', '-x']" in done.stdout for rank in (0, 1))


def test_process_ids_are_saved_while_the_job_runs(tmp_path: Path) -> None:
    source = """
import glob, json, os, time
deadline = time.monotonic() + 30
while time.monotonic() < deadline:
    found = [json.load(open(path)) for path in glob.glob("*.stateroom")]
    if found and str(os.environ["RANK"]) in found[0]["ranks"]:
        assert found[0]["ranks"]["0"][1] == os.getpid()
        break
else:
    raise SystemExit(5)
"""
    (tmp_path / "job.py").write_text(source)
    env = {**ENV, "TMPDIR": str(tmp_path)}
    done = subprocess.run([*LAUNCHER, "--num_gpus", "1", "--save_pid", "job.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob("*.stateroom"))


AGAIN = """
import os, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("attempt", attempt, "of", os.environ["TORCHELASTIC_MAX_RESTARTS"], os.environ["MASTER_PORT"], flush=True)
dist.barrier()
if dist.get_rank() == 1 and int(attempt) < int(sys.argv[1]):
    raise ValueError(f"no luck in attempt {attempt}")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["static", pytest.param("c10d", marks=pytest.mark.full)])
def test_restarts_are_counted_and_plain_torch_meets_again(tmp_path: Path, kind: str) -> None:
    done = launch(tmp_path, AGAIN, "--num_gpus", "2", "--max_restarts", "2", "--rdzv_backend", kind, args=("2",))
    assert done.returncode == 0, done.stderr
    assert [done.stdout.count(f"attempt {n} of 2") for n in range(4)] == [2, 2, 2, 0]
    assert done.stderr.count("ValueError: no luck") == 2 and "launcher: restart 2 of 2" in done.stderr


def test_when_no_restart_is_left_the_last_failure_counts(tmp_path: Path) -> None:
    done = launch(tmp_path, AGAIN, "--num_gpus", "2", "--max_restarts", "1", args=("9",))
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == "ValueError: no luck in attempt 1"


def test_what_a_rank_started_ends_with_it_when_the_job_fails(tmp_path: Path) -> None:
    source = """
import os, subprocess, sys
with open("helper-" + os.environ["RANK"], "w") as file:
    file.write(str(subprocess.Popen(["sleep", "100"]).pid))
sys.exit(3)
"""
    assert launch(tmp_path, source, "--num_gpus", "2").returncode == 3
    # The rank that did not fail first may have been ended before it wrote.
    pids = [int(text) for path in tmp_path.glob("helper-*") if (text := path.read_text())]
    assert pids and not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


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
    report = done.stderr[done.stderr.index(f"launcher: rank 1 on {socket.gethostname()} failed first, with status 1") :]
    assert "in deep" in report and "runpy" not in report and done.stderr.count("Traceback") == 1
    assert report.splitlines()[-1] == "ValueError: rank one says no"


SLOW_TO_END = """
import atexit, os, time
if os.environ["RANK"] == "1":
    atexit.register(time.sleep, 30)
    try:
        raise ValueError("the cause")
    finally:
        open("raised", "w").close()
while not os.path.exists("raised"):
    time.sleep(0.01)
time.sleep(0.3)
raise RuntimeError("a consequence")
"""


def test_a_rank_that_is_slow_to_end_is_the_cause_all_the_same(tmp_path: Path) -> None:
    done = launch(tmp_path, SLOW_TO_END, "--num_gpus", "2")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: the cause"
    assert f"rank 0 on {socket.gethostname()} failed after it, with status 1: RuntimeError: a consequence" in done.stderr


@pytest.mark.parametrize(
    ("source", "status", "said"),
    [
        ("import sys; sys.exit(7)", 7, "status 7"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL"),
        ("import os; os._exit(5)", 5, "status 5"),
        ("import no_such_module", 1, "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def broken(:", 1, "SyntaxError"),
        ("import sys; sys.excepthook = lambda *a: print('mine', a[0]); 1 / 0", 1, "ZeroDivisionError: division by zero"),
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
    process = subprocess.Popen(
        [*LAUNCHER, "--num_gpus", "2", "job.py"],
        cwd=tmp_path,
        env=ENV,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # tests that run in the background inherit an ignored SIGINT
    )
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


def test_a_reader_that_closes_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(WAIT.replace("import os, time", "import os, time\nprint('one line', flush=True)"))
    command = [*LAUNCHER, "--num_gpus", "2", "job.py"]
    process = subprocess.Popen(command, cwd=tmp_path, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(40) == 128 + signal.SIGPIPE


def test_a_job_outlives_its_terminal_under_nohup(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(WAIT.replace("time.sleep(50)", "time.sleep(2)"))
    command = ["nohup", *LAUNCHER, "--num_gpus", "1", "job.py"]
    process = subprocess.Popen(command, cwd=tmp_path, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not (tmp_path / "pid-0").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGHUP)
    assert process.wait(30) == 0


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
    code = (
        "import sys; from stateroom.launcher.options import build_parser; build_parser()[0].format_help()\nsys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
