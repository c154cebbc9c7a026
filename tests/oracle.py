"""Plain single-process PyTorch on the global batch, and the same run through the engine, for models that a test brings itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

LossOf = Callable[[Any, int, int, int], torch.Tensor]  # (model or engine, step, micro, rank) -> scalar loss
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass
class Run:
    """What a training run leaves behind: losses and norms per step, final fp32 weights by name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def sgd(lr: float = 0.1, **options: Any) -> MakeOptimizer:
    return lambda params: torch.optim.SGD(params, lr=lr, **options)


def adamw(lr: float = 1e-2, **options: Any) -> MakeOptimizer:
    return lambda params: torch.optim.AdamW(params, lr=lr, **options)


def plain(
    model: nn.Module,
    loss_of: LossOf,
    steps: int,
    make_optimizer: MakeOptimizer,
    *,
    gas: int = 1,
    ranks: int = 2,
    clip: float = 0.0,
    dtype: torch.dtype = torch.float32,
    skip: Collection[int] = (),
    first: int = 0,
) -> Run:
    """Train with fp32 masters on the mean loss over (rank, micro-batch); gradients of steps in `skip` are thrown away."""
    model.to(dtype)
    params = [p for p in model.parameters() if p.requires_grad]
    masters = [p.detach().float().clone().requires_grad_() for p in params]
    optimizer = make_optimizer(masters)
    run = Run()
    for step in range(first, first + steps):
        sums: list[torch.Tensor | None] = [None] * len(params)
        total = 0.0
        for micro in range(gas):
            for rank in range(ranks):
                loss = loss_of(model, step, micro, rank)
                loss.backward()
                total += loss.item() / (gas * ranks)
                for index, param in enumerate(params):
                    if param.grad is not None:
                        part = param.grad.float() / (gas * ranks)
                        sums[index] = part if sums[index] is None else sums[index] + part
                        param.grad = None
        for master, grad in zip(masters, sums, strict=True):
            master.grad = grad
        run.losses.append(total)
        run.norms.append(math.sqrt(sum(float(m.grad.double().pow(2).sum()) for m in masters if m.grad is not None)))
        if step in skip:
            continue
        if clip:
            torch.nn.utils.clip_grad_norm_(masters, clip)
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)
    trained = {id(p): m for p, m in zip(params, masters, strict=True)}
    run.weights = {name: trained.get(id(p), p).detach().float().clone() for name, p in model.named_parameters()}
    return run


def engine_for(model: nn.Module, stage: int, make_optimizer: MakeOptimizer | None = None, **keys: Any) -> Any:
    """Return an engine whose units are as small as they can be, so that tiny models are really sharded; no clipping unless asked."""
    import stateroom

    initialize_only = ("training_data", "collate_fn", "lr_scheduler", "loss_fn", "model_parameters", "optimizer")
    given = {key: keys.pop(key) for key in initialize_only if key in keys}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 64},
        "units": {"min_numel": 0},
        **keys,
    }
    config = {key: value for key, value in config.items() if value is not None}
    if make_optimizer is not None:
        given["optimizer"] = lambda params: make_optimizer(list(params))
    return stateroom.initialize(model, config=config, **given)[0]


def drive(engine: Any, loss_of: LossOf, steps: int, *, first: int = 0) -> Run:
    """Train with engine.backward and engine.step; losses are this rank's."""
    run = Run()
    gas = engine.gradient_accumulation_steps()
    for step in range(first, first + steps):
        total = 0.0
        for micro in range(gas):
            loss = loss_of(engine, step, micro, engine.global_rank)
            engine.backward(loss)
            engine.step()
            total += loss.item() / gas
        run.losses.append(total)
        run.norms.append(engine.get_global_grad_norm())
    run.weights = weights_of(engine)
    return run


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    from stateroom.utils import safe_get_full_fp32_param

    return {name: safe_get_full_fp32_param(p).detach().float().clone() for name, p in engine.module.named_parameters()}


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], atol: float = 2e-5, what: Any = "") -> None:
    assert found.keys() == wanted.keys(), what
    for name, value in wanted.items():
        worst = (found[name] - value).abs().max().item() if value.numel() else 0.0
        assert found[name].shape == value.shape and worst <= atol, f"{what} {name}: off by {worst}"


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], what: Any = "") -> None:
    assert found.keys() == wanted.keys(), what
    for name, value in wanted.items():
        assert torch.equal(found[name], value), f"{what} {name} differs by {(found[name] - value).abs().max().item()}"


def error_of(action: Callable[[], Any]) -> tuple[str, str]:
    """Return (type name, message) of what `action` raises; ("", "") when it does not."""
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""
