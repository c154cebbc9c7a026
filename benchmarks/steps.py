"""A training step of Stateroom beside its peers, interleaved in one run, and beside what no engine can be faster than.

    python benchmarks/steps.py [--model block|large|wide|tiny-many|frozen] [--rounds 5] [--variants stateroom-3,fsdp2,...]
        [--bf16] [--accumulation 8] [--compile] [--recompute] [--rows 1] [--clip 1.0] [--ranks 2] [--peer-python FILE] [--json FILE]

Every variant has ranks of its own, which wait while another one runs; each round runs them all in turn, so that what the
machine does beside this touches all alike. Printed are the median over rounds of a step's seconds (the slowest rank's), its
ratio to a peer pair by pair within rounds, and the peak resident memory above that of an empty process.

The limit of a variant adds what it cannot avoid, each measured in the same rounds: forward and backward alone, the clipped
update of a rank's share, and for each time that all elements, or those that are trained, must cross, the exchange of one
message per peer; with --bf16, `exchange-fp32` stands for reductions in fp32. Ranks on a CPU send with the cores that compute,
so nothing is taken off for overlap. `-hold` keeps whole gradients from micro-batch to micro-batch, by `no_sync()`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import psutil

sys.path.insert(0, str(Path(__file__).parent))
import step_rank

PARTS = ("compute", "adam", "adam-share", "exchange", "exchange-trained")


class Crossings(NamedTuple):
    """How often elements go from rank to rank: parameters are gathered and gradients reduced in each micro-batch or once a step."""

    gathered: int  # all elements, in each micro-batch
    reduced: int  # trained elements, in each micro-batch
    reduced_once: int
    gathered_once: int  # trained elements
    is_share: bool = True  # whether the update is of a rank's share
    in_fp32: bool = True  # whether gradients of 16 bits are reduced in 32, as all do but DeepSpeed


CROSSINGS = {
    "stateroom-0": Crossings(0, 0, 2, 0, is_share=False),
    "stateroom-1": Crossings(0, 0, 1, 1),
    "stateroom-2": Crossings(0, 1, 0, 1),
    "stateroom-2-hold": Crossings(0, 0, 1, 1),
    "stateroom-3": Crossings(2, 1, 0, 0),
    "stateroom-3-hold": Crossings(2, 0, 1, 0),
    "ddp": Crossings(0, 0, 2, 0, is_share=False),
    "fsdp2": Crossings(2, 0, 1, 0),
    "fsdp2-keep": Crossings(1, 0, 1, 0),
    "fsdp2-local": Crossings(2, 0, 1, 0),
    "deepspeed-1": Crossings(0, 0, 1, 1, in_fp32=False),
    "deepspeed-2": Crossings(0, 1, 0, 1, in_fp32=False),
    "deepspeed-3": Crossings(2, 1, 0, 0, in_fp32=False),
}
BESIDE = {"stateroom-0": ("ddp",), "stateroom-1": ("ddp", "deepspeed-1"), "stateroom-2": ("ddp", "deepspeed-2")}
BESIDE |= {"stateroom-3": ("fsdp2", "fsdp2-local", "deepspeed-3")}
BESIDE |= {f"{name}-hold": BESIDE[name] for name in ("stateroom-2", "stateroom-3")}


class Variant:
    """The ranks of one variant."""

    def __init__(self, name: str, python: str, args: argparse.Namespace, options: list[str]) -> None:
        self.name = name
        self.rounds: list[float] = []
        self.peak_bytes = 0
        self._answers: list[Any] = []
        self._ranks: list[subprocess.Popen[str]] = []
        port = _free_port()
        for rank in range(args.ranks):
            read, write = os.pipe()
            env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(args.ranks), "RANK": str(rank)}
            env |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(args.ranks), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
            command = [python, str(Path(__file__).parent / "step_rank.py"), name, str(write), *options]
            quiet = None if args.verbose else subprocess.DEVNULL
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, pass_fds=(write,), env=env, text=True, bufsize=1
            )
            os.close(write)
            self._ranks.append(process)
            self._answers.append(os.fdopen(read))
        self.build_s = max(answer["build_s"] for answer in self._hear())
        free, held = psutil.virtual_memory().available, sum(psutil.Process(rank.pid).memory_info().rss for rank in self._ranks)
        if free < held:  # all of them wait in memory; without room the machine thrashes, and measures that
            raise SystemExit(
                f"steps: {free / 1e9:.1f} GB are left after {name}, which holds {held / 1e9:.1f}: run fewer --variants at a time"
            )

    def _hear(self) -> list[dict[str, Any]]:
        lines = [answers.readline() for answers in self._answers]
        if not all(lines):
            raise SystemExit(f"steps: a rank of {self.name} ended; run it alone with --variants {self.name} --verbose to see why")
        return [json.loads(line) for line in lines]

    def run(self, steps: int) -> None:
        """Run some steps on all ranks and keep the median of the slowest rank's seconds."""
        for process in self._ranks:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # its answer is missing too
                process.stdin.write(f"run {steps}\n")
        said = self._hear()
        self.rounds.append(statistics.median(max(step) for step in zip(*(answer["seconds"] for answer in said), strict=True)))
        self.peak_bytes = max(answer["peak_bytes"] for answer in said)

    def end(self) -> None:
        """Let the ranks go."""
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.write("quit\n")
        for process in self._ranks:
            process.wait()

    @property
    def median_s(self) -> float:
        """Median of the rounds."""
        return statistics.median(self.rounds)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def paired(a: Variant, b: Variant) -> float:
    """Return the median over rounds of a's seconds over b's."""
    return statistics.median(x / y for x, y in zip(a.rounds, b.rounds, strict=True))


