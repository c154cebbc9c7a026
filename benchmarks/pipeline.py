"""What schedules cost on a model whose stages compute, against their simulation, each other, and DeepSpeed's pipeline.

    python benchmarks/pipeline.py [--micro_batches 8] [--rounds 10] [--width 512] [--json FILE]
    python benchmarks/pipeline.py --peer_python PATH   # an interpreter that has DeepSpeed, for its side

Every schedule, and the peer, has processes of its own over the same layers and batches. In each round all take one step in
turn while the others sleep, so that a machine that slows down slows all alike. Times are medians over rounds of a whole
train_batch on the slowest rank: optimizer and agreements included. Idle is the share of the time from its first
instruction's start to its last one's end in which a stage waited. Beside it stands what the simulation of the schedule
gives, once where a backward takes two forwards, and once with the costs that were measured: of each kind of instruction, of
each chunk, on each stage. Peak is the memory that a rank took at most since before its engine was built; bytes held are what
autograd kept of one micro-batch, times the most micro-batches that were held at once.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zero-bubble", "zbv", "dualpipev")
PEER = "deepspeed"
MARK = "BENCH "


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


# ---- one contender, in processes of its own


def ours(args: argparse.Namespace) -> tuple[Callable[[], Any], Callable[[], dict[str, Any]]]:
    """Return what takes a step of one of our schedules, and what says what the steps were like."""
    import stateroom
    from stateroom.pipe import LayerSpec, PipelineModule

    stateroom.init_distributed()
    layers = [LayerSpec(Layer, args.width, args.sleep_ms) for _ in range(args.layers)]
    net = PipelineModule(layers, args.stages, loss_fn=loss_fn, seed_layers=True, schedule=args.side)
    engine = stateroom.initialize(model=net, config=config(args, args.side))[0]
    data, records = batches(args), []

    def step() -> None:
        engine.train_batch(iter(data))
        records.append(engine.last_batch)

    return step, lambda: facts(engine, args, records[args.warm :])


def theirs(args: argparse.Namespace) -> tuple[Callable[[], Any], Callable[[], dict[str, Any]]]:
    """Return what takes a step of the peer; it has nothing more to say."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    deepspeed.init_distributed(dist_backend=None if torch.accelerator.is_available() else "gloo")
    layers = [LayerSpec(Layer, args.width, args.sleep_ms) for _ in range(args.layers)]
    net = PipelineModule(layers, num_stages=args.stages, loss_fn=loss_fn)
    cfg = {key: value for key, value in config(args, "1f1b").items() if key not in ("pipeline", "log_level")}
    engine, *_ = deepspeed.initialize(model=net, model_parameters=[p for p in net.parameters() if p.requires_grad], config=cfg)
    data = batches(args)
    return lambda: engine.train_batch(data_iter=iter(data)), dict


def serve(args: argparse.Namespace) -> None:
    """Build one contender, then do what the parent process says on the first rank's input."""
    before = psutil.Process().memory_info().rss
    step, report = theirs(args) if args.side == PEER else ours(args)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    while True:
        said = [sys.stdin.readline().strip() if rank == 0 else None]
        torch.distributed.broadcast_object_list(said)
        if said[0] == "step":
            torch.distributed.barrier()
            began = time.perf_counter()
            step()
            answer: Any = time.perf_counter() - began
        elif said[0] == "report":
            answer = {"peak": peak_bytes() - (0 if torch.accelerator.is_available() else before), **report()}
        else:
            break
        every: list[Any] = [None] * world
        torch.distributed.all_gather_object(every, answer)
        if rank == 0:
            print(MARK + json.dumps(every), flush=True)
    torch.distributed.barrier()
    os._exit(0)  # nothing of this is worth an orderly end, which takes some versions of the peer seconds


def peak_bytes() -> int:
    """Return the most memory that this rank had: of its accelerator, or of the process."""
    if torch.accelerator.is_available():
        return torch.accelerator.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Contender:
    """The processes of one schedule, or of the peer, seen from the parent.

    Raises:
        RuntimeError: they ended before they answered; with the last lines of what they said.
    """

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        words = [args.peer_python if name == PEER else sys.executable, __file__, "--side", name]
        for key in ("micro_batches", "width", "rows", "layers", "stages", "sleep_ms", "warm"):
            words += [f"--{key}", str(getattr(args, key))]
        shared = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(args.stages),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        if not torch.accelerator.is_available():
            shared["DS_ACCELERATOR"] = "cpu"
        self._ranks = []
        for rank in range(args.stages):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(args.stages)}
            pipe = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            self._ranks.append(subprocess.Popen(words, env={**shared, **place}, stdin=pipe, stdout=pipe, stderr=self._log, text=True))

    def ask(self, what: str) -> list[Any]:
        """Return every rank's answer."""
        first = self._ranks[0]
        assert first.stdin is not None and first.stdout is not None
        try:
            first.stdin.write(f"{what}\n")
            first.stdin.flush()
        except BrokenPipeError:
            pass  # it ended; the loop below finds that there is nothing to read
        for line in first.stdout:
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])
        self._log.seek(0)
        raise RuntimeError(f"{self.name} ended: {''.join(self._log.readlines()[-6:])}")

    def close(self) -> None:
        """End the processes."""
        for process in self._ranks:
            process.kill()
            process.wait()


