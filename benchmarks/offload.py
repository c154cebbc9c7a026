"""What offload costs: a drive against raw direct I/O, the host's update against memory bandwidth, both overlapped; DeepSpeed beside it.

    python benchmarks/offload.py [--million 64] [--folder DIR] [--rounds 5] [--peer PYTHON] [--places cpu nvme] [--json]

One rank, fp32, ZeRO-3, AdamW; gradients stay from one backward, so that an update can be repeated. In each round every
figure is taken once, one after the other, and the best of the rounds counts. `raw` is what as many threads reach with
requests of the same size on aligned buffers and a file of their own, reading and writing at once as an update does. `moved`
is the update's own traffic with the arithmetic left out, `computed` the update with all states in memory. Adam reads 16 bytes
and writes 12 for an element, all in place; `traffic` is how fast as many threads move just that: two tensors scaled in place and
one added to another. A copy is no yardstick: it also fetches the lines that it overwrites, bytes that nobody counts.

With --peer (a Python that has DeepSpeed) the step of the same model is timed there too, where its operators compile.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

WIDTH = 1024
ADAM_BYTES = 28  # an element: parameter, gradient and two states read, all but the gradient written
TILE = 8 << 20  # what Stateroom takes where the config leaves it open
PIECE = 16 << 20  # bytes of one state of one sub-group, about


class Tower(nn.Module):
    """Square layers: as many as the wanted parameters need."""

    def __init__(self, million: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(max(round(million * 1e6 / WIDTH**2), 1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean square of what comes out at the top."""
        for layer in self.layers:
            x = x + 0.01 * torch.relu(layer(x))
        return x.pow(2).mean()


def timed(action: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def config_for(place: str, folder: str, peer: bool = False) -> dict[str, Any]:
    """Return the config of one run."""
    zero: dict[str, Any] = {"stage": 3, "sub_group_size": TILE}
    if place != "device":
        zero["offload_optimizer"] = {"device": place, "nvme_path": folder, "pin_memory": False, "buffer_count": 12}
        zero["offload_optimizer"] |= {"pipeline_read": True, "pipeline_write": True}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-4}}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer, "zero_optimization": zero, "gradient_clipping": 0.0}
    return {**config, "steps_per_print": 10**9} if peer else {**config, "log_level": "error"}


def trained(package: Any, million: float, place: str, folder: str, steps: int) -> tuple[Any, list[float]]:
    """Return an engine after a few steps and one backward more, and the seconds of each step()."""
    torch.manual_seed(0)
    model = Tower(million)
    peer = package.__name__ == "deepspeed"
    engine, *_ = package.initialize(model=model, model_parameters=model.parameters(), config=config_for(place, folder, peer))
    seconds = []
    for _ in range(steps):
        engine.backward(engine(torch.ones(1, WIDTH)))
        seconds.append(timed(engine.step))
    engine.backward(engine(torch.ones(1, WIDTH)))
    return engine, seconds


# ---- the parts


def raw_rate(folder: str, num_bytes: int) -> float:
    """Return bytes a second, read and written, of plain requests on a file of its own."""
    from stateroom.zero.tiers.disk import aligned_buffer
    from stateroom.zero.tiers.drive import Drive

    drive, half = Drive(Path(folder), 0), num_bytes // 2 // 4096 * 4096
    buffers = [aligned_buffer(half).zero_() for _ in range(2)]
    drive.reserve("raw", torch.uint8, 0, 2 * half)
    for at in (0, half):  # the first write to reserved room costs more
        drive.write("raw", torch.uint8, at, buffers[0]).wait()

    def both() -> None:
        transfers = []
        for at in range(0, half, PIECE):
            transfers.append(drive.read("raw", torch.uint8, at, buffers[0][at : at + PIECE]))
            transfers.append(drive.write("raw", torch.uint8, half + at, buffers[1][at : at + PIECE]))
        for transfer in transfers:
            transfer.wait()

    seconds = timed(both)
    drive.close()
    return 2 * half / seconds


def traffic_rate(numel: int) -> float:
    """Return bytes a second of Adam's reads and writes with next to no arithmetic: 16 bytes in and 12 out for an element."""
    param, gradient, first, second = (torch.full((numel,), 1e-3) for _ in range(4))

    def pass_over_all() -> None:
        first.mul_(0.9)
        second.mul_(0.999)
        param.add_(gradient)

    return numel * ADAM_BYTES / min(timed(pass_over_all) for _ in range(3))


