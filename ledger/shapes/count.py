"""Parameters of a model, term by term: all of them, those one token uses, and the closed forms of published papers."""

from __future__ import annotations

from ..account import Account, account
from ..problems import LedgerError
from .parts import blocks
from .shape import ModelShape

EMBEDDINGS = ("all", "no input", "none")


def count_parameters(shape: ModelShape, *, active: bool = False, embeddings: str = "all") -> Account:
    """Return the parameters of a model by block and part.

    Args:
        active: count only the experts that one token passes.
        embeddings: "all"; "no input" leaves the token table out; "none" leaves the output head out too.

    Raises:
        LedgerError: `embeddings` is none of the three.
    """
    if embeddings not in EMBEDDINGS:
        raise LedgerError(f"embeddings is {embeddings!r}; known: {', '.join(EMBEDDINGS)}")
    left_out = {"all": (), "no input": ("embedding",), "none": ("embedding", "output head")}[embeddings]
    terms = []
    for block in blocks(shape):
        for part in block.parts:
            if part.name in left_out:
                continue
            used = part.active if active else 1.0
            why = f"{block.repeat} x {part.numel:,}" if block.repeat > 1 else ""
            if used != 1.0:
                why = f"{why}, of which a token uses {used:.4g}"
            name = part.name if block.role != "layer" else f"{block.name}: {part.name}"
            terms.append((name, _exact(block.repeat * part.numel, used), why))
    return account(
        f"{shape.name}: {'active ' if active else ''}parameters",
        "parameters",
        terms,
        tied_embeddings=shape.tied,
        embeddings_counted=embeddings,
        counted="active" if active else "all",
    )


def active_parameters(shape: ModelShape, embeddings: str = "all") -> float:
    """Return how many parameters one token uses."""
    return count_parameters(shape, active=True, embeddings=embeddings).total


def layer_parameters(shape: ModelShape, index: int = -1) -> int:
    """Return the parameters of layer `index` (the last one by default, which is a mixture where there are any)."""
    wanted = "mixture layer" if shape.is_mixture(index % shape.layers) else "layer"
    return next(block.numel for block in blocks(shape) if block.name == wanted)


def active_from_total(total: float, routed: float, experts: int, top_k: int) -> float:
    """Return active parameters when only sums are known: the routed ones count by top_k / experts."""
    return total - routed * (1 - top_k / experts)


def narayanan_parameters(layers: int, hidden: int, vocab: int, seq: int) -> float:
    """Return the parameters of a GPT by Narayanan et al. 2021 (arXiv:2104.04473), equation 2: the final norm is left out."""
    return 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocab + seq) / (12 * layers * hidden))


def _exact(numel: int, share: float) -> float:
    return numel if share == 1.0 else round(numel * share)
