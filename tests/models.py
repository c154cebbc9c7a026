"""Small models that the tests train, and plain single-process PyTorch to compare with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, DIM, SEQ = 17, 16, 6


class MLP(nn.Module):
    """Repeated layers in a Sequential."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(DIM, DIM), nn.Tanh())], nn.Linear(DIM, 4))

    def forward(self, x, y):
        return F.mse_loss(self.net(x).float(), y)


class Wide(nn.Module):
    """Layers of odd sizes with some 40,000 elements each."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(DIM, 199), nn.Tanh(), nn.Linear(199, 201), nn.Tanh(), nn.Linear(201, 203), nn.Tanh(), nn.Linear(203, 4)
        )

    def forward(self, x, y):
        return F.mse_loss(self.net(x).float(), y)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TiedGPT(nn.Module):
    """Embedding and output head share one weight."""

    def __init__(self, layers=3):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids, targets):
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


class Seq2Seq(nn.Module):
    """nn.Transformer as it comes."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.body = nn.Transformer(DIM, 2, 2, 2, 2 * DIM, dropout=0.0, batch_first=True)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids, targets):
        x = self.emb(ids)
        return F.cross_entropy(self.head(self.body(x, x)).float().flatten(0, 1), targets.flatten())


def llama():
    from llama_example import tiny_llama

    return tiny_llama()


MODELS = {"mlp": MLP, "wide": Wide, "gpt": TiedGPT, "transformer": Seq2Seq, "llama": llama}


def build(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]()


def batch(name: str, step: int, micro: int, rank: int, size: int = 2):
    """The data of one micro-batch of one rank, the same wherever it is made."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank + 1)
    if name in ("mlp", "wide"):
        return torch.randn(size, DIM, generator=generator), torch.randn(size, 4, generator=generator)
    ids = torch.randint(VOCAB, (size, SEQ + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]