def kernel_rate(numel: int) -> float:
    """Return elements a second of torch's fused kernel on one flat tensor."""
    param = nn.Parameter(torch.zeros(numel))
    param.grad = torch.ones(numel)
    optimizer = torch.optim.AdamW([param], fused=True)
    optimizer.step()
    return numel / min(timed(optimizer.step) for _ in range(3))


def parts(million: float, folder: str, rounds: int) -> dict[str, float]:
    """Return the best of each figure."""
    import stateroom

    in_memory, _ = trained(stateroom, million, "cpu", folder, 2)
    on_drive, _ = trained(stateroom, million, "nvme", folder, 2)
    numel = sum(run.stop - run.start for run in on_drive.optimizer.runs)
    inner = on_drive.optimizer.inner

    def update(engine: Any) -> float:
        return timed(lambda: engine.optimizer.update(engine.optimizer.runs, 1.0))

    def moved() -> tuple[float, int]:
        before = traffic(on_drive)
        inner.step, step = lambda: None, inner.step
        seconds = update(on_drive)
        inner.step = step
        return seconds, traffic(on_drive) - before

    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        seconds, num_bytes = moved()
        row = {
            "raw_MBs": raw_rate(folder, num_bytes) / 1e6,
            "moved_MBs": num_bytes / seconds / 1e6,
            "moved_s": -seconds,
            "overlapped_s": -update(on_drive),
            "computed_s": -min(update(in_memory) for _ in range(3)),
            "traffic_GBs": traffic_rate(numel) / 1e9,
            "kernel_GBs": kernel_rate(numel) * ADAM_BYTES / 1e9,
        }
        for name, value in row.items():
            found.setdefault(name, []).append(value)
    in_memory.destroy()
    on_drive.destroy()
    best = {name: abs(max(values)) for name, values in found.items()}
    best["update_GBs"] = numel * ADAM_BYTES / best["computed_s"] / 1e9
    best["drive_share"] = statistics.median(m / r for m, r in zip(found["moved_MBs"], found["raw_MBs"], strict=True))
    computed = [-numel * ADAM_BYTES / seconds / 1e9 for seconds in found["computed_s"]]
    best["bandwidth_share"] = statistics.median(c / t for c, t in zip(computed, found["traffic_GBs"], strict=True))
    best["kernel_share"] = best["update_GBs"] / best["kernel_GBs"]
    best["overlap_factor"] = best["overlapped_s"] / max(best["moved_s"], best["computed_s"])
    return best


def traffic(engine: Any) -> int:
    """Return the bytes that the engine's drives have moved so far."""
    return sum(moved.num_bytes for drive in engine.sharded.tiers.drives for moved in drive.moved.values())


# ---- the peer


def step_seconds(package_name: str, million: float, place: str, folder: str, rounds: int) -> float:
    """Return the best seconds of a step of one package, for the process that was started for it."""
    package = importlib.import_module(package_name)
    package.init_distributed()
    _, seconds = trained(package, million, place, folder, rounds + 2)
    return min(seconds[2:])


def beside(python: str, package: str, args: argparse.Namespace, place: str) -> float | str:
    """Return the step seconds of a package under an interpreter, or the last line of what went wrong."""
    command = [python, __file__, "--job", package, "--place", place, "--million", str(args.million), "--folder", args.folder]
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29655", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run([*command, "--rounds", str(args.rounds)], capture_output=True, text=True, env=env)
    if done.returncode:
        return ([line for line in done.stderr.splitlines() if line.strip()] or ["no message"])[-1]
    return float(json.loads(done.stdout.splitlines()[-1])["step_s"])


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million", type=float, default=64.0, help="parameters, in millions")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="folder on the drive")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", help="a Python interpreter that has DeepSpeed")
    parser.add_argument("--places", nargs="+", default=["cpu", "nvme"], choices=["cpu", "nvme"], help="where the peer keeps its states")
    parser.add_argument("--peer_only", action="store_true", help="leave the parts out")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        print(json.dumps({"step_s": step_seconds(args.job, args.million, args.place, args.folder, args.rounds)}), flush=True)
        os._exit(0)  # DeepSpeed's threads are not waited for
    found: dict[str, Any] = {"million": args.million, "threads": torch.get_num_threads()}
    if not args.peer_only:
        found |= parts(args.million, args.folder, args.rounds)
    if args.peer:
        for place in args.places:
            found[f"stateroom_{place}_step_s"] = beside(sys.executable, "stateroom", args, place)
            found[f"deepspeed_{place}_step_s"] = beside(args.peer, "deepspeed", args, place)
    if args.json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        print(f"{name:24} {value:.4g}" if isinstance(value, float) else f"{name:24} {value}")


if __name__ == "__main__":
    main()
