"""The `launcher` command line: what to start, and how many times; torch is imported only once that is settled."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

EXAMPLES = """\
examples:
  launcher --num_gpus 2 train.py --config ds.json    two ranks on this host
  launcher train.py                                  one rank for each accelerator, or a single one without any
  launcher --num_gpus 4 -m mypackage.train --lr 1e-3 a module instead of a file

Without an accelerator --num_gpus counts processes. What follows the script reaches it unchanged. The exit status is
that of the rank that failed first (128 + n after signal n), 0 when every rank ended well, 2 for a wrong command line.
"""


@dataclass(frozen=True)
class Request:
    """One job as asked for on the command line; num_ranks None means one rank for each accelerator."""

    script: str
    script_args: tuple[str, ...]
    is_module: bool
    num_ranks: int | None
    master_port: int | None


def main(argv: Sequence[str] | None = None) -> int:
    """Start the job that the command line describes and return its exit status."""
    request = parse(sys.argv[1:] if argv is None else list(argv))
    from .local import run  # only now: --help and usage errors need no torch

    return run(request)


def parse(argv: list[str]) -> Request:
    """Return the request, or leave with status 2 and one line of what is wrong.

    The line is cut at the script by hand: argparse would take `--` and abbreviations out of the script's own arguments.
    """
    parser = build_parser()
    cut = _script_index(argv)
    options = parser.parse_args(argv[:cut])
    rest = argv[cut + 1 :] if argv[cut : cut + 1] == ["--"] else argv[cut:]
    if not rest:
        parser.error("no script given; example: launcher --num_gpus 2 train.py")
    if not options.module and not Path(rest[0]).is_file():
        parser.error(f"there is no file {rest[0]!r} here; use -m to start a module by name")
    return Request(rest[0], tuple(rest[1:]), options.module, options.num_ranks, options.master_port)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the launcher's own options, those before the script."""
    parser = argparse.ArgumentParser(
        prog="launcher",
        usage="launcher [options] [-m] SCRIPT [script arguments]",
        description="Start a training script as several ranks that find each other.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what to start")
    what.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module name, as in python -m")
    many = parser.add_argument_group("how many")
    for names in (["--num_gpus", "--num-gpus"], ["--nproc_per_node", "--nproc-per-node"]):
        text = "ranks on this host (default: one for each accelerator)" if names[0] == "--num_gpus" else "the same, under torchrun's name"
        many.add_argument(*names, dest="num_ranks", type=_at_least_one, default=None, metavar="N", help=text)
    meet = parser.add_argument_group("how they meet")
    meet.add_argument("--master_port", "--master-port", type=_port, metavar="P", help="port for the rendezvous (default: a free one)")
    return parser


def _script_index(argv: list[str]) -> int:
    """Return where the script (or a `--` before it) stands: the first word that is neither an option nor an option's value."""
    index = 0
    while index < len(argv) and argv[index].startswith("-") and argv[index] != "--":
        takes_value = argv[index].startswith("--") and argv[index] not in ("--module", "--help") and "=" not in argv[index]
        index += 2 if takes_value else 1
    return min(index, len(argv))


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks, 1 or more")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 1 to 65535")
    return int(text)