def measure(args: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    """Return name -> figures, by rank, of those that run here."""
    contenders = {name: Contender(name, args) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    try:
        for number in range(args.rounds + args.warm):
            for name in list(contenders):
                try:
                    took = max(contenders[name].ask("step"))
                except RuntimeError as error:
                    print(error, file=sys.stderr)
                    contenders.pop(name).close()
                    continue
                if number >= args.warm:
                    seconds[name].append(took)
        found = {}
        for name, contender in contenders.items():
            every = contender.ask("report")
            found[name] = {"seconds": statistics.median(seconds[name]), "all_seconds": seconds[name]}
            found[name] |= {key: [each[key] for each in every] for key in every[0]}
        return found
    finally:
        for contender in contenders.values():
            contender.close()


# ---- what a schedule was like


def costs_of(records: list[Any]) -> dict[tuple[str, int], float]:
    """Return (kind, chunk) -> seconds of such an instruction on this stage: the mean in a round, and of these the median."""
    rounds: dict[tuple[str, int], list[float]] = {}
    for record in records:
        one: dict[tuple[str, int], list[float]] = {}
        for span in record.spans:
            one.setdefault((span.instruction.kind, span.instruction.chunk), []).append(span.end - span.start - span.waited)
        for key, found in one.items():
            rounds.setdefault(key, []).append(statistics.mean(found))
    return {key: statistics.median(found) for key, found in rounds.items()}


def facts(engine: Any, args: argparse.Namespace, records: list[Any]) -> dict[str, Any]:
    """Return this stage's idle share as measured and as simulated, and what it held."""
    plan, stage = engine._plan(args.micro_batches, True), engine.cut.stage
    costs: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(costs, costs_of(records))
    measured = plan.run(cost_of=lambda at, each: costs[engine.cut.chain[at]][each.kind, each.chunk])
    return {
        "idle": statistics.median(record.idle_share() for record in records),
        "assumed": idle_of(plan.run(), stage),
        "simulated": idle_of(measured, stage),
        "simulated_s": measured.seconds,
        "held": max(record.held for record in records),
        "predicted": plan.activations()[stage],
        "bytes": max(record.held for record in records) * kept_bytes(engine, args),
    }


def idle_of(ran: Any, stage: int) -> float:
    """Return a stage's simulated idle share up to the end of its last instruction, as it is measured."""
    return 1 - ran.busy[stage] / ran.spans[stage][-1][1]


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


def show(found: dict[str, Any], args: argparse.Namespace) -> None:
    """Print the table."""
    sizes = f"{args.micro_batches} micro-batches of {args.rows} x {args.width}"
    print(f"{args.stages} stages, {sizes}, {args.layers} layers; {args.rounds} rounds")
    columns = ("idle, by stage", "simulated", "if B is 2 F")
    print(f"{'schedule':<18}{'ms/step':>9}{'peak MB':>9}" + "".join(f"{name:>17}" for name in columns) + f"{'held':>9}{'MB held':>9}")
    for name, figures in found.items():
        row = f"{name:<18}{1e3 * figures['seconds']:>9.1f}{max(figures['peak']) / 1e6:>9.1f}"
        if name != PEER:
            for key in ("idle", "simulated", "assumed"):
                row += f"{' '.join(f'{100 * value:.1f} %' for value in figures[key]):>17}"
            row += f"{' '.join(map(str, figures['held'])):>9}{max(figures['bytes']) / 1e6:>9.1f}"
            wrong = [stage for stage, held in enumerate(figures["held"]) if held != figures["predicted"][stage]]
            row += f"  held, predicted: {figures['predicted']}" if wrong else ""
        print(row)


def parse() -> argparse.Namespace:
    """Return the command line's choices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("micro_batches", 8), ("rounds", 10), ("width", 512), ("rows", 256), ("layers", 8), ("stages", 2), ("warm", 2)):
        parser.add_argument(f"--{name}", type=int, default=value, help="(default: %(default)s)")
    parser.add_argument("--schedules", nargs="*", default=list(SCHEDULES), help="(default: all)")
    parser.add_argument(
        "--sleep_ms", type=float, default=0.0, help="let each layer take this long too, asleep; for schedules without halves"
    )
    parser.add_argument("--peer_python", help="an interpreter that has DeepSpeed")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    return parser.parse_args()


def main() -> None:
    """Measure, or be one of those that are measured."""
    args = parse()
    if args.side:
        torch.set_num_threads(1)
        serve(args)
        return
    found = measure(args, [*args.schedules, *([PEER] if args.peer_python else [])])
    show(found, args)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
