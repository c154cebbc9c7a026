"""`stateroom ledger`: what a job will cost, what others measured, and how a run compares."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import StateroomError
from .job import Job

EXAMPLES = """examples:
  stateroom ledger --model llama3-70b --on '128x8 h100' --batch-tokens 4M --tp 8 --pp 4 --zero 1
  stateroom ledger --model llama3-8b --on 8xh100 --config ds.json --ranks 8 --section memory
  stateroom ledger models llama            built-in models; with a name: its parameters, term by term
  stateroom ledger hardware h100           built-in accelerators, with their figures and sources
  stateroom ledger derive mfu tokens_per_s=238300 gpus=6144 peak=275T params=540.35B
  stateroom ledger bubble --pp 8 --microbatches 32
  stateroom ledger compare runs/llama --on 8xh100
  stateroom ledger diff runs/a runs/b
  stateroom ledger verdict 0.41 --params 405B --on '2048x8 h100'
  stateroom ledger calibrate               measure this machine, as a hardware file
"""


def main(argv: list[str]) -> int:
    """Run one subcommand and return its exit status (0 good, 1 it does not fit or cannot be answered, 2 usage)."""
    try:
        if argv and argv[0] in _COMMANDS:
            return _COMMANDS[argv[0]](argv[1:])
        return _account(argv)
    except SystemExit as stop:  # argparse ends the process for --help and for usage errors
        return stop.code if isinstance(stop.code, int) else 2
    except StateroomError as error:
        print(f"stateroom ledger: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader, such as head, has seen enough
        return 0


def _parser(name: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"stateroom ledger{name}", description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def _account(argv: Sequence[str]) -> int:
    from .arguments import add_layout, add_model, job_of
    from .show import SECTIONS, account_of
    from .units import parse_bytes, parse_count, parse_seconds

    others = "other commands: " + ", ".join(_COMMANDS) + " (each has --help)\n\n"
    parser = _parser("", "The account of a job before it starts: memory, FLOPs, traffic, bubble, time, recovery, cost.", others + EXAMPLES)
    add_model(parser)
    add_layout(parser)
    parser.add_argument("--config", metavar="FILE", help="take the layout from a config file")
    parser.add_argument("--section", action="append", choices=SECTIONS, help="print only this; may be repeated")
    parser.add_argument("--gib", action="store_true", help="sizes in GiB, not GB")
    parser.add_argument("--tokens", metavar="N", help="tokens of the whole run, such as 15T, for its cost")
    parser.add_argument("--price", type=float, metavar="USD", help="of a device and hour")
    parser.add_argument("--mtbf", metavar="TIME", help="mean time between interruptions of the whole job, such as 3.1h")
    parser.add_argument(
        "--node-rate", type=float, default=6.5, metavar="N", help="failures per 1,000 node-days (default 6.5, arXiv:2410.21680)"
    )
    parser.add_argument("--restart", default="10min", metavar="TIME", help="from an interruption to the next step (default 10min)")
    parser.add_argument("--storage", metavar="SIZE", help="bandwidth of the file system in all, such as 2TB (a second)")
    args = parser.parse_args(argv)
    job, notes = _from_config(args) if args.config else job_of(args)
    storage = None if args.storage is None else parse_bytes(args.storage.removesuffix("/s"))
    found = account_of(
        job, tokens=None if args.tokens is None else parse_count(args.tokens), price=args.price, notes=notes, node_rate=args.node_rate,
        mtbf_s=None if args.mtbf is None else parse_seconds(args.mtbf), restart_s=parse_seconds(args.restart), storage_bytes_s=storage,
    )  # fmt: skip
    sections = args.section or SECTIONS
    print(found.to_json(sections) if args.json else "\n".join(found.lines(sections, binary=args.gib)))
    return 0 if found.memory.peak[1].total <= job.cluster.accelerator.usable_bytes else 1


def _from_config(args: argparse.Namespace) -> tuple[Job, list[str]]:
    from .arguments import cluster_of, layout_fields, shape_of
    from .job import Layout, check
    from .plan.config import job_of_config

    shape, cluster = shape_of(args), cluster_of(args)
    base = Job(shape, cluster, Layout(), shape.context if args.seq is None else args.seq, args.attention)
    job = job_of_config(args.config, base, args.ranks or cluster.devices)
    job = job.with_layout(**layout_fields(args))
    check(job)
    return job, [f"the layout is that of {args.config}"]


def _models(argv: Sequence[str]) -> int:
    from .shapes import active_parameters, count_parameters, read_shape
    from .shapes.catalogue import catalogue

    parser = _parser(" models", "Built-in models, or the parameters of one, term by term.", "example: stateroom ledger models deepseek-v3")
    parser.add_argument("name", nargs="?", help="a model, a file, or a part of names")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    table = catalogue()
    listed = {entry.shape.name: entry for entry in table.values() if args.name is None or args.name.lower() in entry.shape.name}
    if args.name is not None and (args.name in table or not listed):
        shape = read_shape(args.name)
        counted = count_parameters(shape)
        if args.json:
            print(
                json.dumps(
                    {"shape": shape.to_dict(), "parameters": counted.to_dict(), "active": active_parameters(shape)}, indent=2, default=vars
                )
            )
        else:
            print(counted, f"  active for one token: {active_parameters(shape):,.0f}", f"  source: {shape.source}", sep="\n")
        return 0
    rows: list[dict[str, Any]] = [
        {"name": name, "parameters": count_parameters(shape).total, "active": active_parameters(shape), "source": shape.source}
        for name, shape in ((name, entry.shape) for name, entry in listed.items())
    ]
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        print(
            "\n".join(
                f"{row['name']:<22} {row['parameters'] / 1e9:>9.3f} B  active {row['active'] / 1e9:>8.3f} B  {row['source']}"
                for row in rows
            )
        )
    return 0


def _hardware(argv: Sequence[str]) -> int:
    from .hardware.catalogue import ACCELERATORS
    from .hardware.load import read_hardware
    from .units import show_bytes

    parser = _parser(
        " hardware", "Built-in accelerators: dense peaks, memory and links, with their sources.", "example: stateroom ledger hardware h100"
    )
    parser.add_argument("name", nargs="?", help="one of them, or a hardware file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    found = list(ACCELERATORS) if args.name is None else [read_hardware(args.name)]
    if args.json:
        print(json.dumps([device.to_dict() for device in found], indent=2))
        return 0
    for device in found:
        peaks = ", ".join(f"{dtype} {rate / 1e12:g}" for dtype, rate in device.peak.items())
        link = "no links" if device.link_bytes_s is None else f"links {show_bytes(device.link_bytes_s)}/s among {device.link_domain:,}"
        net = "network not published" if device.network_bytes_s is None else f"network {show_bytes(device.network_bytes_s)}/s"
        print(
            f"{device.name:<16} {show_bytes(device.usable_bytes, binary=True):>10} usable, "
            f"{show_bytes(device.hbm_bytes_s)}/s; TFLOP/s {peaks}; {link}; {net}; {device.source}"
        )
    return 0


def _derive(argv: Sequence[str]) -> int:
    from .derive import QUANTITIES, derive
    from .problems import LedgerError
    from .units import parse_count

    names = "\n".join(
        f"  {each.name:<22} {each.unit or '-':<7} {each.text}" + (f" ({', '.join(each.aliases)})" if each.aliases else "")
        for each in QUANTITIES.values()
    )
    parser = _parser(
        " derive",
        "One figure from others, with the chain of relations.",
        f"example: stateroom ledger derive mfu tokens_per_s=85144 gpus=8 params=6.66B peak=989T\n\nquantities:\n{names}",
    )
    parser.add_argument("want", help="the quantity that is wanted")
    parser.add_argument(
        "given", nargs="+", metavar="NAME=VALUE", help="what is known, in the unit of the list below; 70B, 4M, 989T are numbers"
    )
    parser.add_argument("--attention", choices=("full", "causal", "none"), default="full", help="how attention is counted in FLOPs")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), help="policy, for executed FLOPs")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    given = {}
    for each in args.given:
        name, sign, value = each.partition("=")
        if not sign:
            raise LedgerError(f"{each!r}: write NAME=VALUE")
        given[name] = parse_count(value)
    found = derive(args.want, given, attention=args.attention, recompute=args.recompute)
    data = {
        "name": found.name,
        "value": found.value,
        "unit": found.unit,
        "steps": found.steps,
        "attention": args.attention,
        "recompute": args.recompute,
    }
    print(json.dumps(data, indent=2) if args.json else found)
    return 0


def _bubble(argv: Sequence[str]) -> int:
    from .commands import bubble

    return bubble(
        _parser(
            " bubble",
            "The bubble of each schedule, by formula and by simulation.",
            "example: stateroom ledger bubble --pp 8 --microbatches 32",
        ),
        argv,
    )


def _compare(argv: Sequence[str]) -> int:
    from .commands import compare

    text = "A run directory beside its prediction: predicted, measured, difference, and which assumption is off."
    return compare(_parser(" compare", text, "example: stateroom ledger compare runs/llama --on 8xh100"), argv)


def _diff(argv: Sequence[str]) -> int:
    from .commands import diff

    text = "Two run directories, or two files of `stateroom ledger --json`: keys and figures that differ."
    return diff(_parser(" diff", text, "example: stateroom ledger diff runs/a runs/b"), argv)


def _verdict(argv: Sequence[str]) -> int:
    from .commands import judge

    text = "A measured MFU beside published runs of like size, scale and hardware, with their sources."
    return judge(_parser(" verdict", text, "example: stateroom ledger verdict 0.41 --params 405B --on '2048x8 h100'"), argv)


def _calibrate(argv: Sequence[str]) -> int:
    from .commands import calibrate

    text = "Measure this machine: matrix products, memory, host link, and memory that is no tensor; prints a hardware file."
    return calibrate(_parser(" calibrate", text, "example: stateroom ledger calibrate > here.hjson"), argv)


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "models": _models,
    "hardware": _hardware,
    "derive": _derive,
    "bubble": _bubble,
    "compare": _compare,
    "diff": _diff,
    "verdict": _verdict,
    "calibrate": _calibrate,
}
