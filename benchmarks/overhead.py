"""What the engine's hooks cost: a step through the engine on one rank, beside the bare loop, interleaved.

    python benchmarks/overhead.py [--rounds 15] [--model blocks|many] [--dim 256]

Prints the medians of both, their ratio pair by pair, the time of `initialize` and of `import stateroom`. The model is a
Llama of 12 blocks, or one of 10,000 small parameters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "llama"))
import stateroom
import step_models
from model import Llama, LlamaConfig


def build(dim: int) -> Llama:
    """Return the 12-block model, the same each time."""
    torch.manual_seed(0)
    return Llama(LlamaConfig(vocab_size=512, dim=dim, num_layers=12, num_heads=4, num_kv_heads=4, max_seq_len=128))


class Many(step_models.Many):
    """The model of many small parameters, called as the Llama is."""

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return a loss of numbers made from the inputs."""
        return super().forward(inputs[:, :16].float() / 512)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets [4, 128]."""
    ids = torch.randint(512, (4, 129), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def import_seconds() -> float:
    """Return the median time of importing the package in a fresh process, less the interpreter's own start."""
    code = "import time; t = time.perf_counter(); import stateroom; print(time.perf_counter() - t)"
    runs = [float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout) for _ in range(5)]
    return statistics.median(runs)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", choices=("blocks", "many"), default="blocks")
    parser.add_argument("--dim", type=int, default=256)
    args = parser.parse_args()
    torch.set_num_threads(1)
    inputs, targets = batch()
    make = Many if args.model == "many" else lambda: build(args.dim)
    bare = make()
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-4, fused=True)

    def bare_step() -> None:
        loss = bare(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    steps = {"bare": bare_step}
    result: dict[str, float] = {"import_s": import_seconds()}
    for stage in (0, 3):
        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}, "log_level": "warning"}
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}}
        model = make()
        began = time.perf_counter()
        engine, *_ = stateroom.initialize(model, config=config)
        result[f"initialize_stage_{stage}_s"] = time.perf_counter() - began

        def engine_step(engine: stateroom.Engine = engine) -> None:
            loss = engine(inputs, targets)
            engine.backward(loss)
            engine.step()

        steps[f"stage {stage}"] = engine_step
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(args.rounds + 2):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if round_ >= 2:
                seconds[name].append(time.perf_counter() - began)
    for name, values in seconds.items():
        ratios = [a / b for a, b in zip(values, seconds["bare"], strict=True)]
        result[f"{name}_s"] = statistics.median(values)
        result[f"{name}_over_bare"] = statistics.median(ratios)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
