"""Progress of long commands: a line every few seconds where there is no terminal, a bar where there is one."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest
from stateroom.checkpoint.batch import Batch
from stateroom.checkpoint.progress import Progress, size


def test_lines_come_at_most_every_five_seconds(capsys):
    now = [0.0]
    with Progress("converting", 1000, clock=lambda: now[0]) as progress:
        for second in (1, 4, 5, 6, 9, 11, 20):
            now[0] = float(second)
            progress.advance(100)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "converting: 300 B of 1.0 kB (30 %), 60 B/s",
        "converting: 600 B of 1.0 kB (60 %), 55 B/s",
        "converting: 700 B of 1.0 kB (70 %), 35 B/s",
    ]


def test_a_terminal_gets_a_bar():
    code = "from stateroom.checkpoint.progress import Progress\nwith Progress('converting', 10) as p: p.advance(10)"
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", code], stderr=theirs, check=True, timeout=60, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    said = b""
    while chunk := read(ours):
        said += chunk
    assert b"converting" in said and b"10/10 bytes" in said


def read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the other end is closed
        return b""


def test_sizes_for_people():
    assert [size(n) for n in (0, 999, 1000, 2_500_000, 3e9, 4.2e12)] == ["0 B", "999 B", "1.0 kB", "2.5 MB", "3.0 GB", "4.20 TB"]


# ---- batches


def test_a_batch_shows_all_of_its_files_or_none(tmp_path):
    with pytest.raises(ZeroDivisionError), Batch() as batch:
        batch.write(tmp_path / "a", lambda file: file.write(b"1"))
        batch.write(tmp_path / "b", lambda file: file.write(b"%d" % (1 // 0)))
    assert list(tmp_path.iterdir()) == []
    with Batch() as batch:
        batch.write(tmp_path / "a", lambda file: file.write(b"1"))
        batch.write(tmp_path / "sub" / "b", lambda file: file.write(b"2"))
        assert not (tmp_path / "a").exists()
    assert (tmp_path / "a").read_bytes() == b"1" and (tmp_path / "sub" / "b").read_bytes() == b"2"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b", "sub"]
