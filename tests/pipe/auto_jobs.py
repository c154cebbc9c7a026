"""Ordinary models that are cut by config alone, and what their ranks run."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pipe_jobs as jobs
import stateroom
import torch
from torch import nn


class Layer(nn.Module):
    """Takes a mask and gives a tuple, as many models' layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = jobs.Block()

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, None]:
        return self.body(x) * mask, None


class Model(nn.Module):
    """Embedding, positions, layers, norm, head; the loss when there are targets."""

    def __init__(self, tied: bool = True, layers: int = 5) -> None:
        super().__init__()
        self.trunk = nn.ModuleDict(
            {
                "words": nn.Embedding(jobs.VOCABULARY, jobs.WIDTH),
                "places": nn.Embedding(16, jobs.WIDTH),
                "scale": Scale(),
                "blocks": nn.ModuleList(Layer() for _ in range(layers)),
                "norm": nn.LayerNorm(jobs.WIDTH),
            }
        )
        self.head = nn.Linear(jobs.WIDTH, jobs.VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.trunk["words"].weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        x = self.trunk["words"](ids) + self.trunk["places"](torch.arange(ids.shape[1], device=ids.device))
        x = self.trunk["scale"](x)
        x += 0.1
        mask = (ids > 1).unsqueeze(-1) + 0.5
        for layer in self.trunk["blocks"]:
            x, _ = layer(x, mask=mask)
        logits = self.head(self.trunk["norm"](x))
        return logits if targets is None else jobs.loss_fn(logits, targets)


class Scale(nn.Module):
    """A module with a buffer and no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def model(kind: str) -> nn.Module:
    """Return a model with the same values on every rank."""
    torch.manual_seed(3)
    if kind in ("tied", "untied"):
        return Model(tied=kind == "tied")
    if kind == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(
            LlamaConfig(vocab_size=jobs.VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
                        num_key_value_heads=1, max_position_embeddings=16, tie_word_embeddings=True, use_cache=False)
        )  # fmt: skip
    if kind == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(
            GPT2Config(vocab_size=jobs.VOCABULARY, n_embd=16, n_layer=4, n_head=2, n_positions=16, resid_pdrop=0, embd_pdrop=0,
                       attn_pdrop=0, use_cache=False, bos_token_id=0, eos_token_id=0)
        )  # fmt: skip
    parts: list[Any] = [
        nn.Embedding(jobs.VOCABULARY, jobs.WIDTH),
        *(jobs.Block() for _ in range(5)),
        nn.Linear(jobs.WIDTH, jobs.VOCABULARY),
    ]
    if kind == "named":
        return nn.Sequential(OrderedDict((f"part_{number}", part) for number, part in enumerate(parts)))
    return nn.Sequential(*parts)


def shaped(kind: str, batch: Any) -> Any:
    """Return a batch as the model's forward takes it."""
    ids, labels = batch
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)} if kind in ("llama", "gpt2") else (ids, labels)


def plain(kind: str, data: Any) -> dict[str, Any]:
    """Train in one process."""
    net = model(kind)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in data:
        micro = [shaped(kind, each) for copy_ in step for each in copy_]
        total = 0.0
        for batch in micro:
            loss = net(**batch).loss if isinstance(batch, dict) else jobs.loss_fn(net(batch[0]), batch[1])
            (loss / len(micro)).backward()
            total += float(loss.detach()) / len(micro)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return {"losses": losses, "weights": {name: value.clone() for name, value in net.state_dict().items()}}


def cut(kind: str, data: Any, cfg: dict[str, Any], folder: str | None = None, given: str = "") -> dict[str, Any]:
    """Train in stages by config alone; `given` says what of the optimizer the script passes."""
    net = model(kind)
    more: dict[str, Any] = {}
    if given == "optimizer":
        more["optimizer"] = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    if given == "parameters":
        more["model_parameters"] = [param for param in net.parameters() if param.requires_grad]
    loss = jobs.loss_fn if kind in ("listed", "named") else None
    engine, *_ = stateroom.initialize(model=net, config=copy.deepcopy(cfg), loss_fn=loss, **more)
    losses = [float(engine.train_batch(iter([shaped(kind, each) for each in step[engine.cut.copy]]))) for step in data]
    evaluated = float(engine.eval_batch(iter([shaped(kind, each) for each in data[0][0]]), num_micro_batches=len(data[0][0])))
    if folder:
        engine.save_checkpoint(folder)
    weights, whole = {name: value.clone() for name, value in engine.module.state_dict().items()}, engine.module_state_dict()
    assert not any(engine.load_module_state_dict(whole))
    numel = sum(param.numel() for param in engine.module.parameters())
    engine.destroy()
    return {"losses": losses, "weights": weights, "whole": whole, "numel": numel, "evaluated": evaluated}


def load_plain(kind: str, folder: str, batch: Any) -> float:
    """Load a checkpoint of stages into the ordinary model, and evaluate it."""
    net = model(kind)
    with torch.no_grad():
        for param in net.parameters():
            param.zero_()
    cfg = {key: value for key, value in jobs.config(1).items() if key != "pipeline"}
    engine, *_ = stateroom.initialize(model=net, config=cfg)
    engine.load_checkpoint(folder)
    engine.eval()
    with torch.no_grad():
        found = sum(float(engine(*each)) for each in batch) / len(batch)
    engine.destroy()
    return found
