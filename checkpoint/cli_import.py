"""`stateroom ckpt import`: checkpoints of other tools as Stateroom's own."""

from __future__ import annotations

import argparse
import json
import sys


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("path", metavar="PATH", help="a checkpoint of any kind, a folder of safetensors, or a file with a state dict")
    parser.add_argument("out", metavar="OUT", help="directory of tags to write into; its `latest` is moved")
    parser.add_argument("--tag", metavar="T", help="which checkpoint in PATH; default: the latest")
    parser.add_argument("--out_tag", metavar="T", help="its name in OUT; default: the one that it has")
    parser.add_argument("--max_file_size", default="2GB", metavar="SIZE", help="largest data file, such as 2GB (the default)")
    parser.add_argument("--no_strict", action="store_true", help="leave states out that the files hold in part only")
    parser.add_argument("--overwrite", action="store_true", help="replace a tag of that name in OUT")
    parser.add_argument("--inert", action="append", default=[], metavar="MODULE.CLASS", help="read such objects as plain data")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Write, say what was written, and return 0."""
    from .importing import import_checkpoint
    from .progress import size

    made = import_checkpoint(
        args.path,
        args.out,
        tag=args.tag,
        out_tag=args.out_tag,
        strict=not args.no_strict,
        overwrite=args.overwrite,
        max_file_size=args.max_file_size,
        inert=tuple(args.inert),
    )
    for line in made.remarks:
        print(f"note: {line}", file=sys.stderr)
    if args.json:
        print(json.dumps({"path": str(made.path), "parameters": made.num_parameters, "bytes": made.num_bytes}, indent=2))
    else:
        print(f"wrote {made.path}: {made.num_parameters} parameters with their states, {size(made.num_bytes)}")
    return 0
