"""What an engine keeps of each step: the tokens it saw, the record for the run directory, the account."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from ..zero.pick import tensors_in
from .costs import Costs
from .reporting import ledger_of

if TYPE_CHECKING:
    from .engine import Engine


def count_tokens(engine: Engine, args: Any, kwargs: Any) -> None:
    """Count token ids: the first integer input with at least two axes."""
    for tensor in tensors_in((args, kwargs)):
        if tensor.dtype in (torch.int64, torch.int32) and tensor.dim() >= 2 and tensor.numel():
            engine.tokens += tensor.numel()
            engine.last_input = (tensor.numel() // tensor.shape[-1], tensor.shape[-1])
            return


def record_step(engine: Engine, loss: float | None) -> None:
    """Hand the step that has just ended to the costs, the metrics and the terminal."""
    assert engine.optimizer is not None
    tokens, engine.tokens = engine.tokens * engine.dp.world, 0
    account = engine.dp.clock.end_step(engine.global_steps)
    engine.step_ends.append(time.perf_counter())
    if engine.costs is None:
        engine.costs = Costs(engine)
    record = {
        "step": engine.global_steps,
        "loss": loss,
        "lr": engine.get_lr(),
        "grad_norm": engine.optimizer.grad_norm,
        "samples": engine.train_batch_size(),
        "loss_scale": engine.scaler.scale,
        "skipped": engine.skipped_steps,
        "applied": engine.was_step_applied(),
        **engine.costs.step(account, tokens, engine.last_input[1]),
    }
    engine.progress.step(record, tokens, engine.timers.take())


def keep_ledger(engine: Engine) -> None:
    """Write the account into the run directory: after the first step, and as it stands at the end."""
    if engine.config.run_dir and engine.comm.rank == 0:
        engine.progress.keep("ledger.json", ledger_of(engine).to_json())