def limit_s(name: str, parts: dict[str, Variant], micro_batches: int) -> float | None:
    """Return the seconds that a variant cannot go below, by the parts that were measured."""
    if name not in CROSSINGS or not all(part in parts for part in PARTS):
        return None
    cross = CROSSINGS[name]
    update = parts["adam-share" if cross.is_share else "adam"].median_s
    gather, one = parts["exchange"].median_s, parts["exchange-trained"].median_s
    reduce = parts["exchange-fp32"].median_s if cross.in_fp32 and "exchange-fp32" in parts else one
    gathers = cross.gathered * micro_batches * gather + cross.gathered_once * one
    return parts["compute"].median_s + update + gathers + (cross.reduced * micro_batches + cross.reduced_once) * reduce


def report(found: dict[str, Variant], micro_batches: int) -> list[dict[str, Any]]:
    """Return a row a variant."""
    rows = []
    for name, variant in found.items():
        spread = (max(variant.rounds) - min(variant.rounds)) / variant.median_s
        row: dict[str, Any] = {"variant": name, "step_s": variant.median_s, "spread": spread, "peak_bytes": variant.peak_bytes}
        row |= {"build_s": variant.build_s, "rounds": variant.rounds}
        limit = limit_s(name, found, micro_batches)
        if limit is not None:
            row |= {"limit_s": limit, "over_limit": variant.median_s / limit}
        row["ratios"] = {peer: paired(variant, found[peer]) for peer in BESIDE.get(name, ()) if peer in found}
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    print(f"{'variant':14} {'step ms':>9} {'spread':>7} {'limit ms':>9} {'over it':>8} {'peak MB':>9} {'build s':>8}  beside peers")
    for row in rows:
        limit = f"{1000 * row['limit_s']:9.1f} {row['over_limit']:8.2f}" if "limit_s" in row else f"{'':9} {'':8}"
        ratios = ", ".join(f"{ratio:.2f} of {peer}" for peer, ratio in row["ratios"].items())
        memory = f"{row['peak_bytes'] / 1e6:9,.0f} {row['build_s']:8.2f}"
        print(f"{row['variant']:14} {1000 * row['step_s']:9.1f} {row['spread']:7.0%} {limit} {memory}  {ratios}")


def _is_wanted(name: str, args: argparse.Namespace) -> bool:
    """Return whether a variant runs by default: where its interpreter is known, and it is not another one again."""
    if name.startswith("deepspeed"):
        return args.peer_python is not None
    return (not name.endswith("-hold") or args.accumulation > 1) and (name != "exchange-fp32" or args.bf16)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    step_rank.arguments(parser)
    parser.add_argument("--variants", help="comma-separated; default: all, DeepSpeed's with --peer-python only")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps of a variant in a round")
    parser.add_argument("--peer-python", help="interpreter of an environment that has DeepSpeed")
    parser.add_argument("--json", type=Path, help="write rows and rounds for compare.py")
    parser.add_argument("--verbose", action="store_true", help="show what the ranks print")
    args = parser.parse_args()
    names = args.variants.split(",") if args.variants else [n for n in step_rank.VARIANTS if _is_wanted(n, args)]
    options = ["--model", args.model, "--rows", str(args.rows), "--accumulation", str(args.accumulation), "--clip", str(args.clip)]
    options += ["--bf16"] * args.bf16 + ["--compile"] * args.compile + ["--recompute"] * args.recompute
    found: dict[str, Variant] = {}
    for name in names:
        print(f"building {name} ...", file=sys.stderr, flush=True)
        python = args.peer_python if name.startswith("deepspeed") and args.peer_python else sys.executable
        found[name] = Variant(name, python, args, options)
    for number in range(args.rounds):
        print(f"round {number + 1} of {args.rounds} ...", file=sys.stderr, flush=True)
        for variant in found.values():
            variant.run(args.steps)
    for variant in found.values():
        variant.end()
    rows = report(found, args.accumulation)
    show(rows)
    if args.json:
        args.json.write_text(json.dumps({"options": options, "ranks": args.ranks, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
