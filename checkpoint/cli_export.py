"""`stateroom ckpt export`: weights for the world outside."""

from __future__ import annotations

import argparse
import json
import sys


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("dir", metavar="DIR", help="a checkpoint of any kind")
    parser.add_argument("out", metavar="OUT", help="folder to write into")
    parser.add_argument("--format", choices=("safetensors", "hf", "pt"), default="safetensors", help="default: safetensors")
    parser.add_argument("--dtype", help="fp32, bf16, fp16 or auto (in which the model computed); default: fp32, for hf auto")
    parser.add_argument("--max_shard_size", default="5GB", metavar="SIZE", help="largest file, such as 5GB (the default)")
    parser.add_argument("--tag", metavar="T", help="which checkpoint; default: the latest")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out parameters without gradient")
    parser.add_argument("--overwrite", action="store_true", help="replace weights that are in OUT")
    parser.add_argument("--config", metavar="FOLDER", help="where config.json and the tokenizer for hf lie; default: beside the checkpoint")
    parser.add_argument("--inert", action="append", default=[], metavar="MODULE.CLASS", help="read such objects as plain data")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Write, say what was written, and return 0."""
    from .exporting import export
    from .progress import size

    made = export(
        args.dir,
        args.out,
        format=args.format,
        dtype=args.dtype,
        max_shard_size=args.max_shard_size,
        tag=args.tag,
        exclude_frozen=args.exclude_frozen_parameters,
        overwrite=args.overwrite,
        config=args.config,
        inert=tuple(args.inert),
    )
    for line in made.remarks:
        print(f"note: {line}", file=sys.stderr)
    if args.json:
        print(json.dumps({"files": list(map(str, made.files)), "tensors": made.num_tensors, "bytes": made.num_bytes}, indent=2))
    else:
        print(f"wrote {made.num_tensors} tensors, {size(made.num_bytes)}, in {len(made.files)} file(s) in {args.out}")
    return 0
