"""What a start costs: imports, the launcher beside torchrun, `initialize` and the first step beside the bare loop's.

    python benchmarks/startup.py [--rounds 5] [--model block] [--stages 0,3] [--skip-launcher]

Everything runs in fresh processes, in turn, and medians are printed. Processes read warm files: the first round is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent

PIECE = """
import json, sys, time
began = time.perf_counter()
import torch
torch_s = time.perf_counter() - began
sys.path.insert(0, {here!r})
import step_models, step_rank
torch.set_num_threads(1)
model = step_models.build({model!r})
batch = step_models.KINDS[{model!r}].batch(1)
began = time.perf_counter()
{setup}
setup_s = time.perf_counter() - began
began = time.perf_counter()
step()
first_s = time.perf_counter() - began
later = []
for _ in range(3):
    began = time.perf_counter()
    step()
    later.append(time.perf_counter() - began)
print(json.dumps(dict(torch_s=torch_s, setup_s=setup_s, first_s=first_s, later_s=sorted(later)[1])))
"""
BARE = """
optimizer = step_rank.adamw(model.parameters())
def step():
    model(*batch).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""
ENGINE = """
import stateroom
config = dict(train_micro_batch_size_per_gpu=1, zero_optimization=dict(stage={stage}), log_level="error", gradient_clipping=1.0)
engine = stateroom.initialize(model=model, optimizer=step_rank.adamw, config=config)[0]
def step():
    engine.backward(engine(*batch))
    engine.step()
"""


def seconds_of(command: list[str]) -> float:
    """Return how long a process takes."""
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def starts(args: argparse.Namespace) -> dict[str, list[float]]:
    """Return seconds of starts that do no work."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "nothing.py"
        script.write_text("")
        commands = {"an empty Python": [sys.executable, str(script)], "import stateroom": [sys.executable, "-c", "import stateroom"]}
        commands["import torch"] = [sys.executable, "-c", "import torch"]
        if not args.skip_launcher:
            commands["launcher --help"] = [str(BIN / "launcher"), "--help"]
            commands["launcher, 2 empty ranks"] = [str(BIN / "launcher"), "--num_gpus", "2", str(script)]
            commands["torchrun, 2 empty ranks"] = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", str(script)]
        for number in range(args.rounds + 1):
            for name, command in commands.items():
                took = seconds_of(command)
                if number:
                    found.setdefault(name, []).append(took)
    return found


def pieces(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return, for the bare loop and each stage, the medians of what a process reports of its setup and first steps."""
    setups = {"bare loop": BARE, **{f"stage {stage}": ENGINE.format(stage=stage) for stage in args.stages.split(",")}}
    said: dict[str, list[dict[str, float]]] = {name: [] for name in setups}
    for number in range(args.rounds + 1):
        for name, setup in setups.items():
            code = PIECE.format(here=str(HERE), model=args.model, setup=setup)
            ran: Any = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            if number:
                said[name].append(json.loads(ran.stdout.splitlines()[-1]))
    return {name: {key: statistics.median(row[key] for row in rows) for key in rows[0]} for name, rows in said.items()}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="block")
    parser.add_argument("--stages", default="0,3")
    parser.add_argument("--skip-launcher", action="store_true")
    args = parser.parse_args()
    for name, seconds in starts(args).items():
        print(f"{name:26} {1e3 * statistics.median(seconds):9.0f} ms", flush=True)
    print(f"{'':26} {'optimizer and engine':>21} {'first step':>11} {'a later one':>12}")
    for name, row in pieces(args).items():
        print(f"{name:26} {1e3 * row['setup_s']:>18.0f} ms {1e3 * row['first_s']:>8.0f} ms {1e3 * row['later_s']:>9.0f} ms")


if __name__ == "__main__":
    main()
