"""Memory over time: whether it grows over many steps, and how it rises and falls within one.

    python benchmarks/memory.py [--steps 1000] [--stages 0,1,2,3] [--json FILE]
    python benchmarks/memory.py --within [--model block] [--stages 0,1,2,3]

Two ranks with gloo. The first form trains a small Llama and prints, as the steps go by, the resident memory of rank 0 (on an
accelerator: what its allocator holds) and the tensors that Python knows; nothing is collected by hand. The second samples
resident memory a thousand times a second and prints the highest in forward, backward and step, above that before the model
was built.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import stateroom
import step_models
import step_rank
from step_models import VOCABULARY, Llama, LlamaConfig

RANKS, MARKS, PAGE_BYTES = 2, 10, os.sysconf("SC_PAGE_SIZE")
STATM = Path("/proc/self/statm")


def held_bytes() -> int:
    """Return resident memory, or on an accelerator what its allocator has reserved."""
    if torch.accelerator.is_available():
        return int(torch.accelerator.memory_reserved())
    return int(STATM.read_text().split()[1]) * PAGE_BYTES


def tensors() -> int:
    """Return the number of tensors that Python knows."""
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


def engine_of(model: torch.nn.Module, stage: int) -> stateroom.Engine:
    """Return an engine over the model."""
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": stage}, "log_level": "error"}
    return stateroom.initialize(model=model, optimizer=step_rank.adamw, config=config)[0]


def growth(stage: int, steps: int) -> list[dict[str, int]]:
    """Return what is held after each tenth of the steps."""
    torch.manual_seed(0)
    model = Llama(LlamaConfig(vocab_size=VOCABULARY, dim=64, num_layers=4, num_heads=4, num_kv_heads=4, max_seq_len=32))
    engine = engine_of(model, stage)
    rows = []
    for step in range(1, steps + 1):
        ids = torch.randint(VOCABULARY, (1, 33))
        engine.backward(engine(ids[:, :-1], ids[:, 1:]))
        engine.step()
        if step % max(steps // MARKS, 1) == 0:
            rows.append({"step": step, "held_bytes": held_bytes(), "tensors": tensors()})
    return rows


class Sampler:
    """Notes the highest resident memory of each phase from a thread of its own."""

    def __init__(self) -> None:
        self.before_bytes = held_bytes()
        self.highest: dict[str, int] = {}
        self._phase = ""
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._ended.wait(0.001):
            self._look()

    def _look(self) -> None:
        phase, found = self._phase, held_bytes() - self.before_bytes
        if phase:
            self.highest[phase] = max(found, self.highest.get(phase, 0))

    def run(self, phase: str, work: Callable[[], Any]) -> Any:
        """Run `work` as a phase."""
        self._phase = phase
        try:
            return work()
        finally:
            self._look()
            self._phase = ""
            self.highest[f"after {phase}"] = held_bytes() - self.before_bytes

    def end(self) -> None:
        """End the thread."""
        self._ended.set()


def within(stage: int, name: str, steps: int) -> list[dict[str, int]]:
    """Return the highest memory in each phase and what is left behind it, for a step that is not among the first."""
    sampler = Sampler()
    engine = engine_of(step_models.build(name), stage)
    batch = step_models.KINDS[name].batch(1)
    for number in range(steps + 2):
        if number == 2:
            sampler.highest.clear()
        loss = sampler.run("forward", lambda: engine(*batch))
        sampler.run("backward", lambda loss=loss: engine.backward(loss))
        del loss
        sampler.run("step", engine.step)
    sampler.end()
    return [sampler.highest]


def run_ranks(options: list[str]) -> list[dict[str, int]]:
    """Run this file on ranks of its own and return what the first one says."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", *options],
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("memory: a rank ended with an error")
    found: list[dict[str, int]] = json.loads(said[0].splitlines()[-1])
    return found


def show_growth(stage: int, rows: list[dict[str, int]], seconds: float) -> None:
    """Print what is held as steps go by, and the growth since the first mark."""
    first, last = rows[0], rows[-1]
    held = "  ".join(f"{row['held_bytes'] / 1e6:.1f}" for row in rows)
    grown = (last["held_bytes"] - first["held_bytes"]) / 1e6
    print(f"stage {stage}: MB after every {first['step']} steps: {held} ({seconds:.0f} s)")
    print(f"  from step {first['step']} to {last['step']}: {grown:+.2f} MB, {last['tensors'] - first['tensors']:+d} tensors", flush=True)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="default: 1000, or 5 with --within")
    parser.add_argument("--stages", default="0,1,2,3")
    parser.add_argument("--within", action="store_true")
    parser.add_argument("--model", choices=tuple(step_models.KINDS), default="block", help="with --within")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    steps = args.steps or (5 if args.within else 1000)
    if args.rank:
        torch.set_num_threads(1)
        stage = int(args.stages)
        print(json.dumps(within(stage, args.model, steps) if args.within else growth(stage, steps)))
        return
    found = {}
    for stage in map(int, args.stages.split(",")):
        began = time.perf_counter()
        rows = run_ranks(["--stages", str(stage), "--steps", str(steps), "--model", args.model, *["--within"] * args.within])
        found[stage] = rows
        if args.within:
            print(f"stage {stage}: " + ", ".join(f"{phase} {size / 1e6:,.0f} MB" for phase, size in rows[0].items()), flush=True)
        else:
            show_growth(stage, rows, time.perf_counter() - began)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
