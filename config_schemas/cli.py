"""`stateroom config check|show|schema`: what a config does here, before anything is started."""

from __future__ import annotations

import argparse
import json
import sys

from ..errors import ConfigError

EXAMPLES = """examples:
  stateroom config check ds.json --ranks 8      is it valid, and what becomes of every key
  stateroom config show ds.json --ranks 8       the resolved config, with defaults marked
  stateroom config schema > stateroom.schema.json
"""


def main(argv: list[str]) -> int:
    """Run one subcommand and return its exit status (0 good, 1 the config is bad, 2 usage)."""
    try:
        args = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse ends the process for --help and for usage errors
        return stop.code if isinstance(stop.code, int) else 2
    try:
        return _run(args)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        return 0


def _run(args: argparse.Namespace) -> int:
    if args.command == "schema":
        from .schema import json_schema

        print(json.dumps(json_schema(), indent=2))
        return 0
    from . import report
    from .loading import load

    try:
        config = load(args.file, ranks=args.ranks)
    except ConfigError as error:
        if args.json:
            print(json.dumps({"file": args.file, "ok": False, "problems": report.problem_lines(error)}, indent=2))
        else:
            print(error, file=sys.stdout if args.command == "check" else sys.stderr)
        return 1
    if args.command == "check":
        report.print_check(args.file, config, args.ranks, as_json=args.json)
    else:
        report.print_resolved(config, as_json=args.json)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stateroom config",
        description="Say what a config file does here.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="check|show|schema")
    for name, text in (("check", "check a config and say what becomes of every key"), ("show", "print the resolved config")):
        command = commands.add_parser(
            name,
            help=text,
            description=text.capitalize() + ".",
            epilog=f"example: stateroom config {name} ds.json --ranks 8",
        )
        command.add_argument("file", metavar="FILE", help="config file (JSON or hjson), or the text itself")
        command.add_argument("--ranks", type=_positive, metavar="N", help="number of ranks of the job; default: what a launcher announced")
        command.add_argument("--json", action="store_true", help="print JSON")
    commands.add_parser(
        "schema", help="print the JSON Schema for editors", epilog="example: stateroom config schema > stateroom.schema.json"
    )
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number
