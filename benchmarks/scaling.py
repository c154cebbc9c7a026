"""How the engine's own host time grows: with parameters, with units, and with ranks up to 1,024, most of which are imagined.

    python benchmarks/scaling.py [--rounds 5] [--stages 1,3] [--parameters 100,1000,10000,100000] [--units 1,10,100,1000]
        [--ranks 1,4,64,1024] [--json FILE]

The model's layers have 16 elements each, so that a step is nearly all hooks, planning and launches; its bare loop (forward,
backward, clipping, fused AdamW) runs in turn with it, and the difference is what the engine adds. Each case is a process of
its own in which one rank is real and messages reach nobody, as in a dry run, but with real tensors. While one number varies
the others rest at 1,000 parameters, 10 units and 64 ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import stateroom
import torch
import torch.distributed as dist
from stateroom.parallel.imagined import World, imagine
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

BASE = {"parameters": 1000, "units": 10, "ranks": 64}
WIDTH, ROWS = 4, 2


class Silent:
    """Watches an imagined world and notes nothing."""

    def job(self, job: Any) -> None:
        """Ignore an engine."""

    def phase(self, name: str) -> None:
        """Ignore the end of a phase."""


class Block(nn.Module):
    """A chain of square layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [rows, width] after all layers."""
        for layer in self.layers:
            x = layer(x)
        return x


class Chains(nn.Module):
    """Blocks that each see the same input, so that depth stays small."""

    def __init__(self, parameters: int, units: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(parameters // units) for _ in range(units))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean square over blocks."""
        return torch.stack([block(x) for block in self.blocks]).square().mean()


def bare_step(model: nn.Module, x: torch.Tensor) -> Any:
    """Return a step of the plain loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        model(x).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def case(parameters: int, units: int, ranks: int, stage: int, rounds: int) -> dict[str, float]:
    """Return the seconds of one case: `initialize`, a bare step, and what a step through the engine takes beside it."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage},
        "log_level": "error",
    }
    x = torch.randn(ROWS, WIDTH)
    with imagine(World(rank=0, size=ranks, watcher=Silent(), backend="nccl")):
        bare = bare_step(Chains(parameters, units), x)
        began = time.perf_counter()
        engine, *_ = stateroom.initialize(Chains(parameters, units), config=config)
        built = time.perf_counter() - began

        def through() -> None:
            engine.backward(engine(x))
            engine.step()

        seconds: dict[str, list[float]] = {"bare_s": [], "step_s": []}
        for number in range(rounds + 2):
            for name, step in (("bare_s", bare), ("step_s", through)):
                began = time.perf_counter()
                step()
                if number >= 2:
                    seconds[name].append(time.perf_counter() - began)
    row = {name: statistics.median(values) for name, values in seconds.items()}
    added = statistics.median(a - b for a, b in zip(seconds["step_s"], seconds["bare_s"], strict=True))
    return {"initialize_s": built, **row, "added_s": added}


def alone(words: list[str]) -> dict[str, float]:
    """Run a case in a process of its own."""
    ran = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"scaling: {' '.join(words)} ended with status {ran.returncode}:\n{ran.stderr[-2000:]}")
    found: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return found


def cases(args: argparse.Namespace) -> list[tuple[str, dict[str, int]]]:
    """Return what varies and the numbers of each case."""
    made = []
    for varied in BASE:
        for count in getattr(args, varied):
            numbers = {**BASE, varied: count}
            numbers["parameters"] = max(numbers["parameters"], numbers["units"])
            made.append((varied, numbers))
    return made


def counts(text: str) -> list[int]:
    """Return comma-separated numbers."""
    return [int(word) for word in text.split(",")]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stages", type=counts, default=[1, 3])
    parser.add_argument("--parameters", type=counts, default=[100, 1000, 10_000, 100_000])
    parser.add_argument("--units", type=counts, default=[1, 10, 100, 1000])
    parser.add_argument("--ranks", type=counts, default=[1, 4, 64, 1024])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", type=counts, help=argparse.SUPPRESS)  # parameters, units, ranks, stage: in this process
    args = parser.parse_args()
    if args.case:
        print(json.dumps(case(*args.case, rounds=args.rounds)))
        return
    rows = []
    counted = f"{'stage':>5} {'parameters':>10} {'units':>6} {'ranks':>6}"
    print(f"{counted} {'initialize s':>13} {'bare ms':>9} {'step ms':>9} {'added us a parameter':>21}")
    for stage in args.stages:
        for varied, numbers in cases(args):
            words = ",".join(str(number) for number in (*numbers.values(), stage))
            row = {"stage": stage, "varied": varied, **numbers, **alone(["--case", words, "--rounds", str(args.rounds)])}
            rows.append(row)
            counted = f"{stage:>5} {numbers['parameters']:>10,} {numbers['units']:>6,} {numbers['ranks']:>6,}"
            per_parameter = 1e6 * row["added_s"] / numbers["parameters"]
            print(f"{counted} {row['initialize_s']:>13.3f} {1e3 * row['bare_s']:>9.2f} {1e3 * row['step_s']:>9.2f} {per_parameter:>9.2f}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
