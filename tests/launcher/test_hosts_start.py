"""A job on three hosts over ssh: it starts as it would here, or says what a host lacks before anything starts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from host_jobs import ENV, LAUNCHER, MEET, SHOW, command, run
from namespaces import Hosts, install

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "llama"
pytestmark = pytest.mark.full  # minutes of processes on three hosts


def test_ranks_follow_the_hostfile_and_share_folder_python_and_variables(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SHOW)
    (tmp_path / ".deepspeed_env").write_text("FILED=from the file\n")
    names = [hosts.names[2], hosts.names[0], hosts.names[1]]
    words = command(hosts, tmp_path, "--export", "MINE=a b", "job.py", "--x", "it's $HOME", names=names)
    done = subprocess.run(words, cwd=tmp_path, env={**ENV, "NCCL_DEBUG": "WARN"}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    seen = {}
    for line in done.stdout.splitlines():
        tag, _, text = line.partition("] ")
        seen[tag.lstrip("[")] = json.loads(text)
    assert list(sorted(seen)) == sorted(f"{name}:{rank}" for rank, name in enumerate(names))
    for rank, name in enumerate(names):
        one = seen[f"{name}:{rank}"]
        assert one["argv"] == ["job.py", "--x", "it's $HOME"]
        assert (one["cwd"], one["python"]) == (str(tmp_path), sys.executable)
        assert [one[n] for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")] == [str(rank), "0", "3", "1"]
        assert one["MASTER_ADDR"] == hosts.addresses[2]  # where ssh reached the first host
        assert (one["NCCL_DEBUG"], one["MINE"], one["FILED"]) == ("WARN", "a b", "from the file")
    assert len({one["MASTER_PORT"] for one in seen.values()}) == 1


def test_hosts_that_find_each_other_have_the_order_of_the_hostfile_too(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(MEET)
    names = [hosts.names[2], hosts.names[0], hosts.names[1]]
    done = run(hosts, tmp_path, "--rdzv_backend", "c10d", "job.py", names=names)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(f"[{name}:{rank}] 7 0" for rank, name in enumerate(names))


def test_the_llama_example_has_the_losses_of_three_local_ranks(hosts: Hosts, tmp_path: Path) -> None:
    sizes = ["--steps", "3", "--dim", "32", "--layers", "2", "--heads", "2", "--seq_len", "32", "--bytes"]
    script = [str(EXAMPLE / "train.py"), "--config", str(EXAMPLE / "configs" / "zero3.json"), *sizes, "--run_dir"]
    done = run(hosts, tmp_path, *script, "far")
    assert done.returncode == 0, done.stderr
    local = subprocess.run([*LAUNCHER, "--num_gpus", "3", *script, "near"], cwd=tmp_path, env=ENV, capture_output=True, text=True)
    assert local.returncode == 0, local.stderr
    far, near = (histories(tmp_path / name) for name in ("far", "near"))
    assert far == near
    assert len(far) == 3 and all(len(history["loss"]) == 3 for history in far)


def histories(run_dir: Path) -> list[dict]:
    files = sorted(run_dir.glob("checkpoints/*/*.pt"))
    return [torch.load(file, weights_only=False)["client_state"]["history"] for file in files]


def test_what_a_host_lacks_is_named_before_anything_starts(hosts: Hosts, tmp_path: Path) -> None:
    script = hosts.not_on_the_last / "job.py"
    script.write_text("open('started', 'w')")
    done = run(hosts, tmp_path, str(script))
    assert done.returncode == 2
    assert f"launcher: worker-3: there is no file {script}" in done.stderr
    assert "worker-1" not in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "started").exists()
    elastic = run(hosts, tmp_path, "--elastic_training", "--min_elastic_nodes", "2", str(script))
    assert elastic.returncode == 0, elastic.stderr  # two hosts are enough
    assert "launcher: 2 hosts: worker-1, worker-2" in elastic.stderr


def test_a_host_that_cannot_be_reached_is_named(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SHOW)
    done = run(hosts, tmp_path, "job.py", names=["worker-1", "no-such-host.invalid"])
    assert done.returncode == 2
    assert "launcher: no-such-host.invalid: ssh ended with status 255: " in done.stderr
    assert "1 of 2 hosts cannot take part" in done.stderr


def test_a_port_that_is_taken_is_named(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SHOW)
    done = run(hosts, tmp_path, "--master_port", "22", "job.py")
    assert done.returncode == 2
    assert "launcher: worker-1: port 22 is not free" in done.stderr
    done = run(hosts, tmp_path, "--master_port", "23456", "job.py")
    assert done.returncode == 0 and done.stdout.count('"MASTER_PORT": "23456"') == 3


@pytest.mark.parametrize("fails", [False, True])
def test_pdsh_over_ssh(hosts: Hosts, tmp_path: Path, fails: bool) -> None:
    if shutil.which("pdsh") is None:
        install("pdsh")
    if shutil.which("pdsh") is None:
        pytest.skip("pdsh is not installed, and apt-get could not install it")
    (tmp_path / "job.py").write_text(MEET + ("if comm.get_rank() == 2: raise ValueError('no')\ncomm.barrier()\n" if fails else ""))
    (tmp_path / "hosts").write_text("".join(f"root@{address} slots=1\n" for address in hosts.addresses))
    env = {**ENV, "PDSH_SSH_ARGS_APPEND": f"-F {hosts.ssh_config}"}
    words = [*LAUNCHER, "--hostfile", "hosts", "--launcher", "pdsh", "job.py"]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert sorted(done.stdout.splitlines()) == sorted(f"[{address}:{rank}] 7 0" for rank, address in enumerate(hosts.addresses)), (
        done.stderr
    )
    assert done.returncode == int(fails)
    assert not fails or done.stderr.splitlines()[-1] == "ValueError: no"
