"""Train a small Llama in pipeline stages, written both ways.

launcher --num_gpus 2 examples/pipeline/train.py --way layers
launcher --num_gpus 2 examples/pipeline/train.py --way auto --schedule interleaved-1f1b
launcher --num_gpus 4 examples/pipeline/train.py --way layers --schedule zbv

"layers" gives a list of layers to PipelineModule, which builds on each stage only what it runs. "auto" passes the ordinary
model of examples/llama, and the config alone cuts it. With twice as many ranks as stages, each stage is trained on two ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import stateroom
import torch
from layers import llama_layers, loss_fn
from model import Llama, LlamaConfig
from stateroom.pipe import PipelineModule
from torch import Tensor


def main() -> None:
    """Build it one way or the other, and train."""
    args = parse()
    stateroom.init_distributed()
    torch.manual_seed(args.seed)
    sizes = LlamaConfig(dim=args.dim, num_layers=args.layers, max_seq_len=args.seq_len, tied=args.tied)
    engine: Any
    if args.way == "layers":
        net = PipelineModule(llama_layers(sizes), args.stages, loss_fn=loss_fn, seed_layers=True, schedule=args.schedule)
        engine, *_ = stateroom.initialize(model=net, config=config(args))
    else:
        engine, *_ = stateroom.initialize(model=Llama(sizes), config=config(args, split="auto"))
    data = windows(args, engine.get_data_parallel_rank())
    first = float(engine.eval_batch(data))
    for step in range(1, args.steps + 1):
        loss = engine.train_batch(data)
        if engine.global_rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {float(loss):.3f}, idle {100 * engine.last_batch.idle_share():.0f} %", flush=True)
    last = float(engine.eval_batch(data))
    if engine.global_rank == 0:
        print(f"evaluation loss {first:.3f} -> {last:.3f} after {args.steps} steps")
    if args.save:
        engine.save_checkpoint(args.save)
    engine.destroy()


def config(args: argparse.Namespace, **pipeline: Any) -> dict[str, Any]:
    """Return the config; `pipeline.stages` is all that cutting needs."""
    return {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": args.micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {"stage": 1},
        "pipeline": {"stages": args.stages, "schedule": args.schedule, **pipeline},
        "steps_per_print": None,
    }


def windows(args: argparse.Namespace, copy: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (ids, next ids) of this file's own bytes, the same on every stage of a copy of the model."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    made = torch.Generator().manual_seed(args.seed + copy)
    while True:
        starts = torch.randint(0, len(text) - args.seq_len - 1, (args.micro_batch,), generator=made).tolist()
        rows = torch.stack([text[start : start + args.seq_len + 1] for start in starts])
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def parse() -> argparse.Namespace:
    """Return the command line's choices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=("layers", "auto"), default="layers", help="(default: %(default)s)")
    parser.add_argument("--schedule", default="1f1b", help="see `stateroom pipe show` (default: %(default)s)")
    parser.add_argument("--tied", action="store_true", help="one table for embedding and head")
    parser.add_argument("--save", help="write a checkpoint there at the end")
    sizes = {"stages": 2, "micro_batches": 8, "micro_batch": 2, "steps": 50, "dim": 64, "layers": 4, "seq_len": 64, "seed": 0}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value, help="(default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
