"""`stateroom plan`: model, cluster, sequence and batch in; the best layouts, their reasons and a config out."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import StateroomError
from ..arguments import add_dtypes, add_model, batch_of, cluster_of, layout_fields, shape_of
from ..job import Layout
from ..memory.rank import rank_states
from ..problems import LedgerError
from ..units import parse_bytes, show_bytes, show_seconds
from .config import config_of, notes_of
from .reasons import neighbours
from .search import Candidate, Plan, Request, make_plan

EXAMPLES = """examples:
  stateroom plan --model llama3-70b --on '128x8 h100' --seq 8192 --batch-tokens 4M --explain
  stateroom plan --model config.json --on 8xh100 --batch 64 --emit ds.json --html plan.html
  stateroom plan --model llama3-405b --on '2048x8 h100' --batch-tokens 16M --fix tp=8 --fix pp=16
"""
_FIXABLE = ("tp", "pp", "cp", "ep", "dp", "vp", "dp_replicate", "zero", "micro_batch")


def main(argv: Sequence[str]) -> int:
    """Run the search and return the exit status (0 good, 1 nothing fits or cannot be answered, 2 usage)."""
    try:
        args = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse ends the process for --help and for usage errors
        return stop.code if isinstance(stop.code, int) else 2
    try:
        return _run(args)
    except StateroomError as error:
        print(f"stateroom plan: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader, such as head, has seen enough
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stateroom plan", description="The best layouts of a job on a cluster, ranked by predicted step time, each with its reasons.",
        epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_model(parser)
    group = parser.add_argument_group("search")
    group.add_argument("--memory", metavar="SIZE", help="what a device may hold; default: 96 %% of what a process can allocate")
    group.add_argument("--host-memory", metavar="SIZE", default="2TB", help="what states may fill of a node's host memory (default 2TB)")
    group.add_argument("--fix", action="append", default=[], metavar="NAME=N", help=f"a degree that is not searched: {', '.join(_FIXABLE)}")
    group.add_argument("--zero", type=int, action="append", choices=(0, 1, 2, 3), help="ZeRO stages to try; may be repeated")
    group.add_argument("--recompute", action="append", choices=("none", "selective", "full"), help="policies to try; may be repeated")
    group.add_argument("--top", type=int, default=5, metavar="N", help="layouts to print (default 5)")
    add_dtypes(group)
    parser.add_argument("--explain", action="store_true", help="print the derivation: TP, PP, DP, CP, and the neighbours")
    parser.add_argument("--emit", metavar="FILE", help="write the config of the best layout; - prints it")
    parser.add_argument("--html", metavar="FILE", help="write a report with charts; it opens without a network")
    return parser


def _run(args: argparse.Namespace) -> int:
    request, notes = request_of(args)
    plan = make_plan(request)
    notes += [plan.note] if plan.note else []
    if args.emit == "-":
        print(json.dumps(config_of(plan.best.job), indent=2))
        return 0
    if args.json:
        print(json.dumps(plan_dict(plan, args.top, notes), indent=2))
    else:
        print("\n".join(plan_lines(plan, args.top, notes)))
        if args.explain:
            from .explain import explain

            print("", *explain(plan), sep="\n")
    _write(args, plan, notes)
    return 0


def request_of(args: argparse.Namespace) -> tuple[Request, list[str]]:
    """Return what options ask for, and notes on what was chosen.

    Raises:
        LedgerError: something is missing or unknown.
    """
    shape, cluster = shape_of(args), cluster_of(args)
    seq = shape.context if args.seq is None else args.seq
    batch, notes = batch_of(args, seq)
    if batch is None:
        raise LedgerError("how much is a step? give --batch-tokens 4M, or --batch in sequences")
    fields = layout_fields(argparse.Namespace(**{**vars(args), "zero": None, "recompute": None}))
    request = Request(
        shape, cluster, seq, batch, None if args.memory is None else parse_bytes(args.memory), tuple(args.zero or (1, 2, 3)),
        tuple(args.recompute or ("none", "selective", "full")), _fixed(args.fix), Layout(**fields), args.attention,
        parse_bytes(args.host_memory),
    )  # fmt: skip
    return request, notes


def _fixed(given: Sequence[str]) -> dict[str, int]:
    found = {}
    for each in given:
        name, _, value = each.partition("=")
        name = name.replace("-", "_")
        if name not in _FIXABLE or not value.isdigit():
            raise LedgerError(f"--fix {each}: write NAME=N with a name of {', '.join(_FIXABLE)}")
        found[name] = int(value)
    return found


def plan_lines(plan: Plan, top: int, notes: Sequence[str]) -> list[str]:
    """Return the ranking as text, the best layout with its reasons first."""
    request, best = plan.request, plan.best
    lines = [
        f"{request.shape.name} on {request.cluster}, {request.seq:,} tokens a sequence, {request.batch * request.seq:,} a step",
        f"{plan.tried:,} layouts tried, {plan.full:,} too large for {show_bytes(request.limit)}, {len(plan.candidates):,} fit",
        *(f"note: {note}" for note in [*notes, *notes_of(best.job)]),
        "",
    ]
    for number, each in enumerate(plan.candidates[:top], start=1):
        lines.append(f"{number}. {each.layout.words()}")
        lines.append(
            f"   {show_seconds(each.seconds)} a step, MFU {100 * each.mfu:.1f} % ({request.attention} attention), "
            f"{show_bytes(each.memory_bytes)} a device"
        )
        lines.append(f"   {_reason(plan, each)}")
    lines += ["", f"memory: {best.memory.why}", *_elsewhere(best), *best.time.parts.lines()]
    lines += ["neighbours of 1:", *(f"  {each.change}: {each.verdict}: {each.why}" for each in neighbours(plan))]
    return lines


def _elsewhere(each: Candidate) -> list[str]:
    """Say what rests off the devices, for each rank and for a node."""
    ranks = min(each.job.cluster.domain, each.job.cluster.devices)
    rows = {tier: found.total for tier, found in rank_states(each.job, each.memory.stage).items() if tier != "device"}
    return [f"on {tier}: {show_bytes(size)} for each rank, {show_bytes(size * ranks)} for {ranks} ranks" for tier, size in rows.items()]


def _reason(plan: Plan, each: Candidate) -> str:
    largest = sorted((t for t in each.time.parts.terms if t.name not in ("ideal compute", "product efficiency")), key=lambda t: -t.value)[
        :3
    ]
    parts = ", ".join(f"{term.name} {100 * term.value / each.seconds:.1f} %" for term in largest)
    if each is plan.best:
        fastest = min(candidate.seconds for candidate in plan.candidates)
        tie = f"the simplest within 1 % of the fastest ({show_seconds(fastest)})" if each.seconds > fastest else "the fastest"
        return f"chosen: {tie}; beyond compute it pays {parts}"
    return f"{100 * (each.seconds / plan.best.seconds - 1):+.1f} % step time; beyond compute it pays {parts}"


def plan_dict(plan: Plan, top: int, notes: Sequence[str]) -> dict[str, Any]:
    """Return the ranking as plain data."""
    return {
        "model": plan.request.shape.name,
        "cluster": str(plan.request.cluster),
        "seq": plan.request.seq,
        "batch": plan.request.batch,
        "limit_bytes": plan.request.limit,
        "tried": plan.tried,
        "too_large": plan.full,
        "fit": len(plan.candidates),
        "layouts": [
            {"layout": each.layout.to_dict(), "words": each.layout.words(), "seconds": each.seconds, "mfu": each.mfu,
             "memory_bytes": each.memory_bytes,
             "time": each.time.parts.to_dict(), "memory": each.memory.peak[1].to_dict(),
              "traffic": [vars(flow) for flow in each.time.flows]}
            for each in plan.candidates[:top]
        ],
        "neighbours": [{"change": each.change, "verdict": each.verdict, "why": each.why} for each in neighbours(plan)],
        "config": config_of(plan.best.job),
        "notes": [*notes, *notes_of(plan.best.job)],
    }  # fmt: skip


def _write(args: argparse.Namespace, plan: Plan, notes: Sequence[str]) -> None:
    if args.emit is not None:
        Path(args.emit).write_text(json.dumps(config_of(plan.best.job), indent=2) + "\n")
    if args.html is not None:
        from .html import page

        Path(args.html).write_text(page(plan, [*notes, *notes_of(plan.best.job)]))
