"""What schedules cost on a model whose stages compute, against their simulation, each other, and DeepSpeed's pipeline.

    launcher --num_gpus 2 benchmarks/pipeline.py [--micro_batches 8] [--rounds 10] [--width 512] [--json]
    launcher --num_gpus 2 benchmarks/pipeline.py --peer_python PATH   # an interpreter that has DeepSpeed, for its side

Every schedule has an engine of its own over the same layers, and the rounds go through all of them in turn, so that a
machine that slows down slows all alike. Times are medians over rounds of a whole train_batch: optimizer and agreements
included. Idle is the share of the time from a stage's first to last instruction in which it waited; the simulation uses
this rank's own medians for forward, backward and its halves. Bytes held are what autograd kept of one micro-batch, times
the most micro-batches held at once. Rank 0 prints the worse of the ranks. The peer's side runs before, alone, in processes
of its own, on the same layers and batches.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zero-bubble", "zbv", "dualpipev")


class Layer(nn.Module):
    """A residual layer that computes much and sends little."""

    def __init__(self, width: int, sleep_ms: float = 0.0) -> None:
        super().__init__()
        self.sleep_s = sleep_ms / 1e3
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the stream after this layer."""
        x = x + self.down(torch.relu(self.up(x)))
        return Work.apply(x, self.sleep_s) if self.sleep_s else x


class Work(torch.autograd.Function):
    """Takes the time that a large layer would, without needing the processor: shows waiting where processors are shared."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:  # type: ignore[override]
        """Take one share."""
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """Take two: a backward is for inputs and for weights."""
        time.sleep(2 * ctx.seconds)
        return gradient, None


def loss_fn(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean squared distance."""
    return (output - labels).pow(2).mean()


def config(args: argparse.Namespace, schedule: str) -> dict[str, Any]:
    """Return the config of one schedule."""
    return {
        "train_micro_batch_size_per_gpu": args.rows,
        "gradient_accumulation_steps": args.micro_batches,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "pipeline": {"schedule": schedule},
        "log_level": "error",
    }


def batches(args: argparse.Namespace) -> list[Any]:
    """Return the micro-batches of one step."""
    made = torch.Generator().manual_seed(0)
    return [(torch.randn(args.rows, args.width, generator=made), torch.zeros(args.rows, args.width)) for _ in range(args.micro_batches)]


def engines(args: argparse.Namespace) -> dict[str, Any]:
    """Return schedule -> engine."""
    import stateroom
    from stateroom.pipe import LayerSpec, PipelineModule

    found = {}
    for schedule in args.schedules:
        net = PipelineModule(
            [LayerSpec(Layer, args.width, args.sleep_ms) for _ in range(args.layers)],
            args.stages,
            loss_fn=loss_fn,
            seed_layers=True,
            schedule=schedule,
        )
        found[schedule] = stateroom.initialize(model=net, config=config(args, schedule))[0]
    return found


def measure(args: argparse.Namespace, run: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Run everything once in each round, in turn, and return seconds by name; the first two rounds warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in run}
    for number in range(args.rounds + 2):
        for name, step in run.items():
            torch.distributed.barrier()
            began = time.perf_counter()
            step()
            if number >= 2:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def facts(engine: Any, args: argparse.Namespace, records: list[Any]) -> dict[str, Any]:
    """Return this stage's idle share as measured and as simulated, and what it held."""
    plan = engine._plan(args.micro_batches, True)
    costs: dict[str, list[float]] = {}
    for record in records:
        for span in record.spans:
            costs.setdefault(span.instruction.kind, []).append(span.end - span.start - span.waited)
    forward = statistics.median(costs["F"])
    halves = [statistics.median(costs[kind]) for kind in ("I", "W") if kind in costs]
    inputs, weights = halves if len(halves) == 2 else (statistics.median(costs["B"]) / 2,) * 2
    ran = plan.run(forward, inputs, weights)
    stage = engine.cut.stage
    return {
        "idle": statistics.median(record.idle_share() for record in records),
        "simulated": idle_of(ran, stage),
        "held": max(record.held for record in records),
        "predicted": plan.activations()[stage],
        "bytes": max(record.held for record in records) * kept_bytes(engine, args),
    }


def idle_of(ran: Any, stage: int) -> float:
    """Return a stage's simulated idle share between its own first and last instruction, as it is measured."""
    row = ran.spans[stage]
    return 1 - ran.busy[stage] / (row[-1][1] - row[0][0])


