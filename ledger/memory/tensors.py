"""Activations of any shape, tensor by tensor: what each layer keeps for backward, and what the ends of the model add.

The general form behind the published ones: for a GPT with dropout, f = 4h and t = 1 it gives s b h (34 + 5 a s / h).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..account import Account, account
from ..problems import LedgerError
from ..shapes.shape import Latent, Mixture, ModelShape

POLICIES = ("none", "core", "selective", "full")


@dataclass(frozen=True)
class LayerOptions:
    """How a layer is run.

    Attributes:
        flash: a fused attention keeps no scores. statistics: count the row statistics that it keeps (4 bytes a head and token).
        dropout: masks (one byte an element) are kept.
        recompute: "core" keeps no scores (the selective recomputation of papers), "selective" keeps the results of matrix
            products and of attention (the engine's policy of that name), "full" a layer's input alone.
        itemsize: bytes of an activation.
        ep: ranks that share the experts; tokens stay where the router sent them, evenly.
    """

    tp: int = 1
    sequence_parallel: bool = True
    cp: int = 1
    ep: int = 1
    flash: bool = True
    statistics: bool = True
    dropout: bool = False
    recompute: str = "none"
    itemsize: float = 2.0

    def __post_init__(self) -> None:
        if self.recompute not in POLICIES:
            raise LedgerError(f"recompute is {self.recompute!r}; known: {', '.join(POLICIES)}")

    @property
    def along(self) -> float:
        """Ranks that share what sequence parallelism splits along the tokens."""
        return self.tp if self.sequence_parallel else 1


def layer_tensors(
    shape: ModelShape, seq: float, micro_batch: float, options: LayerOptions, *, mixture: bool = False, crossed: bool = False
) -> Account:
    """Return bytes that one layer keeps for one micro-batch on one rank, term by term.

    Args:
        mixture: the layer has routed experts. crossed: it attends to an encoder of as many tokens too.
    """
    tokens = seq / options.cp * micro_batch
    unit = tokens * options.itemsize
    along = options.along
    if options.recompute == "full":
        terms = [("layer input", unit * shape.hidden / along, "all that full recomputation keeps")]
    elif options.recompute == "selective":
        terms = [
            ("layer input", unit * shape.hidden / along, ""),
            ("branch outputs", 2 * unit * shape.hidden / along, "of the output projection and of the MLP"),
            *_attention(shape, tokens, seq, options),
            *_without_products(shape, tokens, options, mixture),
        ]
    else:
        terms = [
            ("norm inputs", 2 * unit * shape.hidden / along, "both branches"),
            ("attention input", unit * shape.hidden / along, ""),
            *_attention(shape, tokens, seq, options),
            *(_experts(shape, shape.mixture, tokens, options) if mixture and shape.mixture else _mlp(shape, tokens, options)),
        ]
        if crossed:
            inputs = ("cross attention input", 2 * unit * shape.hidden / along, "norm input and output")
            terms += [inputs, *((f"cross {name}", size, why) for name, size, why in _attention(shape, tokens, seq, options))]
        if options.dropout:
            terms.append(("dropout masks", 2 * tokens * shape.hidden / along, "one byte an element, both branches"))
    kind = "mixture layer" if mixture else "layer"
    return account(
        f"{shape.name}: activations of a {kind}, {micro_batch:g} x {seq:,} tokens",
        "bytes",
        terms,
        recompute=options.recompute,
        flash_attention=options.flash,
        sequence_parallel=options.sequence_parallel and options.tp > 1,
        tp=options.tp,
        cp=options.cp,
    )


def _attention(shape: ModelShape, tokens: float, seq: float, options: LayerOptions) -> list[tuple[str, float, str]]:
    unit = tokens * options.itemsize / options.tp
    query, value = shape.heads * shape.head, shape.heads * shape.value_head
    if shape.latent is not None:
        terms = _latent(shape.latent, query, value, tokens * options.itemsize, unit)
    else:
        terms = [("query, key, value", unit * (query + 2 * shape.kv * shape.head), "keys and values of kv heads only")]
    if not options.flash and options.recompute == "none":
        scores = tokens * seq * shape.heads / options.tp
        terms.append(
            (
                "attention scores",
                scores * (5.0 if options.dropout else 2.0),
                "softmax" + (", its mask and output" if options.dropout else ""),
            )
        )
    if options.flash and options.statistics:
        terms.append(("attention statistics", 4.0 * tokens * shape.heads / options.tp, "log of the sum, fp32"))
    return [*terms, ("attention output", unit * value, "input of the output projection")]


def _latent(latent: Latent, query: int, value: int, whole: float, unit: float) -> list[tuple[str, float, str]]:
    narrow = (latent.q_rank or 0) + latent.kv_rank + latent.qk_rope
    return [
        ("latents", 2 * whole * narrow, "before and after their norms, whole on every rank"),
        ("query, key, value", unit * (2 * query + value), "expanded from the latents"),
    ]


def _mlp(shape: ModelShape, tokens: float, options: LayerOptions) -> list[tuple[str, float, str]]:
    unit = tokens * options.itemsize
    inner = 3 if shape.gated else 2
    return [
        ("mlp input", unit * shape.hidden / options.along, ""),
        (
            "mlp inside",
            inner * unit * shape.ffn / options.tp,
            "gate, up and their product" if shape.gated else "before and after the activation",
        ),
    ]


def _without_products(shape: ModelShape, tokens: float, options: LayerOptions, mixture: bool) -> list[tuple[str, float, str]]:
    """Of the MLP only what matrix products gave: no norm output, and no product of gate and up."""
    inner = 2 if shape.gated else 1
    if not mixture or shape.mixture is None:
        return [("mlp inside", inner * tokens * options.itemsize * shape.ffn / options.tp, "results of the first products")]
    kept = []
    for name, size, why in _experts(shape, shape.mixture, tokens, options):
        if name != "mlp input":
            kept.append((name, size * (inner / (inner + 1) if name.endswith("inside") else 1.0), why))
    return kept


def _experts(shape: ModelShape, mixture: Mixture, tokens: float, options: LayerOptions) -> list[tuple[str, float, str]]:
    """Each token's copies go to their experts; with sequence parallelism a rank routes its own tokens only."""
    unit = tokens * options.itemsize
    inner = 3 if shape.gated else 2
    routed = unit * mixture.top_k / options.along
    terms = [
        ("mlp input", unit * shape.hidden / options.along, ""),
        ("router", 4.0 * 2 * tokens * mixture.experts / options.along, "logits and probabilities, fp32"),
        ("dispatched tokens", 2 * routed * shape.hidden, f"{mixture.top_k} copies, into and out of the experts"),
        ("experts inside", inner * routed * mixture.ffn, "gate, up and their product" if shape.gated else ""),
    ]
    if mixture.shared_width:
        terms.append(("shared experts inside", inner * unit * mixture.shared_width / options.tp, ""))
    return terms


def end_tensors(
    shape: ModelShape, seq: float, micro_batch: float, options: LayerOptions, *, first: bool, last: bool, loss_chunks: int = 1
) -> Account:
    """Return bytes that the embedding (on the first stage) and the head with its loss (on the last) add for one micro-batch.

    Args:
        loss_chunks: the head and loss are done in so many pieces, of which one is alive at a time.
    """
    tokens = seq / options.cp * micro_batch
    unit = tokens * options.itemsize
    terms = []
    if first:
        terms.append(("token numbers", 8.0 * tokens, "int64"))
        if options.dropout:
            terms.append(("embedding dropout", tokens * shape.hidden / options.along, "mask"))
    if last:
        terms.append(("final norm", 2 * unit * shape.hidden / options.along, "its input and output"))
        if shape.vocab:
            logits = tokens * shape.vocab / options.tp / loss_chunks
            terms.append(("logits", options.itemsize * logits, f"one of {loss_chunks} chunks" if loss_chunks > 1 else ""))
            terms.append(("loss in fp32", 4.0 * logits, "softmax of the logits"))
    return account(f"{shape.name}: activations of the ends", "bytes", terms, loss_chunks=loss_chunks)
