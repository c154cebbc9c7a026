"""Train a test model with the engine (on every rank) and with plain PyTorch (in one process) on the same global batch."""

from __future__ import annotations

import math

import torch
from models import batch, build

CLIP = 1.0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def config_for(stage: int, precision: str, gas: int, micro: int = 2, **extra):
    config = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage},
        "units": {"min_numel": 0},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if precision == "fp16":
        config["fp16"]["initial_scale_power"] = 8
    return {**config, **extra}


def cast(inputs, precision):
    return tuple(x.to(DTYPES[precision]) if x.is_floating_point() and i == 0 else x for i, x in enumerate(inputs))


def train_engine(model_name, stage, precision, gas, steps, extra=None):
    """Return (losses averaged over ranks per step, final whole fp32 weights, gradient norms) on each rank."""
    import stateroom

    model = build(model_name)
    engine, *_ = stateroom.initialize(model, config=config_for(stage, precision, gas, **(extra or {})))
    rank = engine.global_rank
    losses, norms = [], []
    for step in range(steps):
        total = 0.0
        for micro in range(gas):
            loss = engine(*cast(batch(model_name, step, micro, rank), precision))
            engine.backward(loss)
            engine.step()
            total += loss.item() / gas
        row = engine.comm.gather_rows(torch.tensor([total], dtype=torch.float64))
        losses.append(row.mean().item())
        norms.append(engine.get_global_grad_norm())
    weights = master_weights(engine)
    engine.destroy()
    return losses, weights, norms


def master_weights(engine):
    from stateroom.utils import safe_get_full_fp32_param

    return {name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}


def train_plain(model_name, precision, gas, steps, ranks, lr=2e-3, weight_decay=0.1, clip=CLIP, optimizer=None):
    """The master-weight recipe written out: one process, the same global batch."""
    model = build(model_name)
    dtype = DTYPES[precision]
    model.to(dtype)
    params = list(model.parameters())
    masters = [p.detach().float().clone().requires_grad_() for p in params]
    opt = (optimizer or (lambda ps: torch.optim.AdamW(ps, lr=lr, weight_decay=weight_decay)))(masters)
    losses, norms = [], []
    scale = 2.0**8 if precision == "fp16" else 1.0
    for step in range(steps):
        sums = [torch.zeros_like(m) for m in masters]
        total = 0.0
        for micro in range(gas):
            for rank in range(ranks):
                loss = model(*cast(batch(model_name, step, micro, rank), precision))
                (loss.float() * scale).backward()
                total += loss.item() / (gas * ranks)
                for acc, p in zip(sums, params, strict=True):
                    if p.grad is not None:
                        acc += p.grad.float() / (gas * ranks)
                    p.grad = None
        for m, acc in zip(masters, sums, strict=True):
            m.grad = acc / scale
        norm = math.sqrt(sum(float(m.grad.double().pow(2).sum()) for m in masters))
        if clip:
            torch.nn.utils.clip_grad_norm_(masters, clip)
        opt.step()
        with torch.no_grad():
            for p, m in zip(params, masters, strict=True):
                p.copy_(m)
        losses.append(total)
        norms.append(norm)
    return losses, {name: m.detach() for (name, _), m in zip(model.named_parameters(), masters, strict=True)}, norms
