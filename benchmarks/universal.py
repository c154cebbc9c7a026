"""What converting to the universal layout costs: beside reading and writing the bytes once, and beside DeepSpeed's converter.

    python benchmarks/universal.py [--gigabytes 2.4] [--rounds 3] [--num_workers N] [--peer_python .venv-peers/bin/python] [--json]

Each round, in turn: a file of as many bytes is written and synced, and read, past the page cache, one thread; `ckpt-to-universal`
converts a checkpoint of Stateroom; and, with an interpreter that has DeepSpeed, it and DeepSpeed's `ds_to_universal` convert a
checkpoint that DeepSpeed wrote. Commands are timed whole, start of the interpreter and import of torch included, until everything is
on the disk (DeepSpeed's does not sync: a sync of the file system follows and counts). Inputs are dropped from the page cache before.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from checkpoint import BYTES_A_PARAMETER, WIDTH, engine_for, raw_read, raw_write, step

LIMIT_SHARE = 0.7  # of the disk's speed: the goal

WITH_DEEPSPEED = """
import sys, torch, deepspeed
layers, width, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2},
          "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}}
engine, *_ = deepspeed.initialize(model=model, config=config)
engine.backward(engine(torch.randn(1, width)).pow(2).mean())
engine.step()
engine.save_checkpoint(folder, tag="t")
"""


def save_own(folder: Path, layers: int) -> None:
    """Write a checkpoint of Stateroom after one update."""
    engine = engine_for(layers, use_async=False)
    step(engine, 1)
    engine.save_checkpoint(folder, tag="t")
    engine.destroy()


def save_peers(python: str, folder: Path, layers: int) -> None:
    """Let DeepSpeed write one."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611", "DS_ACCELERATOR": "cpu"}
    command = [python, "-c", WITH_DEEPSPEED, str(layers), str(WIDTH), str(folder)]
    subprocess.run(command, env={**os.environ, **alone}, check=True, capture_output=True)


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def timed(command: list[str], origin: Path, out: Path) -> tuple[float, float]:
    """Run a converter; return its seconds until all is on the disk, and those that it says it took itself, without its start."""
    forget(origin)
    shutil.rmtree(out, ignore_errors=True)
    began = time.perf_counter()
    ran = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "DS_ACCELERATOR": "cpu"})
    os.sync()
    took_s = time.perf_counter() - began
    shutil.rmtree(out)
    said = re.search(r" in ([\d.]+) s", ran.stdout)
    return took_s, float(said[1]) if said else took_s


def measure(folder: Path, layers: int, args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of every measurement in every round."""
    num_bytes = layers * WIDTH * (WIDTH + 1) * BYTES_A_PARAMETER
    save_own(folder / "own", layers)
    workers = [] if args.num_workers is None else ["--num_workers", str(args.num_workers)]
    ours = [
        str(Path(sys.executable).parent / "ckpt-to-universal"),
        *workers,
        "--output_folder",
        str(folder / "out" / "u"),
        "--input_folder",
    ]
    peers = [
        args.peer_python,
        "-m",
        "deepspeed.checkpoint.ds_to_universal",
        "--inject_missing_state",
        "--output_folder",
        str(folder / "out" / "u"),
        "--input_folder",
    ]
    if args.peer_python:
        save_peers(args.peer_python, folder / "deepspeed", layers)
    found: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        row = {
            "write once": num_bytes / raw_write(folder / "raw", num_bytes) / 1e6,
            "read once": num_bytes / raw_read(folder / "raw") / 1e6,
        }
        (folder / "raw").unlink()
        row["own checkpoint"], row["own checkpoint, without its start"] = timed(
            [*ours, str(folder / "own")], folder / "own", folder / "out"
        )
        if args.peer_python:
            origin = folder / "deepspeed"
            row["DeepSpeed's checkpoint"], row["DeepSpeed's checkpoint, without its start"] = timed(
                [*ours, str(origin)], origin, folder / "out"
            )
            row["DeepSpeed's converter"], _ = timed([*peers, str(origin / "t")], origin, folder / "out")
        for name, seconds in row.items():
            found.setdefault(name, []).append(seconds)
    return found


def report(found: dict[str, list[float]], gigabytes: float) -> dict[str, float]:
    """Return medians in seconds and the ratios that are asked for."""
    once = [(write + read) / LIMIT_SHARE for write, read in zip(found["write once"], found["read once"], strict=True)]
    made = {"gigabytes of state": gigabytes, **{f"{name} (s)": statistics.median(values) for name, values in found.items()}}
    for name in ("own checkpoint", "own checkpoint, without its start"):
        made[f"{name}, over read and write once at {LIMIT_SHARE:.0%}"] = statistics.median(map(_over, found[name], once))
    if "DeepSpeed's converter" in found:
        made["ours over DeepSpeed's converter"] = statistics.median(
            map(_over, found["DeepSpeed's checkpoint"], found["DeepSpeed's converter"])
        )
    return {name: round(value, 3) for name, value in made.items()}


def _over(a: float, b: float) -> float:
    return a / b


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.4, help="of state")
    parser.add_argument("--folder", type=Path, help="on the disk that is to be measured; default: a temporary one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num_workers", type=int, help="as ckpt-to-universal has it")
    parser.add_argument("--peer_python", help="an interpreter that has DeepSpeed")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    layers = max(1, round(args.gigabytes * 1e9 / BYTES_A_PARAMETER / (WIDTH * WIDTH)))
    folder = args.folder or Path(tempfile.mkdtemp(prefix="stateroom-universal-"))
    try:
        found = report(measure(folder, layers, args), round(layers * WIDTH * (WIDTH + 1) * BYTES_A_PARAMETER / 1e9, 3))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(found, indent=2) if args.json else "\n".join(f"{name:70} {value:,}" for name, value in found.items()))


if __name__ == "__main__":
    main()
