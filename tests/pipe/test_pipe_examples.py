"""The examples run: both ways of writing a model, and the drawings."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "pipeline"


def test_every_schedule_is_drawn(tmp_path):
    words = [sys.executable, str(FOLDER / "draw.py"), "--stages", "2", "--micro_batches", "4", "--folder", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    drawings = sorted(path.stem for path in tmp_path.glob("*.svg"))
    assert drawings == ["1f1b", "dualpipev", "gpipe", "inference", "interleaved-1f1b", "zbv", "zero-bubble"]
    for path in tmp_path.glob("*.svg"):
        ElementTree.parse(path)
    assert done.stdout.count(": bubble") == len(drawings)


@pytest.mark.full
@pytest.mark.parametrize(("way", "schedule"), [("layers", "zbv"), ("auto", "1f1b")])
def test_both_ways_learn(way, schedule):
    words = [sys.executable, "-m", "stateroom.launcher", "--num_gpus", "2", str(FOLDER / "train.py"), "--way", way, "--schedule", schedule]
    done = subprocess.run([*words, "--steps", "12", "--tied"], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    first, last = map(float, re.search(r"evaluation loss ([\d.]+) -> ([\d.]+)", done.stdout).groups())
    assert last < first - 0.5
