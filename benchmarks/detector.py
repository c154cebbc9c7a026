"""What the detector of ranks out of step costs: steps with it and without it, in turn, on the same engine.

    launcher --num_gpus 2 benchmarks/detector.py [--rounds 60]

Rank 0 prints the medians, their ratio pair by pair, and the detector's own time a step as the difference.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import stateroom
from overhead import batch, build
from stateroom.parallel.watch import NoWatch


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    args, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}, "log_level": "warning"}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-4}}
    engine, *_ = stateroom.initialize(build(256), config=config)
    watches = {"with": engine.comm._watch, "without": NoWatch()}
    seconds: dict[str, list[float]] = {name: [] for name in watches}
    for round_ in range(args.rounds + 2):
        order = list(watches) if round_ % 2 else list(reversed(watches))
        for name in order:
            engine.comm._watch = watches[name]
            engine.comm.barrier()
            began = time.perf_counter()
            engine.backward(engine(*batch()))
            engine.step()
            if round_ >= 2:
                seconds[name].append(time.perf_counter() - began)
    if engine.global_rank == 0:
        ratios = [a / b for a, b in zip(seconds["with"], seconds["without"], strict=True)]
        result = {f"{name}_s": statistics.median(values) for name, values in seconds.items()}
        print(json.dumps({**result, "with_over_without": statistics.median(ratios), "rounds": args.rounds}, indent=2))
    engine.comm._watch = watches["with"]
    engine.destroy()


if __name__ == "__main__":
    main()
