"""What saving and loading cost, against what the disk can do in the same run.

    python benchmarks/checkpoint.py [--gigabytes 1.2] [--folder DIR] [--rounds 3] [--json]
    launcher --num_gpus 2 benchmarks/checkpoint.py

The raw rates are those of one rank's share of bytes, written sequentially past the page cache and synced, and read back, by all
ranks at once.
Synchronous saves and loads are timed around the engine's own calls, all of it: agreement, checksums, manifest, renames.
The stall of an asynchronous save is what save_checkpoint() takes plus what the next update waits for the copy. Peak host
memory is the resident set of the process. Bytes are those of the states: 12 a parameter for Adam in fp32.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import stateroom
import torch
import torch.nn.functional as F
from stateroom.zero.tiers.disk import Input, Output, aligned_buffer
from torch import nn

WIDTH, BYTES_A_PARAMETER = 2048, 12
CHUNK_BYTES = 8 << 20


class Tower(nn.Module):
    """Square layers: as many as the wanted bytes of state need."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean square of what comes out at the top."""
        for layer in self.layers:
            x = x + F.relu(layer(x))
        return x.pow(2).mean()


def engine_for(layers: int, use_async: bool) -> Any:
    """Return an engine over a tower."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 2},
        "checkpoint": {"async": use_async},
        "log_level": "error",
    }
    return stateroom.initialize(Tower(layers), config=config)[0]


def step(engine: Any, rows: int) -> float:
    """Run one update and return the seconds that it took."""
    began = time.perf_counter()
    engine.backward(engine(torch.randn(rows, WIDTH)))
    engine.step()
    return time.perf_counter() - began


def raw_write(path: Path, num_bytes: int) -> float:
    """Return the rate in MB/s of writing noise sequentially, one thread, 8 MiB at a time, past the page cache, with fsync."""
    buffer = aligned_buffer(CHUNK_BYTES).random_()
    began = time.perf_counter()
    with Output(path, num_bytes) as output:
        for at in range(0, num_bytes, CHUNK_BYTES):
            output.write(buffer, at)
        output.finish()
    return num_bytes / (time.perf_counter() - began) / 1e6


def raw_read(path: Path) -> float:
    """Return the rate in MB/s of reading a file sequentially, one thread, 8 MiB at a time, past the page cache."""
    buffer = aligned_buffer(CHUNK_BYTES)
    began = time.perf_counter()
    with Input(path) as source:
        for at in range(0, source.num_bytes, CHUNK_BYTES):
            source.read(buffer, at)
        return source.num_bytes / (time.perf_counter() - began) / 1e6


def synchronous(folder: Path, layers: int, rounds: int) -> dict[str, list[float]]:
    """Alternate raw writes, saves, raw reads and loads; return MB/s of each."""
    engine = engine_for(layers, use_async=False)
    step(engine, 1)
    found: dict[str, list[float]] = {"raw write": [], "save": [], "raw read": [], "load": [], "save_s": []}
    for number in range(rounds):
        scratch = folder / f"raw{engine.global_rank}"
        num_bytes = sum(unit.hi - unit.lo for unit in engine.sharded.units) * BYTES_A_PARAMETER
        engine.comm.barrier()  # each measurement begins on all ranks at once: none has the disk to itself, none waits for another's
        found["raw write"].append(raw_write(scratch, num_bytes))
        engine.comm.barrier()
        began = time.perf_counter()
        engine.save_checkpoint(folder, tag=f"t{number}")
        took_s = time.perf_counter() - began
        found["save"].append(num_bytes / took_s / 1e6)
        found["save_s"].append(took_s)
        engine.comm.barrier()
        found["raw read"].append(raw_read(scratch))
        engine.comm.barrier()
        began = time.perf_counter()
        engine.load_checkpoint(folder, tag=f"t{number}")
        found["load"].append(num_bytes / (time.perf_counter() - began) / 1e6)
        engine.comm.barrier()
        if engine.global_rank == 0:
            shutil.rmtree(folder / f"t{number}")
        scratch.unlink()
        os.sync()  # what deleting leaves to be done is done before the next round
    engine.destroy()
    return found


def asynchronous(folder: Path, layers: int, rounds: int, rows: int) -> dict[str, list[float]]:
    """Return the stall of each save, the seconds until it was durable, and seconds of steps with and without one in flight."""
    engine = engine_for(layers, use_async=True)
    step(engine, rows)
    found: dict[str, list[float]] = {"stall_s": [], "durable_s": [], "step_s": [], "step_beside_s": []}
    for number in range(rounds + 1):
        quiet = [step(engine, rows) for _ in range(2)]
        engine.save_checkpoint(folder, tag=f"t{number}")
        beside = [step(engine, rows)]
        while engine.saving.saves_now:
            beside.append(step(engine, rows))
        engine.saving.wait()
        record = engine.saving.last
        assert not record.error, record.error
        if number:  # the first one allocates the memory that later ones use again
            found["stall_s"].append(record.stall_s)
            found["durable_s"].append(record.write_s)
            found["step_s"] += quiet
            found["step_beside_s"] += beside
    engine.destroy()
    return found


def report(sync: dict[str, list[float]], beside: dict[str, list[float]], gigabytes: float) -> dict[str, Any]:
    """Return medians and the ratios that are asked for."""
    middle = {name: statistics.median(values) for name, values in {**sync, **beside}.items()}
    pairs = {
        name: statistics.median([a / b for a, b in zip(sync[name], sync[raw], strict=True)])
        for name, raw in (("save", "raw write"), ("load", "raw read"))
    }
    return {
        "gigabytes_of_state": gigabytes,
        **{name: round(value, 3) for name, value in middle.items()},
        "save over raw write": round(pairs["save"], 3),
        "load over raw read": round(pairs["load"], 3),
        "stall over synchronous save": round(middle["stall_s"] / middle["save_s"], 4),
        "step beside a save over a quiet one": round(middle["step_beside_s"] / middle["step_s"], 3),
        "peak_host_memory_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2),
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.2, help="of state over all ranks")
    parser.add_argument("--folder", type=Path, help="on the disk that is to be measured; default: a temporary one beside this file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=512, help="samples of a step beside an asynchronous save")
    parser.add_argument("--json", action="store_true")
    args, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    stateroom.init_distributed()
    layers = max(1, round(args.gigabytes * 1e9 / BYTES_A_PARAMETER / (WIDTH * WIDTH)))
    folder = args.folder or Path(tempfile.gettempdir()) / f"stateroom-benchmark-{os.getppid()}"
    folder.mkdir(parents=True, exist_ok=True)
    sync = synchronous(folder, layers, args.rounds)
    beside = asynchronous(folder, layers, args.rounds, args.rows)
    found = report(sync, beside, round(layers * WIDTH * (WIDTH + 1) * BYTES_A_PARAMETER / 1e9, 3))
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        print(json.dumps(found, indent=2) if args.json else "\n".join(f"{name:36} {value:,}" for name, value in found.items()))


if __name__ == "__main__":
    main()
