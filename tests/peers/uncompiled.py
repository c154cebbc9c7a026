"""Run a script with DeepSpeed's compiled shared-memory collectives switched off: uncompiled.py SCRIPT ARGUMENTS."""

from __future__ import annotations

import runpy
import sys
from typing import Any


def switch_off_compiling(package: Any) -> None:
    """Let gloo do what DeepSpeed would compile an extension for, which takes minutes and rounds otherwise."""
    package.ops.__compatible_ops__["deepspeed_shm_comm"] = False


if __name__ == "__main__":
    import deepspeed

    switch_off_compiling(deepspeed)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
