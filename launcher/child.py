"""Run a script as one rank, exactly as Python would, and leave its traceback where the launcher finds it.

The elastic agent hands each rank a file for its error, but only scripts that are decorated for it ever write that file.
This wrapper writes it for any script. The launcher prints the traceback at its end, once, so it is not printed here.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

from ..environment import inherited, set_for_children
from .cores import share

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def main() -> None:
    """Run `[--parent PID] [--cores LIST] [--local_rank] [-m] SCRIPT args…` from sys.argv as __main__."""
    words, local_rank = sys.argv[1:], inherited().get("LOCAL_RANK", "0")
    added: list[str] = []
    while words[0].startswith("--"):
        option = words.pop(0)
        if option == "--parent":
            _end_with(int(words.pop(0)))
        elif option == "--cores":
            _bind([int(core) for core in words.pop(0).split(",")], int(local_rank))
        elif option == "--local_rank":
            added = [f"--local_rank={local_rank}"]
    is_module = words[0] == "-m"
    sys.argv = [*words[is_module : is_module + 1], *added, *words[is_module + 1 :]]
    sys.excepthook = hook = record_exception
    try:
        _run(sys.argv[0], is_module)
    except KeyboardInterrupt:
        raise
    except Exception as error:
        # A hook that the script put in place of ours has its say, and the launcher its record.
        if sys.excepthook is not hook:
            sys.excepthook(type(error), error, error.__traceback__)
        record_exception(type(error), error, error.__traceback__)
        sys.exit(1)


def _run(script: str, is_module: bool) -> None:
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path(script).resolve().parent)  # it held the current folder, as after any `python -m`
    runpy.run_path(script, run_name="__main__")


def record_exception(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
    """Write an uncaught exception in the agent's format with the time it happened; without an agent's file, print it."""
    now = time.time_ns()
    if issubclass(kind, KeyboardInterrupt):
        return  # Ctrl-C is no failure of this rank: a traceback from each would bury what the user was reading
    while tb is not None and tb.tb_next is not None and _is_ours(tb):
        tb = tb.tb_next
    text = "".join(traceback.format_exception(kind, error, tb))
    path = inherited().get("TORCHELASTIC_ERROR_FILE")
    # The agent compares whole seconds, too coarse to tell a cause from its echo in a peer; time_ns is ours.
    extra = {"py_callstack": text, "timestamp": str(now // 10**9), "time_ns": now}
    record = json.dumps({"message": {"message": f"{kind.__name__}: {error}", "extraInfo": extra}})
    try:
        if path:
            Path(path + ".part").write_text(record)
            os.replace(path + ".part", path)
            return
    except OSError as problem:
        text += f"(the launcher's record of this could not be written: {problem})\n"
    sys.stderr.write(text)
    sys.stderr.flush()


def _is_ours(tb: TracebackType) -> bool:
    name = tb.tb_frame.f_code.co_filename
    return name == __file__ or "runpy" in Path(name).name


def _end_with(parent: int) -> None:
    """Have the kernel end this rank when its agent is killed, so that none is left behind (Linux)."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


def _bind(cores: list[int], local_rank: int) -> None:
    """Keep this rank on its share of the cores, with as many threads, before any library counts them."""
    own = share(cores, local_rank, int(inherited().get("LOCAL_WORLD_SIZE", "1")))
    os.sched_setaffinity(0, own)
    set_for_children("OMP_NUM_THREADS", str(len(own)))


if __name__ == "__main__":
    main()
