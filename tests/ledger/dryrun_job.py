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
        "units": {"min_numel": 0},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    return {**config, **extra}


def build(config: dict, **sizes):
    import stateroom

    module = example_model()
    torch.manual_seed(0)
    model = module.Llama(module.LlamaConfig(**{**SIZES, **sizes}))
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


def measured(config: dict, make=build):
    """Train two steps for real; return the ledger and the most bytes that tensors took in the second, counted by the allocator."""
    engine = make(config)
    take_step(engine)
    base = sum(row.measured_bytes for row in engine.ledger(show=False).states if row.tier != "nvme")
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


def deep(config: dict):
    """Return an engine over one layer more, for four parts."""
    return build(config, num_layers=4)


def listed(config: dict):
    """Return an engine over the same model, written as a list of layers."""
    import stateroom
    from stateroom.pipe import LayerSpec, PipelineModule

    module = example_model()
    sizes = module.LlamaConfig(**{**SIZES, "num_layers": 4})

    class Layer(module.Block):
        def __init__(self) -> None:
            super().__init__(sizes)
            self.rope = module.Rope(sizes.head_dim, sizes.max_seq_len, sizes.rope_theta)

        def forward(self, x):
            return super().forward(x, self.rope)

    def loss(logits, targets):
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    ends = (LayerSpec(module.RMSNorm, sizes.dim, sizes.norm_eps), LayerSpec(module.Linear, sizes.dim, sizes.vocab_size))
    layers = [LayerSpec(module.Embedding, sizes.vocab_size, sizes.dim), *(LayerSpec(Layer) for _ in range(sizes.num_layers)), *ends]
    model = PipelineModule(layers, 2, loss_fn=loss, partition_method=[0, 3, 7], seed_layers=True)
    engine, *_ = stateroom.initialize(model, config=config)
    return engine


if __name__ == "__main__":
    engine = {"deep": deep, "listed": listed}.get(sys.argv[-1], build)(json.loads(sys.argv[1]))
    for _ in range(10):
        take_step(engine)
