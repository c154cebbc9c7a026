"""How the engine's own host time grows: with parameters, with units, and with ranks up to 1,024, most of which are imagined.

    python benchmarks/scaling.py [--rounds 5] [--stages 1,3] [--parameters 100,1000,10000,100000] [--units 1,10,100,1000]
        [--ranks 1,4,64,1024] [--json FILE]
    python benchmarks/scaling.py --block [--stages 0,1,2,3]     # the module tree of the `block` model, at a width that costs nothing

The model's layers have 16 elements each, so that a step is nearly all hooks, planning and launches; its bare loop (forward,
backward, clipping, fused AdamW) runs in turn with it, and the difference is what the engine adds. Each case is a process of
its own in which one rank is real and messages reach nobody, as in a dry run, but with real tensors. While one number varies
the others rest at 1,000 parameters, 10 units and 64 ranks. What torch's fake backend takes for itself, which copies a message
once for each rank, is measured inside of the step and taken off; so are the imports that the first `initialize` causes.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "llama"))
import stateroom
import torch
import torch.distributed as dist
from model import Llama, LlamaConfig
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


class Timed:
    """A function that keeps how long its calls took."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.seconds = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        began = time.perf_counter()
        try:
            return self._function(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - began

    def take(self) -> float:
        """Return the seconds since the last reading."""
        taken, self.seconds = self.seconds, 0.0
        return taken


class Chains(nn.Module):
    """Blocks that each see the same input, so that depth stays small."""

    def __init__(self, parameters: int, units: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(parameters // units) for _ in range(units))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean square over blocks."""
        return torch.stack([block(x) for block in self.blocks]).square().mean()


def bare_step(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> Any:
    """Return a step of the plain loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        model(*batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def narrow_block() -> nn.Module:
    """Return the `block` model's module tree, 16 wide."""
    return Llama(LlamaConfig(vocab_size=64, dim=16, num_layers=10, num_heads=8, num_kv_heads=8, max_seq_len=8))


def messages(engine: stateroom.Engine) -> list[Timed]:
    """Let the calls of the fake backend be timed."""
    native = engine.dp._transport._inner  # type: ignore[attr-defined]
    native._gather, native._scatter = Timed(native._gather), Timed(native._scatter)
    return [native._gather, native._scatter]


def case(make: Callable[[], nn.Module], batch: tuple[torch.Tensor, ...], ranks: int, stage: int, rounds: int) -> dict[str, float]:
    """Return the seconds of one case: `initialize`, a bare step, a step through the engine, and what the engine adds itself."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage},
        "units": {"min_numel": 0},  # each block a unit, though all are tiny here
        "log_level": "error",
    }
    with imagine(World(rank=0, size=ranks, watcher=Silent(), backend="nccl")):
        bare = bare_step(make(), batch)
        stateroom.initialize(nn.Linear(2, 2), config=config)[0].destroy()  # imports
        model = make()
        began = time.perf_counter()
        engine, *_ = stateroom.initialize(model, config=config)
        built = time.perf_counter() - began
        backend = messages(engine)

        def through() -> None:
            engine.backward(engine(*batch))
            engine.step()

        seconds: dict[str, list[float]] = {"bare_s": [], "step_s": [], "backend_s": []}
        for number in range(rounds + 2):
            gc.collect()  # or a collection that one of the two has caused falls on the other
            for name, step in (("bare_s", bare), ("step_s", through)):
                began = time.perf_counter()
                step()
                if number >= 2:
                    seconds[name].append(time.perf_counter() - began)
            taken = sum(timed.take() for timed in backend)
            if number >= 2:
                seconds["backend_s"].append(taken)
    row = {name: statistics.median(values) for name, values in seconds.items()}
    added = statistics.median(a - b - c for a, b, c in zip(seconds["step_s"], seconds["bare_s"], seconds["backend_s"], strict=True))
    return {"initialize_s": built, **row, "added_s": added}


def chains_case(parameters: int, units: int, ranks: int, stage: int, rounds: int) -> dict[str, float]:
    """Return the seconds of a case of chains."""
    return case(lambda: Chains(parameters, units), (torch.randn(ROWS, WIDTH),), ranks, stage, rounds)


def block_case(stage: int, rounds: int) -> dict[str, float]:
    """Return the seconds of the narrow `block` model on two ranks."""
    ids = torch.zeros(1, 8, dtype=torch.int64)
    return case(narrow_block, (ids, ids), 2, stage, rounds)


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
    parser.add_argument("--block", action="store_true", help="how much a step adds on the module tree of the `block` model")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", type=counts, help=argparse.SUPPRESS)  # parameters, units, ranks, stage: in this process
    args = parser.parse_args()
    if args.case:
        run = block_case if args.block else chains_case
        print(json.dumps(run(*args.case, rounds=args.rounds)))
        return
    if args.block:
        for stage in args.stages:
            row = alone(["--block", "--case", str(stage), "--rounds", str(args.rounds)])
            print(f"stage {stage}: a step adds {1e3 * row['added_s']:.2f} ms to a bare one of {1e3 * row['bare_s']:.2f} ms")
        return
    rows = []
    counted = f"{'stage':>5} {'parameters':>10} {'units':>6} {'ranks':>6}"
    print(f"{counted} {'initialize s':>13} {'bare ms':>9} {'step ms':>9} {'backend ms':>11} {'added ms':>9} {'us a parameter':>15}")
    for stage in args.stages:
        for varied, numbers in cases(args):
            words = ",".join(str(number) for number in (*numbers.values(), stage))
            row = {"stage": stage, "varied": varied, **numbers, **alone(["--case", words, "--rounds", str(args.rounds)])}
            rows.append(row)
            counted = f"{stage:>5} {numbers['parameters']:>10,} {numbers['units']:>6,} {numbers['ranks']:>6,}"
            per_parameter = 1e6 * row["added_s"] / numbers["parameters"]
            took = f"{row['initialize_s']:>13.3f} {1e3 * row['bare_s']:>9.2f} {1e3 * row['step_s']:>9.2f} {1e3 * row['backend_s']:>11.2f}"
            print(f"{counted} {took} {1e3 * row['added_s']:>9.2f} {per_parameter:>15.2f}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
