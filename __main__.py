"""The `stateroom` command: looks the subcommand up and imports only its folder's `cli.py`."""

from __future__ import annotations

import importlib
import sys

from .version import __version__

# subcommand -> (module with `main(argv) -> int`, one line of help)
COMMANDS = {
    "config": (".config_schemas.cli", "check, show or describe a config file"),
    "ckpt": (".checkpoint.cli", "list, show, compare and export checkpoints"),
    "env": (".parallel.cli", "versions, devices and backends, for bug reports"),
    "ledger": (".ledger.cli", "what a job will cost: memory, FLOPs, traffic, time, money"),
    "plan": (".ledger.plan.cli", "the best layouts of a job on a cluster, with reasons"),
    "pipe": (".pipe.cli", "a pipeline schedule as text and SVG"),
    "dryrun": (".ledger.dryrun.cli", "a training script as one rank of many, on fake tensors, without an accelerator"),
    "job": (".launcher.job_cli", "manifests that start a job on a cluster"),
}

USAGE = "usage: stateroom COMMAND [options]\n\ncommands:\n{rows}\n\nexample: stateroom config check ds.json --ranks 2\n"


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand and return its exit status (0 good, 1 the thing checked is bad, 2 usage)."""
    args = sys.argv[1:] if argv is None else argv
    if args and args[0] in ("-V", "--version"):
        print(f"stateroom {__version__}")
        return 0
    if not args or args[0] in ("-h", "--help"):
        rows = "\n".join(f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items())
        print(USAGE.format(rows=rows))
        return 0 if args else 2
    if args[0] not in COMMANDS:
        print(f"stateroom: no command {args[0]!r}; known: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    module = importlib.import_module(COMMANDS[args[0]][0], __package__)
    return int(module.main(args[1:]))


if __name__ == "__main__":
    sys.exit(main())
