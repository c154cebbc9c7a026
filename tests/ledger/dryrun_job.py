"""A small training script that the tests run dry, and for real on ranks with torch's own count of memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

SIZES = {"vocab_size": 512, "dim": 128, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "max_seq_len": 128}
SEQ = 128


def example_model():
    folder = str(Path(__file__).parents[2] / "examples" / "llama")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    import model

    return model


def config_of(stage: int, precision: str, gas: int, **extra) -> dict:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    return {**config, **extra}


def build(config: dict):
    import stateroom

    module = example_model()
    torch.manual_seed(0)
    model = module.Llama(module.LlamaConfig(**SIZES))
    engine, *_ = stateroom.initialize(model, config=config)
    return engine


def batches(count: int):
    for _ in range(count):
        ids = torch.randint(SIZES["vocab_size"], (2, SEQ))
        yield ids, ids


def take_step(engine) -> None:
    count = engine.gradient_accumulation_steps()
    if hasattr(engine, "cut"):
        engine.train_batch(batches(count))
        return
    for ids, targets in batches(count):
        loss = engine(ids, targets)
        engine.backward(loss)
        engine.step()


def measured(config: dict):
    """Train two steps for real; return the ledger and the most bytes that tensors took in the second, counted by the allocator."""
    engine = build(config)
    take_step(engine)
    base = engine.ledger(show=False).measured_bytes
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        take_step(engine)
    changes = [(e.start_ns(), e.nbytes()) for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = base
    for _, change in sorted(changes, key=lambda item: item[0]):
        now += change
        peak = max(peak, now)
    ledger = engine.ledger(show=False)
    engine.destroy()
    return ledger, peak


if __name__ == "__main__":
    engine = build(json.loads(sys.argv[1]))
    for _ in range(10):
        take_step(engine)
