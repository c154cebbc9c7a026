"""Run a script that was written for transformers or accelerate with DeepSpeed, unchanged, on Stateroom.

python -m stateroom.hf train.py ...                                              one rank
launcher --num_gpus 4 -m stateroom.hf train.py ...                               four, by Stateroom's launcher (torchrun works alike)
python -m stateroom.hf accelerate launch --use_deepspeed [options] train.py ...  as many as accelerate's options say
python -m stateroom.hf -m package.train ...                                      a module instead of a file
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from ..environment import inherited
from .alias import enable


def main(argv: list[str] | None = None) -> int:
    """Enable the alias, then run what the command line names; return 2 when it names nothing that can be run."""
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if args else 2
    if args[:2] == ["accelerate", "launch"]:
        from .accelerate_launch import launch

        enable()
        return launch(args[2:])
    is_module = args[0] == "-m"
    target = args[1] if is_module and len(args) > 1 else args[0]
    if target == "-m" or (not is_module and not Path(target).is_file()):
        print(f"python -m stateroom.hf: there is no file {target!r} to run; use -m for a module, --help for examples", file=sys.stderr)
        return 2
    enable()
    if inherited().get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        from .accelerate_launch import meet_without_accelerator

        meet_without_accelerator()
    _run(target, args[1 + is_module :], is_module)
    return 0


def _run(target: str, args: list[str], is_module: bool) -> None:
    """Run a file or module as Python itself would."""
    sys.argv = [target, *args]
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path(target).resolve().parent)  # it holds the current folder, as after any `python -m`
    runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    sys.exit(main())
