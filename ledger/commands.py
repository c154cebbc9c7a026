"""The subcommands of `stateroom ledger` that read runs, compare schedules or measure."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from .arguments import add_model, cluster_of, shape_of
from .job import Job, Layout
from .pipeline import SCHEDULES, Schedule, activation_factor, bubble_share, instructions, simulate
from .problems import LedgerError
from .shapes import read_shape
from .units import parse_count


def bubble(parser: argparse.ArgumentParser, argv: Sequence[str]) -> int:
    """Print the bubble of every schedule by its closed form, and simulated where its instructions are known."""
    parser.add_argument("--pp", type=int, required=True, metavar="N", help="pipeline stages")
    parser.add_argument("--microbatches", type=int, required=True, metavar="N", help="micro-batches of a step")
    parser.add_argument("--chunks", type=int, default=1, metavar="N", help="chunks of layers a stage, for 1f1b")
    parser.add_argument("--times", default="1,1,1", metavar="F,B,W", help="times of forward, backward for inputs, backward for weights")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    if args.pp < 1 or args.microbatches < 1 or args.chunks < 1:
        raise LedgerError("--pp, --microbatches and --chunks must be at least 1")
    try:
        forward, backward, weight = (float(each) for each in args.times.split(","))
    except ValueError:
        raise LedgerError(f"--times {args.times}: write three numbers, such as 1,1,1") from None
    rows = [_bubble_row(row, args.pp, args.microbatches, args.chunks if row.name == "1f1b" else 1, (forward, backward, weight)) for row in
            dict.fromkeys(SCHEDULES.values())]  # fmt: skip
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    print(f"bubble of {args.pp} stages, {args.microbatches} micro-batches (closed forms: F = B = W; simulated: {args.times})")
    for each in rows:
        share = each["simulated_over_ideal"]
        ideal, total = 100 * each["over_ideal"], 100 * each["over_total"]
        print(
            f"  {each['schedule']:<9} x{each['chunks']}: {ideal:6.2f} % of ideal, {total:6.2f} % of total, "
            f"{'not simulated' if share is None else f'simulated {100 * share:.2f} %'}; "
            f"activations {each['activations_over_1f1b']:.2f} x 1F1B ({each['source']})"
        )
    return 0


def _bubble_row(row: Schedule, stages: int, count: int, chunks: int, times: tuple[float, float, float]) -> dict[str, Any]:
    ideal, total = (bubble_share(stages, count, interleave=chunks, schedule=row.name, over=over) for over in ("ideal", "total"))
    try:
        simulated: float | None = simulate(instructions(row.name, stages, count, chunks), *times).share("ideal")
    except LedgerError:  # no instructions for this schedule, or micro-batches that its chunks cannot share out
        simulated = None
    return {
        "schedule": row.name,
        "chunks": chunks,
        "over_ideal": ideal,
        "over_total": total,
        "simulated_over_ideal": simulated,
        "activations_over_1f1b": activation_factor(row.name, stages, chunks),
        "source": row.source,
    }


def compare(parser: argparse.ArgumentParser, argv: Sequence[str]) -> int:
    """Print a run directory beside its prediction."""
    from .verdict import compare_run

    parser.add_argument("run", metavar="RUN_DIR", help="the folder that the config's run_dir names")
    parser.add_argument("--dryrun", metavar="FILE", help="what `stateroom dryrun --json` printed for the same script")
    add_model(parser)
    args = parser.parse_args(argv)
    found = compare_run(args.run, _job_of_run(args), args.dryrun)
    print(json.dumps(found.to_dict(), indent=2) if args.json else "\n".join(found.lines()))
    return 0


def _job_of_run(args: argparse.Namespace) -> Job | None:
    """Return the job that a run is compared with: sizes and sequence are the run's own where no option says others."""
    from .verdict.run import read_run

    if args.model is None and args.on is None:
        return None
    run = read_run(args.run)
    shape = shape_of(args) if args.model is not None or run.model is None else read_shape(run.model)
    args.ranks = args.ranks or run.ranks
    return Job(shape, cluster_of(args), Layout(), args.seq if args.seq is not None else run.seq or shape.context, args.attention)


def diff(parser: argparse.ArgumentParser, argv: Sequence[str]) -> int:
    """Print how two runs differ."""
    from .verdict import diff_runs

    parser.add_argument("one", metavar="A", help="a run directory, or a file of `stateroom ledger --json`")
    parser.add_argument("other", metavar="B", help="another one")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    found = diff_runs(args.one, args.other)
    print(json.dumps(found.to_dict(), indent=2) if args.json else "\n".join(found.lines()))
    return 0


def judge(parser: argparse.ArgumentParser, argv: Sequence[str]) -> int:
    """Print where a measured MFU stands among published ones."""
    from .shapes import active_parameters
    from .verdict import verdict

    parser.add_argument("mfu", type=float, help="measured MFU, 0 to 1 (or in percent)")
    parser.add_argument("--params", metavar="N", help="active parameters of the model, such as 70B; or give --model")
    add_model(parser)
    args = parser.parse_args(argv)
    cluster = cluster_of(args)
    params = parse_count(args.params) if args.params is not None else active_parameters(shape_of(args))
    share = args.mfu / 100 if args.mfu > 1 else args.mfu
    found = verdict(share, cluster.accelerator, params, cluster.devices)
    print(
        json.dumps({"mfu": share, "standing": found.standing, "lines": found.lines()}, indent=2) if args.json else "\n".join(found.lines())
    )
    return 1 if found.standing == "below" else 0


def calibrate(parser: argparse.ArgumentParser, argv: Sequence[str]) -> int:
    """Measure this machine and print a hardware file."""
    from .hardware.calibrate import measure, text

    parser.add_argument("--device", metavar="TYPE", help="cuda, cpu, ...; default: the accelerator that is here, else cpu")
    parser.add_argument("--seconds", type=float, default=1.0, metavar="S", help="how long each measurement may take")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    found = measure(args.device, args.seconds)
    print(json.dumps(found, indent=2) if args.json else text(found))
    return 0
