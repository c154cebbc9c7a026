"""The Llama of examples/llama, written as a list of layers for stateroom.pipe.PipelineModule.

Each layer takes what the one before it returned. The embedding is tied to the head with TiedLayerSpec where the model's
config says so: both ends use one table, wherever their stages are.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from stateroom.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "llama"))

from model import Block, Embedding, Linear, LlamaConfig, RMSNorm, Rope


class RopedBlock(nn.Module):
    """A block that has its rotary table with it, so that one tensor goes in and one comes out."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.block = Block(config)
        self.rope = Rope(config.head_dim, config.max_seq_len, config.rope_theta)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after this layer."""
        return self.block(x, self.rope)


def as_head(embedding: nn.Module, x: Tensor) -> Tensor:
    """Use the embedding's table the other way round."""
    return F.linear(x, embedding.weight)  # type: ignore[arg-type]


def llama_layers(config: LlamaConfig) -> list[Any]:
    """Return the layers: embedding, blocks, norm, head."""
    sizes = (config.vocab_size, config.dim)
    first = TiedLayerSpec("embedding", Embedding, *sizes) if config.tied else LayerSpec(Embedding, *sizes)
    last = (
        TiedLayerSpec("embedding", Embedding, *sizes, forward_fn=as_head)
        if config.tied
        else LayerSpec(Linear, config.dim, config.vocab_size)
    )
    blocks = [LayerSpec(RopedBlock, config) for _ in range(config.num_layers)]
    return [first, *blocks, LayerSpec(RMSNorm, config.dim, config.norm_eps), last]


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in fp32."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
