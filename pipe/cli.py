"""`stateroom pipe show`: a pipeline schedule over time, before anything runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import StateroomError
from .schedules import KINDS, Schedule, schedule
from .timeline import as_svg, as_text

EXAMPLES = """examples:
  stateroom pipe show --schedule 1f1b --stages 4 --micro-batches 8
  stateroom pipe show --schedule interleaved-1f1b --chunks 2 --stages 4 --micro-batches 8 --svg schedule.svg
  stateroom pipe show --schedule zero-bubble --stages 4 --micro-batches 8 --times 1,1.2,0.8 --json
"""


def main(argv: Sequence[str]) -> int:
    """Print a schedule and return the exit status (0 good, 1 there is no such schedule, 2 usage)."""
    try:
        args = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse ends the process for --help and for usage errors
        return stop.code if isinstance(stop.code, int) else 2
    try:
        plan = schedule(args.schedule, args.stages, args.micro_batches, args.chunks)
        _show(plan, args)
    except (StateroomError, OSError) as error:
        print(f"stateroom pipe: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader, such as head, has seen enough
        return 0
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stateroom pipe", description="Pipeline schedules.", epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="show")
    show = commands.add_parser(
        "show",
        help="draw a schedule: the instruction lists that run, over time",
        description="Draw the instruction lists that run, over time, with the bubble and what each stage holds.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    show.add_argument("--schedule", default="1f1b", metavar="NAME", help=f"one of {', '.join(KINDS)} (default 1f1b)")
    show.add_argument("--stages", type=int, required=True, metavar="N", help="pipeline stages")
    show.add_argument("--micro-batches", type=int, required=True, metavar="N", help="micro-batches of a step: the accumulation steps")
    show.add_argument("--chunks", type=int, default=1, metavar="N", help="chunks of layers a stage, for interleaved-1f1b")
    show.add_argument(
        "--times", type=_times, default=(1.0, 1.0, 1.0), metavar="F,I,W",
        help="seconds of a stage's forward, backward for inputs and backward for weights (default 1,1,1); its chunks share them",
    )  # fmt: skip
    show.add_argument("--transfer", type=float, default=0.0, metavar="S", help="seconds from one stage to the next (default 0)")
    show.add_argument("--svg", metavar="FILE", help="write the timeline as SVG too")
    show.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _times(text: str) -> tuple[float, float, float]:
    forward, backward, weight = (float(part) for part in text.split(","))
    if min(forward, backward, weight) <= 0:
        raise argparse.ArgumentTypeError("three positive numbers")
    return forward, backward, weight


def _show(plan: Schedule, args: Any) -> None:
    forward, backward, weight = (seconds / plan.chunks for seconds in args.times)
    ran = plan.run(forward, backward, weight, args.transfer)
    if args.svg:
        Path(args.svg).write_text(as_svg(plan, ran))
    if not args.json:
        print(as_text(plan, ran))
        return
    rows = [
        [{"start": start, "end": end, "kind": each.kind, "micro_batch": each.microbatch, "chunk": each.chunk} for start, end, each in row]
        for row in ran.spans
    ]
    found = {
        "schedule": plan.name, "stages": plan.stages, "chunks": plan.chunks, "micro_batches": plan.micro_batches,
        "seconds": ran.seconds, "bubble": ran.share("total"), "bubble_over_work": ran.share("ideal"),
        "idle": [1 - busy / ran.seconds for busy in ran.busy], "activations": list(plan.activations()), "timeline": rows,
    }  # fmt: skip
    print(json.dumps(found, indent=1))
