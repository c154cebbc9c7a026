"""`accelerate launch` with the alias in its own process and in each rank that it starts."""

from __future__ import annotations

import sys

from ..environment import read_launch
from ..parallel import backend_for

MODULE = f"{__package__}"


def launch(argv: list[str]) -> int:
    """Run accelerate's launcher on its own command line; every rank runs the script through `python -m stateroom.hf`.

    Returns:
        0 when all ranks ended well; accelerate raises or exits otherwise. 2: it would need DeepSpeed's own launcher.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser

    args = launch_command_parser().parse_args(argv)
    if args.no_python:
        print(f"{MODULE}: --no_python starts no Python, so there is nothing to run on Stateroom", file=sys.stderr)
        return 2
    as_module = ["-m"] if args.module else []
    args.training_script_args = [*as_module, args.training_script, *args.training_script_args]
    args.training_script, args.module = MODULE, True
    try:
        launch_command(args)
    except FileNotFoundError as error:
        if error.filename != "deepspeed":
            raise
        print(
            f"{MODULE}: on several hosts accelerate starts DeepSpeed's own launcher, which is not here; add "
            "--deepspeed_multinode_launcher standard and start this on every host, or use Stateroom's launcher",
            file=sys.stderr,
        )
        return 2
    return 0


def meet_without_accelerator() -> None:
    """Where there is no accelerator, form accelerate's process group now, before the script asks for it.

    Under DeepSpeed accelerate 1.15 picks no backend for the CPU and then counts one process, whatever was launched; a
    state that exists already is taken as it is. An `Accelerator()` of an unmodified script then sees all ranks.
    """
    import torch

    if read_launch() is None or torch.accelerator.is_available():
        return
    from accelerate import PartialState

    PartialState(backend=backend_for("cpu"))
