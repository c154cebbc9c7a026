"""Activations that a layer keeps for backward: the published closed forms, by name.

Letters as in Korthikanti et al. 2022 (arXiv:2205.05198): s tokens, b sequences of a micro-batch, h hidden, a heads, t
tensor-parallel ranks, p pipeline stages, v vocabulary. Everything is in bytes, for 16-bit activations.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..problems import LedgerError

_WORDS = {"selective": "sel", "recompute": "", "recomputation": "", "baseline": "", "sequence": "sp", "tensor": "tp", "attention": ""}


@dataclass(frozen=True)
class Form:
    """A row of their table 2: coefficients of s b h, and of the attention core 5 a s / h; each is whole or divided by t."""

    text: str
    whole: float
    cut: float
    core_whole: float
    core_cut: float


FORMS: dict[frozenset[str], Form] = {
    frozenset(): Form("sbh (34 + 5as/h)", 34, 0, 1, 0),
    frozenset({"tp"}): Form("sbh (10 + 24/t + 5as/ht)", 10, 24, 0, 1),
    frozenset({"tp", "sp"}): Form("sbh/t (34 + 5as/h)", 0, 34, 0, 1),
    frozenset({"sel"}): Form("34 sbh", 34, 0, 0, 0),
    frozenset({"tp", "sel"}): Form("sbh (10 + 24/t)", 10, 24, 0, 0),
    frozenset({"tp", "sp", "sel"}): Form("34 sbh/t", 0, 34, 0, 0),
    frozenset({"full"}): Form("2 sbh", 2, 0, 0, 0),
    frozenset({"tp", "full"}): Form("2 sbh", 2, 0, 0, 0),
    frozenset({"tp", "sp", "full"}): Form("2 sbh/t", 0, 2, 0, 0),
}


def form(mode: str) -> Form:
    """Return the row that a mode such as "none", "tp+sp" or "tp_sp_sel" names.

    Raises:
        LedgerError: no such combination.
    """
    words = {_WORDS.get(word, word) for word in re.split(r"[+_\s,]+", mode.lower())}
    found = FORMS.get(frozenset(words - {"", "none", "no"}))
    if found is None:
        known = ", ".join(sorted("+".join(sorted(key)) or "none" for key in FORMS))
        raise LedgerError(f"no published form of activations is named {mode!r}; known: {known}")
    return found


def core_factor(heads: float, seq: float, hidden: float) -> float:
    """Return 5 a s / h: what the attention core keeps, in units of s b h (softmax, its dropout mask and output)."""
    return 5.0 * heads * seq / hidden


def layer_activations(
    seq: float, micro_batch: float, hidden: float, heads: float = 0, *, tp: int = 1, cp: int = 1, mode: str = "none", flash: bool = False
) -> float:
    """Return bytes that one layer keeps for one micro-batch, by the published form of `mode`.

    Args:
        cp: ranks that share the sequence; every term shrinks with it.
        flash: a fused attention keeps no scores, so the core's term is left out.
    """
    row = form(mode)
    tokens = seq / cp
    core = 0.0 if flash else core_factor(heads, tokens, hidden)
    return tokens * micro_batch * hidden * (row.whole + row.core_whole * core + (row.cut + row.core_cut * core) / tp)


def activation_ratio(one: str, other: str, seq: float, hidden: float, heads: float, tp: int = 1) -> float:
    """Return the bytes of mode `one` over those of mode `other`, for the same layer."""
    first = layer_activations(seq, 1, hidden, heads, tp=tp, mode=one)
    return first / layer_activations(seq, 1, hidden, heads, tp=tp, mode=other)


def core_share(seq: float, hidden: float, heads: float) -> float:
    """Return the share of a layer's activations that selective recomputation gives back, 0 to 1."""
    return 1 - activation_ratio("sel", "none", seq, hidden, heads)


def selective_extra_flops(seq: float, hidden: float) -> float:
    """Return the share of all FLOPs of a layer that the recomputed attention core adds: (s/6h) / (1 + s/6h)."""
    core = seq / (6 * hidden)
    return core / (1 + core)


def recompute_time_overhead(forward: float, backward: float, forward_with: float, backward_with: float) -> float:
    """Return how much longer forward and backward take with a policy than without it, as a share."""
    return (forward_with + backward_with) / (forward + backward) - 1


def model_activations(
    seq: float, micro_batch: float, hidden: float, heads: float, layers: float, *, tp: int = 1, cp: int = 1, mode: str = "none",
    flash: bool = False, pp: int = 1, interleave: int = 1,
) -> float:  # fmt: skip
    """Return bytes on the first pipeline stage: p micro-batches of L/p layers are L layers; interleaving adds (p - 1)/(p m)."""
    penalty = 1 + (pp - 1) / (pp * interleave) if interleave > 1 else 1.0
    return layers * penalty * layer_activations(seq, micro_batch, hidden, heads, tp=tp, cp=cp, mode=mode, flash=flash)


def embedding_activations(
    seq: float, micro_batch: float, hidden: float, vocab: float, *, tp: int = 1, pp: int = 1, interleave: int = 1
) -> float:
    """Return bytes of the embedding's dropout and, where one stage does everything, of the last norm, head and loss."""
    sbh = seq * micro_batch * hidden
    penalty = 1 + (pp - 1) / (pp * interleave) if interleave > 1 else 1.0
    head = 4 * sbh / tp * (1 + vocab / hidden) if pp == 1 else 0.0
    return sbh * pp * penalty / tp + head


def tensor_bytes(tokens: float, width: float, itemsize: float = 2.0, *, count: float = 1.0, tp: int = 1) -> float:
    """Return bytes of `count` tensors of tokens x width: hidden states kept at layer borders, logits, messages."""
    return tokens * width * itemsize * count / tp


def kv_cache_bytes(layers: int, kv_heads: int, head_dim: int, tokens: float, itemsize: float = 2.0) -> float:
    """Return bytes of the keys and values of `tokens` tokens in every layer."""
    return 2.0 * layers * kv_heads * head_dim * tokens * itemsize


def kept_outputs(seq: float, micro_batch: float, hidden: float, pp: int, itemsize: float = 2.0) -> float:
    """Return bytes of stage outputs that need not be kept once they are sent: one for each of p micro-batches in flight."""
    return tensor_bytes(seq * micro_batch, hidden, itemsize, count=pp)
