"""Draw text from a language model, the same text on every rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn


@torch.no_grad()
def generate(model: nn.Module, prompt: list[int], num_tokens: int, max_seq_len: int, temperature: float = 0.8, seed: int = 0) -> list[int]:
    """Return the prompt and num_tokens more ids; temperature 0 takes the likeliest id.

    Where parameters are sharded a forward pass is collective, so every rank must call this with the same arguments: each
    then runs the same number of passes and, from the same seed, draws the same ids.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    random = torch.Generator().manual_seed(seed)  # on the CPU: the same draws on any device
    ids = list(prompt)
    for _ in range(num_tokens):
        logits = model(torch.tensor([ids[-max_seq_len:]], device=device))[0, -1].float().cpu()
        ids.append(_draw(logits, temperature, random))
    model.train(was_training)
    return ids


def _draw(logits: Tensor, temperature: float, random: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=random))
