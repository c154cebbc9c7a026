"""`stateroom dryrun`: a training script as one rank of many, on fake tensors, on this machine's CPU."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys

from ...errors import StateroomError
from ..problems import LedgerError

EXAMPLE = """example:
  stateroom dryrun --ranks 1024 -- train.py --config ds.json
  stateroom dryrun --ranks 1024 --rank 17 --on '128x8 h100' --model llama3-8b --json -- train.py --config ds.json

The script runs as it is, with its own arguments; tensors have shapes and no values, and other ranks are not there. A value
that it asks for is 1, a flag is down. It ends after --steps optimizer steps. Exit status 1: the script cannot be run so far,
or (with --on) the step does not fit the device."""


def main(argv: list[str]) -> int:
    """Run one dry run and print its report; return 0, 1 when the script stops or does not fit, 2 on usage errors."""
    parser = _parser()
    own, script = _split(argv)
    try:
        args = parser.parse_args(own)
        if not script:
            parser.error("name the script behind --: stateroom dryrun --ranks 1024 -- train.py args")
    except SystemExit as stop:  # argparse ends the process for --help and for usage errors
        return stop.code if isinstance(stop.code, int) else 2
    try:
        return _run(args, script)
    except StateroomError as error:
        print(f"stateroom dryrun: {error}", file=sys.stderr)
        return 1


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stateroom dryrun",
        usage="stateroom dryrun --ranks N [options] -- {SCRIPT | -m MODULE} [its arguments]",
        description="Run a training script on fake tensors as one rank of many: memory, collectives, FLOPs and errors of shape.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="ranks of the imagined job")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="which of them to be (default 0)")
    parser.add_argument(
        "--steps", type=int, default=2, metavar="N", help="optimizer steps (default 2; the first has no optimizer states yet)"
    )
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl", help="whose collectives; they differ in working memory")
    parser.add_argument("--model", metavar="NAME|FILE", help="shape for the calculator's column; by default read off the module")
    parser.add_argument("--on", metavar="CLUSTER", help="devices that it must fit, such as '128x8 h100'")
    parser.add_argument("--limit", type=float, default=600.0, metavar="S", help="seconds that the script may take (default 600)")
    parser.add_argument("--quiet", action="store_true", help="do not show what the script prints")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing of what the script prints")
    return parser


def _run(args: argparse.Namespace, script: list[str]) -> int:
    if args.ranks < 1 or not 0 <= args.rank < args.ranks or args.steps < 1:
        raise LedgerError(f"--ranks {args.ranks} --rank {args.rank} --steps {args.steps}: ranks count from 0, and one step is the least")
    cluster = None
    if args.on is not None:
        from ..hardware.load import read_cluster

        cluster = read_cluster(args.on, args.ranks)
        if cluster.devices != args.ranks:
            raise LedgerError(f"--on {args.on} has {cluster.devices:,} devices, --ranks is {args.ranks:,}")
    from .collect import report_of
    from .run import dry_run

    hidden = contextlib.redirect_stdout(io.StringIO()) if args.json or args.quiet else contextlib.nullcontext()
    with hidden:
        record = dry_run(script[0], script[1:], args.ranks, args.rank, args.steps, backend=args.backend, limit_s=args.limit)
    found = report_of(record, " ".join(script[:2]) if script[0] == "-m" else script[0], args.model, cluster)
    print(found.to_json() if args.json else "\n".join(found.lines()))
    limit = found.usable_bytes
    return 0 if limit is None or found.most_bytes <= limit else 1
