"""Packages that only one test looks with: installed aside, so that nothing of theirs meets what is tested."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path


def aside(*requirements: str) -> Path | None:
    """Return a folder with these packages and what they need, for PYTHONPATH, or None when they cannot be had."""
    name = "-".join(requirements).replace("=", "")
    folder = Path(tempfile.gettempdir(), f"stateroom-tests-{os.getuid()}-{sys.version_info[1]}-{name}")
    if (folder / "complete").exists():
        return folder
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", str(folder), *requirements]
    if subprocess.run(command, capture_output=True).returncode:
        return None
    (folder / "complete").touch()
    return folder


def run_with(folder: Path, code: str, *args: str) -> str:
    """Return what a Python program prints that sees these packages, and fail with what it says if it does."""
    env = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", code, *args], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
