"""FLOPs by layer kind, read off the same matrices as the parameters; whether attention is counted full or causal is a switch."""

from __future__ import annotations

from dataclasses import dataclass

from ..account import Account, Term, account
from ..problems import LedgerError
from ..shapes.parts import blocks
from ..shapes.shape import ModelShape

ATTENTION = ("full", "causal", "none")
RECOMPUTE = ("none", "core", "selective", "full")
_ONCE = ("classifier", "pooler", "head transform")  # for the whole sample, not for each token


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of a step: `model` is what learning needs (MFU), `recompute` what is done again (HFU counts both)."""

    model: Account
    recompute: Account

    @property
    def hardware(self) -> float:
        """FLOPs that the device executes."""
        return self.model.total + self.recompute.total


def seen_keys(seq: int, window: int | None, counting: str) -> float:
    """Return how many keys a query meets on average.

    Causal counts s/2 as papers do; a window of w tokens under a causal mask counts w - w²/2s.
    """
    if counting == "none":
        return 0.0
    if window is not None and window < seq:
        return window - window * window / (2 * seq) if counting == "causal" else float(window)
    return seq / 2 if counting == "causal" else float(seq)


def forward_flops(shape: ModelShape, seq: int, *, attention: str = "causal", router: bool = True) -> Account:
    """Return the FLOPs of one forward of one sequence of `seq` tokens, by layer kind. A multiply and an add are two.

    Norms, activations and the embedding look-up are no matrix products and are not counted.

    Args:
        attention: "full" counts s² score pairs, "causal" half of them, "none" leaves the attention core out.
        router: count the router's matrix (Megatron-LM's own function does not).

    Raises:
        LedgerError: `attention` is none of the three.
    """
    if attention not in ATTENTION:
        raise LedgerError(f"attention is {attention!r}; known: {', '.join(ATTENTION)}")
    counting = "full" if attention == "causal" and not shape.causal else attention
    terms: list[tuple[str, float, str]] = []
    for block in blocks(shape):
        for part in block.parts:
            if part.kind != "matrix" or part.name == "output head" or (part.name in ("router", "shared gate") and not router):
                continue
            tokens = 1 if part.name in _ONCE else seq
            name = part.name if block.role != "layer" else f"{block.name}: {part.name}"
            terms.append((name, 2.0 * block.repeat * part.numel * part.active * tokens, f"2 x {part.numel * part.active:,.0f} weights"))
        if block.role == "layer":
            terms += _cores(shape, block.name, block.repeat, seq, counting)
    if shape.vocab:
        width = shape.embedding_width or shape.hidden
        heads = 1 + shape.mtp
        terms.append(("output head", 2.0 * heads * shape.vocab * width * seq, f"{heads} x 2 x {shape.vocab:,} x {width:,}"))
    return account(f"{shape.name}: one forward of {seq:,} tokens", "FLOP", terms, attention_counted=counting, router_counted=router)


def _cores(shape: ModelShape, name: str, repeat: int, seq: int, counting: str) -> list[tuple[str, float, str]]:
    """Scores and weighted values; a decoder beside an encoder has a second, uncausal pair."""
    each = 2.0 * seq * shape.heads * (shape.head + shape.value_head)
    own = "full" if name == "encoder layer" and counting == "causal" else counting
    narrow = shape.windowed if shape.window is not None and shape.window < seq else 0.0
    keys = narrow * seen_keys(seq, shape.window, own) + (1 - narrow) * seen_keys(seq, None, own)
    found = [(f"{name}: attention core", repeat * each * keys, f"scores and values over {keys:,.0f} keys on average")]
    if shape.encoder_layers and name != "encoder layer":
        crossed = 0.0 if counting == "none" else float(seq)
        found.append((f"{name}: cross attention core", repeat * each * crossed, f"over all {seq:,} of the encoder"))
    return found


def step_flops(
    shape: ModelShape, seq: int, sequences: int = 1, *, attention: str = "causal", recompute: str = "none", router: bool = True
) -> StepFlops:
    """Return the FLOPs of one step of `sequences` sequences: forward, twice that backward, and what is recomputed.

    Args:
        recompute: "core" does the attention core again (papers call it selective), "selective" norms and activations alone
            (what the engine does: matrix products are kept), which is no FLOP that is counted; "full" every layer, never the head.

    Raises:
        LedgerError: an unknown switch.
    """
    if recompute not in RECOMPUTE:
        raise LedgerError(f"recompute is {recompute!r}; known: {', '.join(RECOMPUTE)}")
    forward = forward_flops(shape, seq, attention=attention, router=router)
    again = [term for term in forward.terms if _recomputed(term, recompute)]
    model = forward.scaled(3.0 * sequences, f"{shape.name}: model FLOPs of a step of {sequences:,} x {seq:,} tokens")
    extra = Account("recomputed", "FLOP", tuple(Term(t.name, t.value * sequences, t.why) for t in again), {"recompute": recompute})
    return StepFlops(model, extra)


def _recomputed(term: Term, policy: str) -> bool:
    if policy == "full":
        return "layer: " in term.name
    return policy == "core" and term.name.endswith("attention core")


def training_flops_per_token(shape: ModelShape, seq: int, *, attention: str = "causal", router: bool = True) -> float:
    """Return model FLOPs of forward and backward for one token of a sequence of `seq` tokens."""
    return 3.0 * forward_flops(shape, seq, attention=attention, router=router).total / seq
