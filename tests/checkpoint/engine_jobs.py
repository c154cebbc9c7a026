"""What rank processes do in the tests of the engine's checkpoints: train, save, load, and tell what states they have."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from models import DIM, SEQ, VOCAB, TiedGPT, batch, build
from torch import nn
from torch.utils.data import Dataset
from training import config_for

SAMPLES = 22


class Sentences(Dataset):
    """Token sequences that carry their own number as the first token id."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(VOCAB, (SEQ + 1,), generator=generator)
        return ids[:-1], ids[1:], index


class Recorder(TiedGPT):
    """A tied GPT with dropout from torch's, numpy's and Python's generators, which notes the samples that it sees."""

    def __init__(self):
        super().__init__(2)
        self.seen = []
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, ids, targets, index):
        self.seen += index.tolist()
        self.count += 1
        x = F.dropout(self.emb(ids), 0.3, self.training)
        x = x * float(1 + 0.1 * np.random.rand() + 0.1 * random.random())
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


class Odd(nn.Module):
    """What makes layouts awkward: odd sizes, a scalar, no elements, frozen and tied ones, buffers of all kinds, a convolution."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.inward = nn.Linear(DIM, 7)
        self.frozen = nn.Linear(7, 5).requires_grad_(False)
        self.outward = nn.Linear(5, 7, bias=False)
        self.again = nn.Linear(5, 7, bias=False)
        self.again.weight = self.outward.weight
        self.conv = nn.Conv1d(7, 3, 3, padding=1)
        self.bn = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 4)
        self.register_buffer("table", torch.arange(11, dtype=torch.float32) / 3)
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("frequencies", torch.linspace(0, 1, 5), persistent=False)

    def forward(self, x, y):
        self.steps += 1
        dtype = self.inward.weight.dtype
        x = torch.tanh(self.inward(x.to(dtype)) * self.scale + self.empty.sum())
        x = torch.relu(self.frozen(x))
        x = self.outward(x) + self.again(x) * self.table.sum().to(dtype)
        x = self.bn(self.conv(x.unsqueeze(-1)).float()).squeeze(-1)
        return F.mse_loss(self.head(x.to(dtype)).float(), y)


def build_any(name: str) -> nn.Module:
    torch.manual_seed(3)
    return {"odd": Odd, "recorder": Recorder}[name]() if name in ("odd", "recorder") else build(name)


def batch_any(name: str, step: int, rank: int) -> Any:
    return batch("mlp" if name == "odd" else name, step, 0, rank, size=3)


def new_engine(name: str, stage: int, precision: str = "fp32", optimizer: Any = None, model: nn.Module | None = None, **extra: Any):
    import stateroom

    config = config_for(stage, precision, 1, **extra)
    if callable(optimizer):
        del config["optimizer"]
    elif optimizer is not None:
        config["optimizer"] = optimizer
        optimizer = None
    engine, *_ = stateroom.initialize(build_any(name) if model is None else model, config=config, optimizer=optimizer)
    return engine


def listen(engine: Any) -> list[str]:
    """Return a list that receives every line that the engine says from now on, on this rank."""
    lines: list[str] = []
    engine.progress.say = engine.progress.warn = lines.append
    return lines


def train(engine: Any, name: str, steps: int, first: int = 0, precision: str = "fp32") -> list[float]:
    losses = []
    for step in range(first, first + steps):
        x, *rest = batch_any(name, step, engine.global_rank)
        if x.is_floating_point() and name != "odd":
            x = x.to({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision])
        loss = engine(x, *rest)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def states_of(engine: Any) -> dict[str, Any]:
    """Return every whole state by name, read without the checkpoint package: weights, states, scalars, buffers, group options."""
    from stateroom.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    from stateroom.zero import GatheredParameters
    from stateroom.zero.parameter import slot_of

    found: dict[str, Any] = {}
    keys = sorted({key for state in engine.optimizer.inner.state.values() for key in state})
    keys = sorted({key for some in engine.comm.gather_objects(keys) for key in some})
    for name, param in engine.module.named_parameters():
        found[name] = safe_get_full_fp32_param(param).clone()
        with GatheredParameters(param):
            found[f"{name} as computed with"] = param.detach().clone()
        if slot_of(param).unit.master is None:
            continue
        for key in keys:
            value = safe_get_full_optimizer_state(param, key)
            if value is not None:
                found[f"{name}::{key}"] = value.clone()
    for name, buffer in engine.module.named_buffers():
        found[f"buffer {name}"] = buffer.clone()
    for index, group in enumerate(engine.optimizer.param_groups):
        found[f"group {index}"] = {key: value for key, value in group.items() if key not in ("params", "fused")}
    found["counters"] = (engine.global_steps, engine.global_samples, engine.skipped_steps)
    return found


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Return the names under which two results of states_of differ in any bit."""
    wrong = sorted(set(a) ^ set(b))
    for name in set(a) & set(b):
        if isinstance(a[name], torch.Tensor):
            same = a[name].dtype == b[name].dtype and a[name].shape == b[name].shape and torch.equal(a[name], b[name])
        else:
            same = a[name] == b[name]
        if not same:
            wrong.append(name)
    return wrong


def save_here(name: str, stage: int, precision: str, folder: str, steps: int = 2, optimizer: Any = None, **extra: Any) -> dict[str, Any]:
    """Train, save, and return all states."""
    engine = new_engine(name, stage, precision, optimizer, **extra)
    train(engine, name, steps, precision=precision)
    engine.save_checkpoint(folder)
    engine.saving.wait()
    found = states_of(engine)
    engine.destroy()
    return found


def load_here(
    name: str, stage: int, precision: str, folder: str, again: str | None = None, optimizer: Any = None, **options: Any
) -> tuple[dict[str, Any], list[float]]:
    """Load into an engine that has been trained on something else; return all states and the losses of two more steps."""
    engine = new_engine(name, stage, precision, optimizer)
    train(engine, name, 1, first=90, precision=precision)
    engine.load_checkpoint(folder, **options)
    if again is not None:
        engine.save_checkpoint(again)
    found = states_of(engine)
    losses = train(engine, name, 2, first=2, precision=precision)
    engine.destroy()
    return found, losses
