"""On an accelerator: a Llama of about 1 B parameters through the engine, beside a hand-written compiled loop and beside FSDP2.

    python benchmarks/gpu.py [--variants loop,stateroom-0,stateroom-3,fsdp2] [--rounds 5] [--steps 5] [--dim 2048] [--layers 16]
        [--length 2048] [--rows 4] [--eager] [--json FILE]

One rank, bf16 with fp32 master weights, fused AdamW, clipping at 1.0; blocks are compiled one by one. Variants take turns
within rounds. A step's seconds are those between two synchronisations; its host time is that until the last launch has
returned. MFU counts the model's FLOPs (6 per parameter outside the embedding and token, and causal attention) over the
device's dense bf16 peak as the ledger's table has it. Memory that the allocator has reserved is noted after every round:
growth means that buffers are not used again. On a CPU it runs at small sizes, to try the script.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "llama"))
from model import Block, Llama, LlamaConfig
from stateroom.ledger.figures import peak_of_device

LR, CLIP = 1e-4, 1.0
Step = Callable[[], Any]


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are compiled, and wrapped by peers, one by one."""
    return [module for module in model.modules() if isinstance(module, Block)]


class Bench:
    """Model sizes, device and batch that all variants share."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.accelerator.current_accelerator() or torch.device("cpu")
        self.config = LlamaConfig(
            vocab_size=32_000,
            dim=args.dim,
            num_layers=args.layers,
            num_heads=args.dim // 64 if args.dim >= 128 else 2,
            num_kv_heads=args.dim // 64 if args.dim >= 128 else 2,
            max_seq_len=args.length,
        )
        ids = torch.randint(32_000, (args.rows, args.length + 1), generator=torch.Generator().manual_seed(1)).to(self.device)
        self.batch = (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())

    def model(self, dtype: torch.dtype) -> nn.Module:
        """Return the model with the same values each time."""
        torch.manual_seed(0)
        model = Llama(self.config).to(self.device, dtype)
        if not self.args.eager:
            for block in blocks(model):
                block.forward = torch.compile(block.forward)  # type: ignore[method-assign]
        return model

    def wait(self) -> None:
        """Return when the device has done what it was told."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def reserved_bytes(self) -> int:
        """Return the memory that the allocator holds."""
        return 0 if self.device.type == "cpu" else torch.accelerator.memory_reserved()

    def flops(self) -> float:
        """Return the model's FLOPs of a step: 6 per weight and token, and causal attention's 6 * layers * length * dim a token."""
        with torch.device("meta"):
            model = Llama(self.config)
        weights = sum(param.numel() for name, param in model.named_parameters() if "embed" not in name)
        tokens = self.args.rows * self.args.length
        return tokens * (6.0 * weights + 6.0 * self.args.layers * self.args.length * self.args.dim)


def loop(bench: Bench) -> Step:
    """Return a step of what a careful user would write by hand: bf16 weights, fp32 masters, grouped copies."""
    model = bench.model(torch.bfloat16)
    params = list(model.parameters())
    masters = [param.detach().float().requires_grad_() for param in params]
    optimizer = torch.optim.AdamW(masters, lr=LR, fused=True)
    grads = [torch.zeros_like(master) for master in masters]
    for master, grad in zip(masters, grads, strict=True):
        master.grad = grad

    def step() -> None:
        model(*bench.batch).backward()
        torch._foreach_copy_(grads, [param.grad for param in params])
        torch.nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)
        for param in params:
            param.grad = None

    return step


def engine(bench: Bench, stage: int) -> Step:
    """Return a step through the engine."""
    import stateroom

    config = {
        "train_micro_batch_size_per_gpu": bench.args.rows,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
        "gradient_clipping": CLIP,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "log_level": "error",
    }
    made = stateroom.initialize(bench.model(torch.bfloat16), config=config)[0]

    def step() -> None:
        made.backward(made(*bench.batch))
        made.step()

    return step


def fsdp2(bench: Bench) -> Step:
    """Return a step through fully_shard on the one rank that there is."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(bench.device.type, (dist.get_world_size(),))
    model = bench.model(torch.float32)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=LR, fused=True)

    def step() -> None:
        model(*bench.batch).backward()
        torch.nn.utils.clip_grad_norm_(params, CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


VARIANTS: dict[str, Callable[[Bench], Step]] = {
    "loop": loop,
    "stateroom-0": lambda bench: engine(bench, 0),
    "stateroom-3": lambda bench: engine(bench, 3),
    "fsdp2": fsdp2,
}


def run(bench: Bench, step: Step, steps: int) -> dict[str, float]:
    """Run some steps; return the medians of seconds and of host seconds, and what the allocator holds after them."""
    seconds, host = [], []
    for _ in range(steps):
        bench.wait()
        began = time.perf_counter()
        step()
        host.append(time.perf_counter() - began)
        bench.wait()
        seconds.append(time.perf_counter() - began)
    return {"step_s": statistics.median(seconds), "host_s": statistics.median(host), "reserved_bytes": bench.reserved_bytes()}


def report(bench: Bench, rounds: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Return a row a variant."""
    name = torch.cuda.get_device_name() if bench.device.type == "cuda" else "cpu"
    peak, words = peak_of_device(name, "bf16")
    flops, rows = bench.flops(), []
    for variant, found in rounds.items():
        step_s = statistics.median(one["step_s"] for one in found)
        row: dict[str, Any] = {"variant": variant, "step_s": step_s, "tokens_per_s": bench.args.rows * bench.args.length / step_s}
        row["host_s"] = statistics.median(one["host_s"] for one in found)
        row["reserved_bytes"] = [one["reserved_bytes"] for one in found]
        row["mfu"], row["peak"] = (flops / step_s / peak if peak else None), words
        for peer in ("loop", "fsdp2"):
            if peer in rounds and peer != variant:
                row[f"over {peer}"] = statistics.median(a["step_s"] / b["step_s"] for a, b in zip(found, rounds[peer], strict=True))
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    print(f"MFU counts against {rows[0]['peak']}")
    for row in rows:
        mfu = "" if row["mfu"] is None else f"MFU {row['mfu']:.1%}, "
        beside = ", ".join(f"{row[key]:.3f} {key}" for key in row if key.startswith("over "))
        memory = ", ".join(f"{num_bytes / 1e9:.2f}" for num_bytes in row["reserved_bytes"])
        times = f"{1e3 * row['step_s']:8.1f} ms, host {1e3 * row['host_s']:7.1f} ms"
        print(f"{row['variant']:12} {times}, {row['tokens_per_s']:,.0f} tokens/s, {mfu}")
        print(f"{'':12} {beside}; reserved after each round: {memory} GB")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=4, help="sequences of a step")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        os.environ.setdefault(name, value)
    bench = Bench(args)
    if bench.device.type == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if bench.device.type == "cuda" else "gloo")
    steps: dict[str, Step] = {}
    for name in args.variants.split(","):
        print(f"building {name} ...", file=sys.stderr, flush=True)
        steps[name] = VARIANTS[name](bench)
        run(bench, steps[name], 3)  # compiles, and lets the allocator find its size
    gc.collect()
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in steps}
    for number in range(args.rounds):
        print(f"round {number + 1} of {args.rounds} ...", file=sys.stderr, flush=True)
        for name, step in steps.items():
            rounds[name].append(run(bench, step, args.steps))
    rows = report(bench, rounds)
    show(rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
