"""Run a script as one rank, exactly as Python would, and leave its traceback where the launcher finds it.

The elastic agent hands each rank a file for its error, but only scripts that are decorated for it ever write that file.
This wrapper writes it for any script; the rank's own streams stay untouched, so progress bars still see a terminal.
"""

from __future__ import annotations

import json
import runpy
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

from ..environment import inherited


def main() -> None:
    """Run `[-m] SCRIPT args…` from sys.argv as __main__."""
    is_module = sys.argv[1] == "-m"
    script, script_args = sys.argv[1 + is_module], sys.argv[2 + is_module :]
    sys.argv = [script, *script_args]
    sys.excepthook = record_exception
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path(script).resolve().parent)  # it held the current folder, as after any `python -m`
    runpy.run_path(script, run_name="__main__")


def record_exception(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
    """Print an uncaught exception as usual, and write it in the agent's format with the time it happened."""
    while tb is not None and tb.tb_next is not None and _is_ours(tb):
        tb = tb.tb_next
    text = "".join(traceback.format_exception(kind, error, tb))
    if issubclass(kind, KeyboardInterrupt):
        return  # Ctrl-C is no failure of this rank: a traceback from each would bury what the user was reading
    sys.stderr.write(text)
    sys.stderr.flush()
    path = inherited().get("TORCHELASTIC_ERROR_FILE")
    if path:
        # The agent compares whole seconds, too coarse to tell a cause from its echo in a peer; time_ns is ours.
        extra = {"py_callstack": text, "timestamp": str(int(time.time())), "time_ns": time.time_ns()}
        Path(path).write_text(json.dumps({"message": {"message": f"{kind.__name__}: {error}", "extraInfo": extra}}))


def _is_ours(tb: TracebackType) -> bool:
    name = tb.tb_frame.f_code.co_filename
    return name == __file__ or "runpy" in Path(name).name


if __name__ == "__main__":
    main()
