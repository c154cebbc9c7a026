"""The matrices and vectors of a model, block by block: parameters, FLOPs and states are all read off this one list."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .shape import Latent, Mixture, ModelShape


@dataclass(frozen=True)
class Part:
    """Parameters of one kind in one block.

    Attributes:
        kind: "matrix" (multiplied with every token), "vector" (norms, biases), "table" (looked up).
        cut: the axis that may share it: "tp", "ep", or "" for whole on every rank.
        active: share of it that one token uses (1 except for routed experts).
    """

    name: str
    numel: int
    kind: str = "matrix"
    cut: str = "tp"
    active: float = 1.0


@dataclass(frozen=True)
class Block:
    """A block that occurs `repeat` times; role is "layer", "embedding", "head" or "extra"."""

    name: str
    role: str
    repeat: int
    parts: tuple[Part, ...]

    @property
    def numel(self) -> int:
        """Parameters of one occurrence."""
        return sum(part.numel for part in self.parts)


@lru_cache(maxsize=256)
def blocks(shape: ModelShape) -> tuple[Block, ...]:
    """Return the blocks of a model in the order a token meets them; a tied head has no parameters of its own."""
    found = [Block("embedding", "embedding", 1, _embedding(shape))]
    if shape.encoder_layers:
        found.append(Block("encoder layer", "layer", shape.encoder_layers, (*_attention(shape), *_mlp(shape), *_norms(shape, 2))))
        found.append(Block("encoder end", "extra", 1, (Part("norms", _norm(shape), "vector", ""), *_relative(shape))))
    cross = _attention(shape) if shape.encoder_layers else ()
    norms = _norms(shape, shape.norms_per_layer + (1 if cross else 0))
    crossed = tuple(Part(f"cross {part.name}", part.numel, part.kind, part.cut) for part in cross)
    if shape.plain_layers:
        parts = (*_attention(shape), *crossed, *_mlp(shape), *norms)
        found.append(Block("layer", "layer", shape.plain_layers, parts))
    if shape.mixture is not None and shape.mixture_layers:
        parts = (*_attention(shape), *crossed, *_experts(shape, shape.mixture), *norms)
        found.append(Block("mixture layer", "layer", shape.mixture_layers, parts))
    if shape.mtp:
        found.append(Block("prediction layer", "layer", shape.mtp, _prediction(shape)))
    found.append(Block("head", "head", 1, _head(shape)))
    return tuple(block for block in found if block.parts)


def _norm(shape: ModelShape) -> int:
    return shape.hidden * shape.norm_width


def _norms(shape: ModelShape, count: int) -> tuple[Part, ...]:
    return (Part("norms", count * _norm(shape), "vector", ""),)


def _embedding(shape: ModelShape) -> tuple[Part, ...]:
    width = shape.embedding_width or shape.hidden
    parts = []
    if shape.vocab:
        parts.append(Part("embedding", shape.vocab * width, "table"))
    if shape.vision is not None:
        pixels = shape.vision.channels * shape.vision.patch**2
        parts.append(Part("patch embedding", pixels * shape.hidden + shape.hidden))
        parts.append(Part("class token", shape.hidden, "vector", ""))
    if width != shape.hidden:
        parts.append(Part("embedding projection", width * shape.hidden))
    if shape.positions:
        parts.append(Part("positions", shape.positions * shape.hidden, "table", ""))
    if shape.token_types:
        parts.append(Part("token types", shape.token_types * shape.hidden, "table", ""))
    if shape.embedding_norm:
        parts.append(Part("embedding norm", _norm(shape), "vector", ""))
    return tuple(parts)


def _relative(shape: ModelShape) -> tuple[Part, ...]:
    return (Part("relative positions", shape.relative_buckets * shape.heads, "table"),) if shape.relative_buckets else ()


def _head(shape: ModelShape) -> tuple[Part, ...]:
    width = shape.embedding_width or shape.hidden
    parts = []
    if shape.final_norm:
        parts.append(Part("final norm", _norm(shape), "vector", ""))
    parts += _relative(shape) if shape.encoder_layers else ()
    if shape.pooler:
        parts.append(Part("pooler", shape.hidden * shape.hidden + shape.hidden))
    if shape.transform_head:
        parts.append(Part("head transform", shape.hidden * shape.hidden + shape.hidden + _norm(shape)))
    if width != shape.hidden:
        parts.append(Part("head projection", width * shape.hidden))
    if shape.vision is not None and shape.vision.classes:
        parts.append(Part("classifier", (shape.hidden + 1) * shape.vision.classes))
    if shape.vocab and not shape.tied:
        parts.append(Part("output head", shape.vocab * width))
    if shape.vocab and shape.head_bias:
        parts.append(Part("head bias", shape.vocab, "vector"))
    return tuple(parts)


def _attention(shape: ModelShape) -> tuple[Part, ...]:
    if shape.latent is not None:
        return _latent(shape, shape.latent)
    query, key = shape.heads * shape.head, shape.kv * shape.head
    parts = [
        Part("query", shape.hidden * query),
        Part("key and value", shape.hidden * 2 * key),
        Part("attention output", query * shape.hidden),
    ]
    if shape.qkv_bias:
        parts.append(Part("query, key, value biases", query + 2 * key, "vector"))
    if shape.output_bias:
        parts.append(Part("attention output bias", shape.hidden, "vector", ""))
    if shape.sinks:
        parts.append(Part("attention sinks", shape.heads, "vector"))
    if shape.qk_norm == "head":
        parts.append(Part("query and key norms", 2 * shape.head * shape.norm_width, "vector", ""))
    elif shape.qk_norm == "full":
        parts.append(Part("query and key norms", (query + key) * shape.norm_width, "vector", ""))
    return tuple(parts)


def _latent(shape: ModelShape, latent: Latent) -> tuple[Part, ...]:
    query = shape.heads * latent.qk_head
    if latent.q_rank is None:
        parts = [Part("query", shape.hidden * query)]
    else:
        parts = [
            Part("query down", shape.hidden * latent.q_rank, cut=""),
            Part("query up", latent.q_rank * query),
            Part("query norm", latent.q_rank * shape.norm_width, "vector", ""),
        ]
    return (
        *parts,
        Part("key and value down", shape.hidden * (latent.kv_rank + latent.qk_rope), cut=""),
        Part("key and value up", latent.kv_rank * shape.heads * (latent.qk_nope + latent.v_head)),
        Part("key and value norm", latent.kv_rank * shape.norm_width, "vector", ""),
        Part("attention output", shape.heads * latent.v_head * shape.hidden),
    )


def _mlp(shape: ModelShape) -> tuple[Part, ...]:
    into = 2 if shape.gated else 1
    parts = [Part("mlp in", into * shape.hidden * shape.ffn), Part("mlp out", shape.ffn * shape.hidden)]
    if shape.mlp_bias:
        parts += [Part("mlp in bias", into * shape.ffn, "vector"), Part("mlp out bias", shape.hidden, "vector", "")]
    return tuple(parts)


def _experts(shape: ModelShape, mixture: Mixture) -> tuple[Part, ...]:
    matrices = 3 if shape.gated else 2
    share = mixture.top_k / mixture.experts
    parts = [
        Part("router", shape.hidden * mixture.experts, cut=""),
        Part("experts", mixture.experts * matrices * shape.hidden * mixture.ffn, cut="ep", active=share),
    ]
    if mixture.router_bias:
        parts.append(Part("router bias", mixture.experts, "vector", ""))
    if shape.mlp_bias:
        into = matrices - 1
        biases = mixture.experts * (into * mixture.ffn + shape.hidden)
        parts.append(Part("expert biases", biases, "vector", "ep", share))
    if mixture.shared_width:
        parts.append(Part("shared experts", matrices * shape.hidden * mixture.shared_width))
    if mixture.gated_shared:
        parts.append(Part("shared gate", shape.hidden, cut=""))
    return tuple(parts)


def _prediction(shape: ModelShape) -> tuple[Part, ...]:
    """One multi-token prediction module: two norms, the joining projection, a layer like the last one, its own last norm."""
    inner = _experts(shape, shape.mixture) if shape.mixture is not None and shape.is_mixture(shape.layers - 1) else _mlp(shape)
    joined = (Part("joining projection", 2 * shape.hidden * shape.hidden), Part("joining norms", 3 * _norm(shape), "vector", ""))
    return (*joined, *_attention(shape), *inner, *_norms(shape, shape.norms_per_layer))
