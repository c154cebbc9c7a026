"""`stateroom ckpt prune`: delete checkpoints that need not be kept, and pin those that must."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("dir", metavar="DIR", help="directory of tags")
    parser.add_argument("--keep_last", type=int, metavar="K", help="keep the newest K; without it nothing is deleted")
    parser.add_argument("--keep_every", type=int, metavar="N", help="keep those at multiples of N steps too")
    parser.add_argument("--pin", action="append", default=[], metavar="T", help="keep this checkpoint for good, such as the best one")
    parser.add_argument("--unpin", action="append", default=[], metavar="T", help="let a pinned one go when its turn comes")
    parser.add_argument("--dry_run", action="store_true", help="only say what would be deleted")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Delete, say what, and return 0."""
    from ..errors import CheckpointError
    from .directory import latest_name, tags
    from .retention import pin, prune, superfluous, unpin

    folder = Path(args.dir)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist; name a directory in which checkpoints were saved")
    for tag in args.pin:
        pin(folder, tag)
    for tag in args.unpin:
        unpin(folder, tag)
    doomed = []
    if args.keep_last is not None and args.dry_run:
        doomed = superfluous(tags(folder), latest_name(folder), args.keep_last, args.keep_every)
    elif args.keep_last is not None:
        doomed = prune(folder, args.keep_last, args.keep_every)
    left = [tag.name for tag in tags(folder) if tag not in doomed]
    if args.json:
        print(json.dumps({"deleted": [tag.name for tag in doomed], "kept": left, "dry_run": args.dry_run}, indent=2))
        return 0
    for tag in doomed:
        print(f"{'would delete' if args.dry_run else 'deleted'} {tag.path}")
    print(f"kept: {', '.join(left) or 'none'}")
    return 0
