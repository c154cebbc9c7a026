"""The models that step times are measured on, the same each time they are built; each returns its loss."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "llama"))
from model import Block, Llama, LlamaConfig

VOCABULARY, LENGTH = 2048, 128
WIDTH = 2048


class Wide(nn.Module):
    """Three layers that hold nearly everything."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH * 4) if i % 2 == 0 else nn.Linear(WIDTH * 4, WIDTH) for i in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the last layer's output."""
        for layer in self.layers:
            x = F.relu(layer(x))
        return x.square().mean()


class Many(nn.Module):
    """10,000 parameters of 16 to 256 elements: 5,000 small layers in 100 groups."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = nn.ModuleList(nn.Sequential(*(nn.Linear(16, 16) for _ in range(50))) for _ in range(100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss of a sum of chains, each 50 layers deep."""
        return torch.stack([group(x) for group in self.groups]).square().mean()


class Adapted(nn.Module):
    """A linear layer that stays as it is, with a small trained addition beside it."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.02)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return base(x) + up(down(x))."""
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


@dataclass(frozen=True)
class Kind:
    """A model: how it is built, one batch of `rows` samples, and the modules that are wrapped one by one where a peer wants that."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[torch.Tensor, ...]]
    blocks: Callable[[nn.Module], list[nn.Module]]


def _llama(dim: int, layers: int) -> nn.Module:
    return Llama(LlamaConfig(vocab_size=VOCABULARY, dim=dim, num_layers=layers, num_heads=8, num_kv_heads=8, max_seq_len=LENGTH))


def _frozen() -> nn.Module:
    model = _llama(512, 10).requires_grad_(False)
    for block in _llama_blocks(model):
        for parent in list(block.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, Adapted(child))
    return model


def _tokens(rows: int) -> tuple[torch.Tensor, ...]:
    ids = torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def _noise(width: int) -> Callable[[int], tuple[torch.Tensor, ...]]:
    return lambda rows: (torch.randn(rows * LENGTH, width, generator=torch.Generator().manual_seed(1)),)


def _llama_blocks(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, Block)]


def _chains(model: nn.Module) -> list[nn.Module]:
    return list(model.get_submodule("groups").children())


def _layers(model: nn.Module) -> list[nn.Module]:
    return list(model.get_submodule("layers").children())


KINDS = {
    "block": Kind(lambda: _llama(512, 10), _tokens, _llama_blocks),
    "large": Kind(lambda: _llama(768, 14), _tokens, _llama_blocks),
    "wide": Kind(Wide, _noise(WIDTH), _layers),
    "tiny-many": Kind(Many, _noise(16), _chains),
    "frozen": Kind(_frozen, _tokens, _llama_blocks),
}


def build(name: str) -> nn.Module:
    """Return a model with the same values each time."""
    torch.manual_seed(0)
    return KINDS[name].build()