def kept_bytes(engine: Any, args: argparse.Namespace) -> int:
    """Return what autograd keeps of a micro-batch in one chunk of this stage, weights left out."""
    own = {param.untyped_storage()._cdata for param in engine.module.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in own:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = engine.module(torch.randn(args.rows, args.width, requires_grad=True), chunk=0)
    del output
    return sum(kept.values())


def ours(args: argparse.Namespace) -> dict[str, Any]:
    """Return schedule -> figures, the worse of the ranks."""
    made, data = engines(args), batches(args)
    records: dict[str, list[Any]] = {name: [] for name in made}

    def stepper(name: str) -> Callable[[], Any]:
        def step() -> None:
            made[name].train_batch(iter(data))
            records[name].append(made[name].last_batch)

        return step

    seconds = measure(args, {name: stepper(name) for name in made})
    found = {}
    for name, engine in made.items():
        mine = {"seconds": statistics.median(seconds[name]), **facts(engine, args, records[name][2:])}
        every: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(every, mine)
        found[name] = {key: [each[key] for each in every] for key in mine}
        engine.destroy()
    return found


def theirs(args: argparse.Namespace) -> None:
    """The peer's side of the comparison, in its own process: print seconds of its train_batch."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    deepspeed.init_distributed(dist_backend="gloo" if not torch.accelerator.is_available() else None)
    net = PipelineModule([LayerSpec(Layer, args.width) for _ in range(args.layers)], num_stages=args.stages, loss_fn=loss_fn)
    cfg = {key: value for key, value in config(args, "1f1b").items() if key not in ("pipeline", "log_level")}
    engine, *_ = deepspeed.initialize(model=net, model_parameters=[p for p in net.parameters() if p.requires_grad], config=cfg)
    data = batches(args)
    seconds = measure(args, {"deepspeed": lambda: engine.train_batch(data_iter=iter(data))})
    if torch.distributed.get_rank() == 0:
        print("PEER " + json.dumps(statistics.median(seconds["deepspeed"])), flush=True)


def peer_seconds(args: argparse.Namespace) -> float | None:
    """Run the peer's side in an interpreter that has it; None where it does not run."""
    words = [args.peer_python, "-m", "torch.distributed.run", "--nproc_per_node", str(args.stages), __file__, "--side", "peer"]
    for name in ("micro_batches", "rounds", "width", "rows", "layers", "stages"):
        words += [f"--{name}", str(getattr(args, name))]
    clean = {
        key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    clean = {key: value for key, value in clean.items() if not key.startswith(("TORCHELASTIC", "STATEROOM"))}
    done = subprocess.run(words, capture_output=True, text=True, env={**clean, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"})
    lines = [line for line in done.stdout.splitlines() if line.startswith("PEER ")]
    if not lines:
        print(f"the peer did not run: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    return float(json.loads(lines[-1][5:]))


def show(found: dict[str, Any], args: argparse.Namespace, peer: float | None) -> None:
    """Print the table."""
    sizes = f"{args.micro_batches} micro-batches of {args.rows} x {args.width}"
    print(f"{args.stages} stages, {sizes}, {args.layers} layers; {args.rounds} rounds")
    print(f"{'schedule':<18}{'ms/step':>9}{'idle, by stage':>22}{'simulated':>22}{'held':>12}{'predicted':>12}{'MB held':>10}")
    for name, figures in found.items():
        share = lambda values: " ".join(f"{100 * value:.1f} %" for value in values)  # noqa: E731
        counts = lambda values: " ".join(map(str, values))  # noqa: E731
        print(
            f"{name:<18}{1e3 * max(figures['seconds']):>9.1f}{share(figures['idle']):>22}{share(figures['simulated']):>22}"
            f"{counts(figures['held']):>12}{counts(figures['predicted']):>12}{max(figures['bytes']) / 1e6:>10.1f}"
        )
    if peer is not None:
        print(f"{'deepspeed (1f1b)':<18}{1e3 * peer:>9.1f}")


def parse() -> argparse.Namespace:
    """Return the command line's choices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("micro_batches", 8), ("rounds", 10), ("width", 512), ("rows", 256), ("layers", 8), ("stages", 2)):
        parser.add_argument(f"--{name}", type=int, default=value, help="(default: %(default)s)")
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), help="(default: all)")
    parser.add_argument(
        "--sleep_ms", type=float, default=0.0, help="let each layer take this long too, asleep; for schedules without halves"
    )
    parser.add_argument("--peer_python", help="an interpreter that has DeepSpeed")
    parser.add_argument("--side", choices=("ours", "peer"), default="ours", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    return parser.parse_args()


def main() -> None:
    """Run one side."""
    args = parse()
    torch.set_num_threads(1)
    if args.side == "peer":
        theirs(args)
        return
    import stateroom

    stateroom.init_distributed()
    is_first = torch.distributed.get_rank() == 0
    peer = peer_seconds(args) if args.peer_python and is_first else None
    found = ours(args)
    if is_first:
        show(found, args, peer)
        if args.json:
            args.json.write_text(json.dumps({"schedules": found, "peer_seconds": peer}, indent=1))


if __name__ == "__main__":
    main()
