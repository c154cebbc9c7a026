"""A plain Llama-style language model: RMSNorm, rotary positions, grouped-query attention and SwiGLU.

It knows nothing of how it will be trained. Every module that owns parameters or buffers has `reset_parameters()`,
so a model built on the meta device can come to life module by module: called in the order of `modules()`, these
methods draw the same numbers as the ordinary constructor does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INIT_STD = 0.02


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a model; `num_kv_heads` divides `num_heads`, and `dim` is a multiple of `2 * num_heads`."""

    vocab_size: int = 256
    dim: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    hidden_dim: int | None = None  # None: 8/3 of dim, rounded up to a multiple of 32
    max_seq_len: int = 256
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied: bool = False

    def __post_init__(self) -> None:
        if self.dim % (2 * self.num_heads):
            raise ValueError(f"dim={self.dim} must be a multiple of 2 * num_heads={2 * self.num_heads}: rotary positions turn pairs")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")

    @property
    def head_dim(self) -> int:
        """The width of one attention head."""
        return self.dim // self.num_heads

    @property
    def ffn_dim(self) -> int:
        """The inner width of the feed-forward part."""
        return self.hidden_dim or 32 * math.ceil(self.dim * 8 / 3 / 32)


class Linear(nn.Linear):
    """A linear map without bias whose weights start normal with the given spread."""

    def __init__(self, in_features: int, out_features: int, std: float = INIT_STD) -> None:
        self.std = std  # set first: nn.Linear's constructor ends by calling reset_parameters()
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Draw the weights."""
        nn.init.normal_(self.weight, std=self.std)


class Embedding(nn.Embedding):
    """A token table that starts as small as the linear maps do."""

    def reset_parameters(self) -> None:
        """Draw the table."""
        nn.init.normal_(self.weight, std=INIT_STD)


class RMSNorm(nn.Module):
    """Divide by the root mean square, in fp32 whatever the input is, and scale per channel."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start as the plain norm."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return x normalised over its last dim."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight


class Rope(nn.Module):
    """Rotary position tables, kept in fp32: in bf16 neighbouring positions would share an angle."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_seq_len: int, theta: float) -> None:
        super().__init__()
        self.head_dim, self.theta = head_dim, theta
        self.register_buffer("cos", torch.empty(max_seq_len, head_dim // 2, dtype=torch.float32), persistent=False)
        self.register_buffer("sin", torch.empty(max_seq_len, head_dim // 2, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill both tables; they are functions of the sizes alone, so no checkpoint carries them."""
        device = self.cos.device
        pair = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device)
        position = torch.arange(self.cos.shape[0], dtype=torch.float32, device=device)
        angle = torch.outer(position, self.theta ** (-pair / self.head_dim))
        with torch.no_grad():
            self.cos.copy_(angle.cos())
            self.sin.copy_(angle.sin())

    def forward(self, x: Tensor) -> Tensor:
        """Turn the pairs (i, i + head_dim/2) of x[batch, head, position, head_dim] by their position's angle."""
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        low, high = x.float().chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal attention in which groups of query heads share one key and value head."""

    def __init__(self, config: LlamaConfig, out_std: float) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.wq = Linear(config.dim, self.num_heads * self.head_dim)
        self.wk = Linear(config.dim, self.num_kv_heads * self.head_dim)
        self.wv = Linear(config.dim, self.num_kv_heads * self.head_dim)
        self.wo = Linear(self.num_heads * self.head_dim, config.dim, out_std)

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        """Mix positions of x[batch, position, dim]; no position sees a later one."""
        batch, length, _ = x.shape
        q = self.wq(x).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(rope(q), rope(k), v, is_causal=True, enable_gqa=self.num_kv_heads != self.num_heads)
        return self.wo(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """SwiGLU: one half gates the other."""

    def __init__(self, config: LlamaConfig, out_std: float) -> None:
        super().__init__()
        self.gate = Linear(config.dim, config.ffn_dim)
        self.up = Linear(config.dim, config.ffn_dim)
        self.down = Linear(config.ffn_dim, config.dim, out_std)

    def forward(self, x: Tensor) -> Tensor:
        """Map each position on its own."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: attention, then feed-forward, each on the normalised stream and added back to it."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        out_std = INIT_STD / math.sqrt(2 * config.num_layers)  # keeps the stream's size independent of the depth
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, out_std)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn = FeedForward(config, out_std)

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        """Return the stream after this layer."""
        x = x + self.attention(self.attention_norm(x), rope)
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    """A causal language model: ids[batch, position] to logits, or to the mean loss when targets are given."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.dim)
        self.rope = Rope(config.head_dim, config.max_seq_len, config.rope_theta)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.lm_head = Linear(config.dim, config.vocab_size)
        if config.tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits[batch, position, vocab], or the mean cross-entropy in fp32 against targets."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, self.rope)
        logits = self.lm_head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
