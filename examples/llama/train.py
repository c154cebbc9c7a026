"""Train a plain Llama on the standard library's sources, on as many ranks as the launcher starts.

launcher --num_gpus 2 examples/llama/train.py --config examples/llama/configs/zero3.json --minutes 3

Run it again to continue from its own save. Another ZeRO stage is another config; nothing here changes.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from pathlib import Path
from typing import Any

import stateroom
import torch
from data import Corpus, TextDataset, load_corpus
from model import Llama, LlamaConfig
from plot import plot_history
from sample import generate
from stateroom import comm
from torch.utils.data import default_collate

PROMPT = 'def read_text(path):\n    """'


def main() -> None:
    """Build, continue if there is a save, train, report and save."""
    args = parse()
    stateroom.init_distributed()  # before initialize(): one rank builds the tokenizer while the others wait
    corpus = load_corpus(args.run_dir / "data", None if args.bytes else args.bpe, comm.get_rank() == 0, comm.barrier)
    torch.manual_seed(args.seed)
    sizes = LlamaConfig(corpus.vocab_size, args.dim, args.layers, args.heads, args.kv_heads, max_seq_len=args.seq_len)
    windows = TextDataset(corpus.train, args.seq_len, args.seed)
    engine, _, loader, _ = stateroom.initialize(model=Llama(sizes), config=args.config, training_data=windows)

    saves, held_out = args.run_dir / "checkpoints", TextDataset(corpus.valid, args.seq_len)
    client_state: dict[str, Any] = {}
    if args.resume == "auto" and saves.is_dir():
        _, client_state = engine.load_checkpoint(str(saves))
    history = client_state.get("history") or {"step": [], "loss": [], "valid": [(0, validate(engine, held_out))]}
    train(engine, loader, history, args)
    history["valid"].append((engine.global_steps, validate(engine, held_out)))
    engine.save_checkpoint(str(saves), client_state={"history": history})
    report(engine, corpus, history, args)
    engine.destroy()


def parse() -> argparse.Namespace:
    """Return the command line's choices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a config such as configs/zero3.json beside this file")
    parser.add_argument("--run_dir", type=Path, default=Path("runs/llama"), help="saves, tokenizer and loss curve (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=3.0, help="how long to train in this run (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="train this many steps instead")
    parser.add_argument("--resume", choices=("auto", "never"), default="auto", help="continue from run_dir's save, if there is one")
    parser.add_argument("--bytes", action="store_true", help="learn bytes instead of BPE tokens")
    parser.add_argument("--bpe", type=int, default=2048, help="vocabulary of the BPE (default: %(default)s)")
    for name, size in (("dim", 192), ("layers", 4), ("heads", 3), ("kv_heads", 1), ("seq_len", 256), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=size, help="(default: %(default)s)")
    return parser.parse_args()


def train(engine: stateroom.Engine, loader: Any, history: dict[str, Any], args: argparse.Namespace) -> None:
    """Take steps until the time or the number of steps is up, and add each step's loss to the history."""
    per_step, begin = engine.gradient_accumulation_steps(), time.monotonic()
    data = itertools.chain.from_iterable(itertools.repeat(loader))  # epoch after epoch; a loaded save says where it goes on
    for done in itertools.count(1):
        for x, y in itertools.islice(data, per_step):
            loss = engine(x.to(engine.device), y.to(engine.device))
            engine.backward(loss)
            engine.step()
        history["step"].append(engine.global_steps)
        history["loss"].append(loss.item())  # rank 0's own; kept as a number, since small tensors kept for long fragment the heap
        if done == args.steps or (args.steps is None and done % 5 == 0 and any_rank(time.monotonic() - begin > args.minutes * 60, engine)):
            break


def any_rank(flag: bool, engine: stateroom.Engine) -> bool:
    """Return whether the flag is up on some rank: all must leave the loop at the same step."""
    vote = torch.tensor(float(flag), device=engine.device)
    comm.all_reduce(vote, op=comm.ReduceOp.MAX)
    return bool(vote)


@torch.no_grad()
def validate(engine: stateroom.Engine, data: TextDataset, num_windows: int = 64) -> float:
    """Return the mean loss over held-out windows; every rank takes as many batches as any other, and all ranks average."""
    engine.eval()
    size, rank, ranks = engine.train_micro_batch_size_per_gpu(), engine.global_rank, engine.world_size
    count = max(1, min(num_windows, len(data)) // (size * ranks))
    total = torch.zeros((), device=engine.device)
    for i in range(rank, count * ranks, ranks):
        x, y = default_collate([data[(i * size + j) % len(data)] for j in range(size)])
        total += engine(x.to(engine.device), y.to(engine.device))
    comm.all_reduce(total)
    engine.train()
    return float(total) / (count * ranks)


def report(engine: stateroom.Engine, corpus: Corpus, history: dict[str, Any], args: argparse.Namespace) -> None:
    """Print what the run achieved; text and ledger need every rank, only rank 0 prints."""
    ids = generate(engine, corpus.encode(PROMPT), 120, args.seq_len, seed=args.seed)
    if engine.global_rank != 0:
        return
    (_, first), (step, last) = history["valid"][0], history["valid"][-1]
    to_bits = 1 / math.log(2) / corpus.bytes_per_token
    engine.ledger()
    print(f"\n--- a sample of step {step}'s text\n{corpus.decode(ids)}\n---")
    print(f"validation loss: {first:.3f} -> {last:.3f} after {step} steps ({first * to_bits:.2f} -> {last * to_bits:.2f} bits per byte)")
    print(plot_history(history, args.run_dir / "loss.png"))
    print(f"saved in {args.run_dir / 'checkpoints'}; run again to continue")


if __name__ == "__main__":
    main()
