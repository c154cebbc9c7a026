"""The sizes of a transformer, from which parameters, FLOPs, activations and traffic follow."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..problems import LedgerError

NORMS = ("rms", "layernorm")
QK_NORMS = ("none", "head", "full")


@dataclass(frozen=True)
class Mixture:
    """A layer whose MLP is routed experts.

    Attributes:
        ffn: inner size of one routed expert.
        shared: experts that see every token; shared_ffn is the inner size of one of them, ffn when absent.
        dense_layers: first layers that keep a plain MLP.
        every: of the layers after those, one in so many is a mixture: the last of them, or with `leads` the first.
        gated_shared: a learned gate of `hidden` weights scales the shared output.
    """

    experts: int
    top_k: int
    ffn: int
    shared: int = 0
    shared_ffn: int | None = None
    dense_layers: int = 0
    every: int = 1
    leads: bool = False
    gated_shared: bool = False
    router_bias: bool = False

    @property
    def shared_width(self) -> int:
        """Inner size of all shared experts together."""
        return self.shared * (self.ffn if self.shared_ffn is None else self.shared_ffn)


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: keys and values pass through a narrow latent, queries too where q_rank is set."""

    kv_rank: int
    q_rank: int | None
    qk_nope: int
    qk_rope: int
    v_head: int

    @property
    def qk_head(self) -> int:
        """Width of one head's query and key."""
        return self.qk_nope + self.qk_rope


@dataclass(frozen=True)
class Vision:
    """Patches in place of tokens."""

    image: int
    patch: int
    channels: int = 3
    classes: int = 0

    @property
    def patches(self) -> int:
        """Patches of one image."""
        return (self.image // self.patch) ** 2


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a transformer; every field that is left out has the value most decoders of today have.

    Attributes:
        hidden: width of the residual stream. ffn: inner size of a plain MLP; 0 when every layer is a mixture.
        kv_heads, head_dim: default heads, hidden / heads.
        gated: three MLP matrices (SwiGLU, GeGLU), not two.
        norms_per_layer: 2 usually, 4 with norms around each branch, 1 where attention and MLP share one.
        sinks: one learned logit a head that takes attention away.
        positions: rows of a learned position table (offset rows included).
        embedding_width: of a factorised embedding, with a projection to hidden and back; default hidden.
        encoder_layers: layers of a separate encoder; each decoder layer then has cross attention.
        relative_buckets: rows of a learned relative-position bias per head, one table a stack.
        mtp: extra prediction layers, each with a 2·hidden → hidden projection.
        window, windowed: attention of `windowed` of all layers (0 to 1) sees `window` tokens.
        context: tokens of a training sequence.
    """

    name: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    ffn: int = 0
    kv_heads: int | None = None
    head_dim: int | None = None
    gated: bool = True
    norm: str = "rms"
    norms_per_layer: int = 2
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: str = "none"
    sinks: bool = False
    positions: int = 0
    token_types: int = 0
    embedding_norm: bool = False
    embedding_width: int | None = None
    final_norm: bool = True
    pooler: bool = False
    transform_head: bool = False
    mixture: Mixture | None = None
    latent: Latent | None = None
    mtp: int = 0
    encoder_layers: int = 0
    relative_buckets: int = 0
    vision: Vision | None = None
    window: int | None = None
    windowed: float = 1.0
    causal: bool = True
    context: int = 2048
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads"):
            if getattr(self, name) < 1:
                raise LedgerError(f"{self.name}: {name} is {getattr(self, name)}; it must be at least 1")
        if self.vocab < 0 or (self.vocab == 0 and self.vision is None):
            raise LedgerError(f"{self.name}: vocab is {self.vocab}; a model of text needs at least 1")
        if self.head_dim is None and self.latent is None and self.hidden % self.heads:
            legal = [number for number in range(1, self.hidden + 1) if self.hidden % number == 0]
            near = sorted(legal, key=lambda number: abs(number - self.heads))[:2]
            raise LedgerError(
                f"{self.name}: hidden {self.hidden} does not divide by heads {self.heads}; give head_dim, or heads {near[0]} or {near[1]}"
            )
        if self.heads % self.kv:
            legal = [number for number in range(1, self.heads + 1) if self.heads % number == 0]
            near = sorted(legal, key=lambda number: abs(number - self.kv))[:2]
            raise LedgerError(f"{self.name}: heads {self.heads} do not divide by kv_heads {self.kv}; nearest legal: {near[0]} or {near[1]}")
        if self.norm not in NORMS:
            raise LedgerError(f"{self.name}: norm is {self.norm!r}; known: {', '.join(NORMS)}")
        if self.qk_norm not in QK_NORMS:
            raise LedgerError(f"{self.name}: qk_norm is {self.qk_norm!r}; known: {', '.join(QK_NORMS)}")
        if self.ffn < 1 and (self.mixture is None or self.plain_layers):
            raise LedgerError(f"{self.name}: ffn is {self.ffn}, but {self.plain_layers} layers have a plain MLP")

    @property
    def kv(self) -> int:
        """Number of key and value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head(self) -> int:
        """Width of one head's query (latent attention: with its rotary part)."""
        if self.latent is not None:
            return self.latent.qk_head
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def value_head(self) -> int:
        """Width of one head's value."""
        return self.latent.v_head if self.latent is not None else self.head

    @property
    def norm_width(self) -> int:
        """Vectors of a norm: weight, and bias for a layer norm."""
        return 1 if self.norm == "rms" else 2

    @property
    def mixture_layers(self) -> int:
        """Layers whose MLP is routed."""
        if self.mixture is None:
            return 0
        return len([index for index in range(self.layers) if self.is_mixture(index)])

    @property
    def plain_layers(self) -> int:
        """Layers with a plain MLP."""
        return self.layers - self.mixture_layers

    def is_mixture(self, index: int) -> bool:
        """Return whether layer `index` has routed experts: after the dense ones, the last (or first) of each `every` layers."""
        if self.mixture is None or index < self.mixture.dense_layers:
            return False
        wanted = 0 if self.mixture.leads else self.mixture.every - 1
        return (index - self.mixture.dense_layers) % self.mixture.every == wanted

    def to_dict(self) -> dict[str, object]:
        """Return what was given, without the fields at their defaults."""
        found: dict[str, object] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if value != item.default:
                found[item.name] = {k: v for k, v in vars(value).items()} if isinstance(value, (Mixture, Latent, Vision)) else value
        return found
