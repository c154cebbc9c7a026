"""Each pattern trains as in plain PyTorch at every stage."""

from __future__ import annotations

import pytest
import torch
from patterns import PATTERNS, data

STEPS = 6
RANKS = 2


def make(name):
    torch.manual_seed(5)
    return PATTERNS[name]()


def optimizer(params):
    return torch.optim.AdamW(params, lr=3e-3, weight_decay=0.1)


def inputs(model, step, rank):
    return data(step, 0 if getattr(model, "same_data", False) else rank)


def engine_run(name, stages):
    """Return (losses, whole weights, buffers) per stage."""
    import stateroom

    found = []
    for stage in stages:
        config = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": stage}, "units": {"min_numel": 0}}
        engine, *_ = stateroom.initialize(make(name), config={**config, "gradient_clipping": 0}, optimizer=optimizer)
        losses = []
        for step in range(STEPS):
            loss = engine(*inputs(engine.module, step, engine.global_rank), step=step)
            engine.backward(loss)
            engine.step()
            losses.append(engine.comm.gather_rows(loss.detach().double().reshape(1)).mean().item())
        held = [unit.name for unit in engine.sharded.units if unit.sharded and unit.gathered]
        weights = {k: v.clone() for k, v in engine.module_state_dict().items()}
        found.append((losses, weights, held))
        engine.destroy()
    return found


def plain_run(name):
    model = make(name)
    model = model
    opt = optimizer([p for p in model.parameters() if p.requires_grad])
    losses = []
    for step in range(STEPS):
        total = 0.0
        sums = {}
        for rank in range(RANKS):
            opt.zero_grad()
            loss = model(*inputs(model, step, rank), step=step)
            loss.backward()
            total += loss.item() / RANKS
            for p in model.parameters():
                if p.grad is not None:
                    grad = p.grad.to_dense() if p.grad.is_sparse else p.grad
                    sums[p] = sums.get(p, 0) + grad / RANKS
        for p in model.parameters():
            p.grad = sums.get(p)
        opt.step()
        losses.append(total)
    return losses, model.state_dict()


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern(pools, name):
    losses, weights = plain_run(name)
    for stage, (seen, whole, held) in enumerate(pools(RANKS).run(engine_run, name, range(4))[0]):
        assert max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(seen, losses, strict=True)) < 1e-5, (stage, seen, losses)
        assert whole.keys() == weights.keys()
        for key, expected in weights.items():
            if "num_batches" in key or "running" in key:
                continue  # plain runs every rank's batch through one model
            assert torch.allclose(whole[key].double(), expected.double(), rtol=1e-4, atol=3e-6), (stage, key)
        assert not held, (stage, held)
