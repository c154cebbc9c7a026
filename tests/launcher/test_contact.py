"""Hosts are called all at once, and what keeps one from answering is told; ssh is played by a small program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENV = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
ENV |= {"STATEROOM_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
RUN = 'cd / && exec sh -c "${@: -1}"'  # its last argument is the remote command, which begins in another folder


NAMES = ("h-1", "h-2", "h-3")
Done = subprocess.CompletedProcess[str]


def launch(folder: Path, ssh: str, names: tuple[str, ...] = NAMES, script: tuple[str, ...] = ("job.py",)) -> Done:
    (folder / "bin").mkdir()
    (folder / "bin" / "ssh").write_text(f"#!/bin/bash\n{ssh}\n")
    (folder / "bin" / "ssh").chmod(0o755)
    (folder / "hosts").write_text("".join(f"{name} slots=1\n" for name in names))
    (folder / "job.py").write_text("import os; print(os.environ['RANK'])")
    env = {**ENV, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "stateroom.launcher", "-H", "hosts", "--master_addr", "127.0.0.1", *script]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=90)


def test_no_host_waits_for_another_to_be_called(tmp_path: Path) -> None:
    """Each call waits until all three are under way: one after the other, none would ever get through."""
    gate = 'touch "called-$$"; until [ "$(ls | grep -c called-)" -ge 3 ]; do :; done'
    done = launch(tmp_path, f"{gate}\n{RUN}")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[h-1:0] 0", "[h-2:1] 1", "[h-3:2] 2"]


@pytest.mark.parametrize(
    ("ssh", "problem"),
    [
        ("echo 'Permission denied (publickey).' >&2; exit 255", "ssh ended with status 255: Permission denied (publickey)."),
        ("echo 'sh: 1: exec: /x/python: not found' >&2; exit 127", "ssh ended with status 127: sh: 1: exec: /x/python: not found"),
        ("kill -9 $$", "ssh ended with signal 9"),
        ("echo hi; exit 0", "ssh ended with status 0: hi"),
    ],
)
def test_what_keeps_a_host_from_answering_is_told(tmp_path: Path, ssh: str, problem: str) -> None:
    done = launch(tmp_path, f'case "$*" in *h-2*) {ssh} ;; esac\n{RUN}')
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"launcher: h-2: {problem}", "launcher: 1 of 3 hosts cannot take part (above), nothing was started"]


def test_what_a_login_shell_prints_disturbs_nobody(tmp_path: Path) -> None:
    done = launch(tmp_path, f"echo 'Welcome to this host'; echo '*** motd ***' >&2\n{RUN}", names=("h-1", "h-2"))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[h-1:0] 0", "[h-2:1] 1"] and "motd" not in done.stderr


def test_a_host_with_another_torch_is_told_of(tmp_path: Path) -> None:
    """Its Python finds another version of the package first."""
    other = tmp_path / "other" / "torch-9.9.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9.9\n")
    change = f'case "$*" in *h-3*) command="${{command/PYTHONPATH=/PYTHONPATH={tmp_path / "other"}:}}" ;; esac'
    done = launch(tmp_path, f'command="${{@: -1}}"\n{change}\nexec sh -c "$command"')
    assert done.returncode == 2
    assert "launcher: h-3: torch 9.9.9, but h-1 has " in done.stderr


def test_a_module_is_looked_for_where_the_ranks_will_run(tmp_path: Path) -> None:
    assert launch(tmp_path, RUN, names=("h-1", "h-2"), script=("-m", "job")).returncode == 0
    (tmp_path / "bin" / "ssh").unlink()
    (tmp_path / "bin").rmdir()
    done = launch(tmp_path, RUN, names=("h-1", "h-2"), script=("-m", "job_nobody_has.sub"))
    assert done.returncode == 2 and "launcher: h-1: there is no module job_nobody_has" in done.stderr


def test_an_order_larger_than_a_pipe_arrives_whole(tmp_path: Path) -> None:
    words = tuple(f"{i:06d}" + "x" * 1000 for i in range(300))
    (tmp_path / "job2.py").write_text("import sys; print(len(sys.argv), len(''.join(sys.argv[1:])))")
    done = launch(tmp_path, RUN, names=("h-1", "h-2"), script=("job2.py", *words))
    assert sorted(done.stdout.splitlines()) == ["[h-1:0] 301 301800", "[h-2:1] 301 301800"], done.stderr
