"""`stateroom ckpt …`: looks the subcommand up and imports only the module that does it."""

from __future__ import annotations

import argparse
import importlib
import sys

from ..errors import CheckpointError

# subcommand -> (module with `add(parser)` and `run(args) -> int`, one line of help, example)
COMMANDS = {
    "ls": (".cli_show", "list the checkpoints in a directory", "stateroom ckpt ls runs/llama/checkpoints"),
    "show": (".cli_show", "list the parameters of a checkpoint, their states, and who holds them", "stateroom ckpt show out/ckpt --files"),
    "diff": (".cli_diff", "compare two checkpoints state by state", "stateroom ckpt diff out/a out/b --tag_b global_step20"),
    "verify": (".cli_verify", "compare every byte with its checksum", "stateroom ckpt verify runs/llama/checkpoints --all"),
    "prune": (
        ".cli_prune",
        "delete checkpoints that need not be kept; the latest, pinned and last verified ones always stay",
        "stateroom ckpt prune runs/llama/checkpoints --keep_last 3 --keep_every 1000 --dry_run",
    ),
    "export": (
        ".cli_export",
        "write weights as safetensors, for transformers, or as files of torch.save",
        "stateroom ckpt export out/ckpt out/weights --format hf",
    ),
    "import": (
        ".cli_import",
        "write a checkpoint of DeepSpeed's, a universal one, or plain weights as one of Stateroom's own",
        "stateroom ckpt import deepspeed_out runs/llama/checkpoints",
    ),
}

USAGE = "usage: stateroom ckpt COMMAND [options]\n\ncommands:\n{rows}\n\nexample: stateroom ckpt ls runs/llama/checkpoints\n"


def main(argv: list[str]) -> int:
    """Run one subcommand and return its exit status (0 good, 1 the checkpoint is bad, 2 usage)."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE.format(rows="\n".join(f"  {name:<8} {text}" for name, (_, text, _) in COMMANDS.items())))
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        print(f"stateroom ckpt: no command {argv[0]!r}; known: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    where, text, example = COMMANDS[argv[0]]
    module = importlib.import_module(where, __package__)
    parser = argparse.ArgumentParser(
        prog=f"stateroom ckpt {argv[0]}", description=text[0].upper() + text[1:] + ".", epilog=f"example: {example}"
    )
    module.add(parser)
    try:
        args = parser.parse_args(argv[1:])
    except SystemExit as stop:  # argparse ends the process for --help and for usage errors
        return stop.code if isinstance(stop.code, int) else 2
    try:
        return int(module.run(args))
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader, such as head, has seen enough
        return 0
