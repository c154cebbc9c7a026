"""What would run on each host: every runner's command lines, without the program that it drives, and requests that are refused."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stateroom.launcher.cli import describe, main
from stateroom.launcher.job import orders_from_text
from stateroom.launcher.options import parse
from stateroom.launcher.plan import Plan, is_this_host, make_plan
from stateroom.launcher.problem import LaunchError
from stateroom.launcher.runners import Command

HOSTFILE = "w-1 slots=2\nbob@w-2 slots=4\nw-3 slots=1\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "hosts").write_text(HOSTFILE)
    return tmp_path


def plan(*words: str, env: dict[str, str] | None = None) -> tuple[Plan, list[Command]]:
    made = make_plan(parse([*words, "train.py", "--lr", "1e-3", "a b"]), env or {})
    return made, made.runner.commands(made.hosts, made.orders)


def test_ssh_one_process_a_host_with_what_the_user_gave() -> None:
    env = {"PYTHONPATH": "/p q", "NCCL_DEBUG": "INFO", "WANDB_KEY": "secret"}
    made, commands = plan("--hostfile", "hosts", "--ssh_port", "2222", "--launcher_args", "-F 'my config'", env=env)
    assert [c.places for c in commands] == [(0,), (1,), (2,)] and {c.way for c in commands} == {"stdio"}
    first = commands[1].argv
    assert first[:6] == ("ssh", "-T", "-p", "2222", "-F", "my config")  # before ours: the first setting counts
    assert first[6:11] == ("-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "bob@w-2")
    remote = shlex.split(first[11])
    assert remote[:6] == ["exec", "env", "PYTHONPATH=/p q", sys.executable, "-m", "stateroom.launcher.agent"]
    assert remote[remote.index("--node") + 1] == "1" and remote[remote.index("--check_file") + 1] == "train.py"
    assert [order.num_ranks for order in made.orders] == [2, 4, 1]
    job = made.orders[0].job
    assert job.env == {"PYTHONPATH": "/p q", "NCCL_DEBUG": "INFO"} and job.script_args == ("--lr", "1e-3", "a b")
    assert "INFO" not in " ".join(w for c in commands for w in c.argv)  # values travel inside the connection


def test_include_and_the_first_hosts_reach_the_orders() -> None:
    made, commands = plan("-H", "hosts", "-i", "w-2:3,1@w-1")
    assert [(h.name, h.slots) for h in made.hosts] == [("w-1", (0, 1)), ("w-2", (1, 3))]
    assert [(o.slots, o.num_ranks) for o in made.orders] == [(None, 2), ((1, 3), 2)] and len(commands) == 2
    made, _ = plan("-H", "hosts", "--num_nodes", "2", "--num_gpus", "1")
    assert [(o.host, o.num_ranks) for o in made.orders] == [("w-1", 1), ("w-2", 1)]


def test_pdsh_goes_over_ssh_and_gives_each_host_all_orders() -> None:
    _, (command,) = plan("-H", "hosts", "--launcher", "pdsh", "--ssh_port", "22", "--master_addr", "10.0.0.1")
    assert command.argv[:7] == ("pdsh", "-R", "ssh", "-S", "-N", "-f", "3") and command.way == "lifeline"
    assert command.argv[7:9] == ("-w", "w-1,bob@w-2,w-3") and "-p 22" in command.env["PDSH_SSH_ARGS_APPEND"]
    orders = orders_from_text(command.argv[-1])
    assert [(o.host, o.node, o.num_ranks) for o in orders] == [("w-1", 0, 2), ("w-2", 1, 4), ("w-3", 2, 1)]
    assert {(o.address, o.port, o.kind, o.led) for o in orders} == {("10.0.0.1", 29500, "c10d", False)}
    assert not any("%" in word for word in command.argv)  # which pdsh would replace


def test_mpi_one_process_a_host_and_variables_by_name(folder: Path) -> None:
    (folder / "hosts").write_text("w-1 slots=2\nw-2 slots=2\n")
    env = {"NCCL_DEBUG": "INFO"}
    _, (command,) = plan("-H", "hosts", "--launcher", "openmpi", "--launcher_args=--mca x y", env=env)
    text = " ".join(command.argv)
    assert text.startswith("mpirun -np 2 --host w-1:1,w-2:1 --map-by ppr:1:node --bind-to none -x NCCL_DEBUG --mca x y")
    assert command.env == env and orders_from_text(command.argv[-1])[0].job.env == {}
    _, (command,) = plan("-H", "hosts", "--launcher", "mpich", env=env)
    assert " ".join(command.argv).startswith("mpirun -n 2 -ppn 1 -hosts w-1,w-2 -genvlist NCCL_DEBUG")


SLURM = {"SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "4(x2)"}


@pytest.mark.parametrize("words", [(), ("--launcher", "slurm")])
def test_slurm_takes_hosts_ranks_and_port_from_the_allocation(words: tuple[str, ...]) -> None:
    made, (command,) = plan(*words, env=SLURM)
    assert command.argv[:5] == ("srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--nodelist=n1,n2")
    assert "--kill-on-bad-exit=1" in command.argv and command.way == "speak"
    assert {(o.address, o.port, o.num_ranks) for o in made.orders} == {("n1", 20000 + 345, 4)}
    assert plan("--num_nodes", "1", "--num_gpus", "2", env=SLURM)[0].orders[0].num_ranks == 2
    assert "--kill-on-bad-exit=0" in plan("--max_restarts", "1", env=SLURM)[1][0].argv


def test_a_task_of_a_slurm_step_is_one_node_of_the_job() -> None:
    made, (command,) = plan(env={**SLURM, "SLURM_STEP_ID": "0", "SLURM_NODEID": "1"})
    (order,) = made.orders
    assert (order.node, order.max_nodes, order.address, order.kind, order.led) == (1, 2, "n1", "c10d", False)
    assert command.way == "pipes" and made.hosts[0].name == "n2"


def test_a_pod_of_an_indexed_job_is_one_node_of_the_job() -> None:
    words = ("--launcher", "kubernetes", "--num_nodes", "3", "--num_gpus", "2", "--master_addr", "llama-0.llama")
    (order,) = plan(*words, env={"JOB_COMPLETION_INDEX": "2"})[0].orders
    assert (order.node, order.max_nodes, order.num_ranks, order.address, order.port) == (2, 3, 2, "llama-0.llama", 29500)
    with pytest.raises(LaunchError, match="inside a pod of an indexed Job"):
        plan(*words)


def test_no_ssh_is_one_node_of_the_job() -> None:
    (order,) = plan("--no_ssh", "--node_rank", "1", "-H", "hosts")[0].orders
    assert (order.node, order.max_nodes, order.num_ranks, order.address, order.port) == (1, 3, 4, "w-1", 29500)
    words = ("--no_ssh", "--node_rank", "0", "--num_nodes", "2", "--master_addr", "h", "--elastic_training")
    (order,) = plan(*words)[0].orders
    assert (order.min_nodes, order.max_nodes, order.num_ranks) == (1, 2, 0)


def test_one_listed_host_that_is_this_one_needs_no_ssh(folder: Path) -> None:
    (folder / "hosts").write_text("127.0.0.1 slots=2\n")
    made, (command,) = plan("-H", "hosts")
    assert command.way == "pipes" and made.orders[0].num_ranks == 2 and made.orders[0].address == "127.0.0.1"
    assert plan("-H", "hosts", "--force_multi")[1][0].argv[0] == "ssh"
    assert plan("--force_multi", "--num_gpus", "2")[1][0].argv[-2] == "localhost"
    (folder / "hosts").write_text("192.0.2.77 slots=2\n")  # an address for documentation, nobody's
    assert plan("-H", "hosts")[1][0].argv[0] == "ssh"


def test_this_host_is_known_by_its_addresses() -> None:
    assert is_this_host("localhost") and is_this_host("127.0.0.1") and is_this_host(socket.gethostname())
    assert not is_this_host("192.0.2.77") and not is_this_host("no-such-host.invalid") and not is_this_host("a" * 300)


def test_slots_of_this_host_can_be_named() -> None:
    assert plan("-i", "localhost:0,2")[0].orders[0].slots == (0, 2)
    (order,) = plan("-i", "localhost")[0].orders
    assert (order.slots, order.num_ranks) == (None, 0)


REFUSED = [
    (["-H", "none"], "cannot read the hostfile 'none'"),
    (["-H", "hosts", "-i", "w-1", "-e", "w-2"], "cannot be combined"),
    (["-H", "hosts", "-i", "w-1", "--num_gpus", "1"], "so --num_nodes and --num_gpus cannot be given"),
    (["-H", "hosts", "--num_nodes", "4"], "there are only 3"),
    (["-H", "hosts", "--num_gpus", "2"], "w-3 has only 1 slots"),
    (["--num_nodes", "2"], "needs a --hostfile"),
    (["--launcher", "pdsh"], "needs a --hostfile"),
    (["-e", "localhost:0"], "--exclude needs a --hostfile"),
    (["-i", "w-1"], "no host 'w-1'; there are localhost"),
    (["--launcher", "local", "-H", "hosts"], "--launcher local starts this host only"),
    (["--launcher", "slurm"], "inside an allocation"),
    (["--launcher", "kubernetes", "--num_nodes", "2"], "inside a pod"),
    (["--node_rank", "1"], "--node_rank is for --no_ssh"),
    (["--no_ssh"], "--no_ssh needs --node_rank"),
    (["--no_ssh", "--node_rank", "0"], "--no_ssh needs --num_nodes"),
    (["--no_ssh", "--node_rank", "0", "--num_nodes", "2"], "--no_ssh needs --master_addr"),
    (["--no_ssh", "--node_rank", "2", "--num_nodes", "2", "--master_addr", "a"], "--node_rank 2: there are 2 hosts"),
    (["--no_ssh", "--node_rank", "0", "--launcher", "ssh"], "--launcher ssh cannot be given as well"),
    (["--min_elastic_nodes", "1"], "need --elastic_training"),
    (["-H", "hosts", "--elastic_training", "--min_elastic_nodes", "4"], "more than the 3 hosts"),
    (["--launcher", "local", "--force_multi"], "--force_multi goes over ssh"),
    (["-H", "hosts", "--no_tags"], "--no_tags is for a job on this host alone"),
    (["-H", "hosts", "--launcher", "openmpi"], "mpirun takes no user names"),
    (["-H", "hosts", "--launcher", "pdsh", "--rdzv_backend", "static", "--max_restarts", "1"], "cannot restart here"),
    (["--bind_core_list", "x"], "--bind_core_list 'x'"),
    (["--env_file", "none"], "cannot read the file of variables"),
    (["--export", "NO_SUCH_VARIABLE"], "there is no variable NO_SUCH_VARIABLE"),
]


@pytest.mark.parametrize(("words", "problem"), REFUSED)
@pytest.mark.parametrize("dry", [(), ("--dry_run",)])
def test_requests_that_cannot_be_met_are_refused_in_one_line(
    words: list[str], problem: str, dry: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_ID", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)
    assert main([*dry, *words, "train.py"]) == 2
    out, err = capsys.readouterr()
    assert problem in err and err.startswith("launcher: ") and len(err.splitlines()) == 1 and out == ""


def test_ipv6_hosts_that_a_program_cannot_take_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "hosts").write_text("fe80::1 slots=1\nfe80::2 slots=1\n")
    for name in ("pdsh", "openmpi"):
        assert main(["-H", "hosts", "--launcher", name, "train.py"]) == 2
        assert "IPv6 address fe80::1" in capsys.readouterr().err


def test_a_program_that_is_missing_is_named(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    assert main(["-H", "hosts", "train.py"]) == 2
    assert "--launcher ssh needs the program ssh" in capsys.readouterr().err


def test_a_dry_run_tells_everything_and_starts_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setenv("NCCL_DEBUG", "very secret")
    assert main(["-H", "hosts", "--dry_run", "train.py", "--lr", "1"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert [line.partition(": ssh")[0] for line in lines[:3]] == ["w-1", "w-2", "w-3"]
    assert "# w-2: 4 ranks" in lines and "NCCL_DEBUG" in text and "very secret" not in text
    assert any(line.startswith("# each rank: ") and line.endswith("train.py --lr 1") for line in lines)


def test_a_dry_run_for_64_hosts_is_no_work(folder: Path) -> None:
    (folder / "hosts").write_text("".join(f"host-{i} slots=8\n" for i in range(64)))
    begin = time.process_time()
    made, commands = plan("-H", "hosts")
    text = describe(made, commands)
    assert len(commands) == 64 and text.count("8 ranks") == 64
    assert time.process_time() - begin < 1  # a bound on work, not on a loaded machine's clock
    code = "import sys, stateroom.launcher.cli as c; c.main(['-H', 'hosts', '--dry_run', 'train.py']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0
