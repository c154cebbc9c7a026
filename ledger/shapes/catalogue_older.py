"""GPT-2 to GPT-3, their open copies, the sizes of Megatron's papers, and encoders."""

from __future__ import annotations

from typing import Any

from .catalogue import Entry
from .shape import ModelShape, Vision

_GPT = "arXiv:2005.14165 table 2.1; config.json of openai-community"
_SC21 = "arXiv:2104.04473 table 1"
_KORTHIKANTI = "arXiv:2205.05198 table 3"
_MEGATRON = "NVIDIA/Megatron-LM README, table of model sizes (H100)"


def gpt(name: str, vocab: int, hidden: int, layers: int, heads: int, positions: int, **more: Any) -> ModelShape:
    """Return a GPT-2-like shape: plain MLP of 4 hidden, layer norms and biases everywhere, learned positions, tied head."""
    given = {
        "ffn": 4 * hidden, "gated": False, "norm": "layernorm", "qkv_bias": True, "output_bias": True, "mlp_bias": True,
        "tied": True, "positions": positions, "context": positions or 2048,
    }  # fmt: skip
    return ModelShape(name, vocab, hidden, layers, heads, **{**given, **more})


def _gpt(name: str, published: float | None, source: str, *sizes: int, aliases: tuple[str, ...] = (), **more: Any) -> Entry:
    """`sizes` are vocab, hidden, layers, heads, positions."""
    vocab, hidden, layers, heads, positions = sizes
    return Entry(gpt(name, vocab, hidden, layers, heads, positions, source=source, **more), published, aliases=aliases)


_GPTS = (
    _gpt("gpt2", 124.44e6, _GPT, 50257, 768, 12, 12, 1024, aliases=("gpt2-small", "gpt2-124m")),
    _gpt("gpt2-medium", 354.8e6, _GPT, 50257, 1024, 24, 16, 1024),
    _gpt("gpt2-large", 774.0e6, _GPT, 50257, 1280, 36, 20, 1024),
    _gpt("gpt2-xl", 1557.6e6, _GPT, 50257, 1600, 48, 25, 1024),
    _gpt("gpt3-125m", 125e6, _GPT, 50257, 768, 12, 12, 2048, aliases=("gpt3-small",)),
    _gpt("gpt3-350m", 356e6, _GPT, 50257, 1024, 24, 16, 2048, aliases=("gpt3-medium",)),
    _gpt("gpt3-760m", 760e6, _GPT, 50257, 1536, 24, 16, 2048, aliases=("gpt3-large",)),
    _gpt("gpt3-1.3b", 1.32e9, _GPT, 50257, 2048, 24, 16, 2048, aliases=("gpt3-xl",)),
    _gpt("gpt3-2.7b", 2.65e9, _GPT, 50257, 2560, 32, 32, 2048),
    _gpt("gpt3-6.7b", 6.66e9, _GPT, 50257, 4096, 32, 32, 2048),
    _gpt("gpt3-13b", 12.85e9, _GPT, 50257, 5120, 40, 40, 2048),
    _gpt("gpt3-175b", 174.6e9, _GPT, 50257, 12288, 96, 96, 2048, aliases=("gpt3", "gpt-175b")),
    _gpt("gpt-neox-20b", 20.55e9, "config.json of EleutherAI; arXiv:2204.06745", 50432, 6144, 44, 64, 0, tied=False),
    _gpt("gpt-j-6b", 6.05e9, "config.json of EleutherAI", 50400, 4096, 28, 16, 0, tied=False, norms_per_layer=1, head_bias=True,
         qkv_bias=False, output_bias=False),
    _gpt("pythia-1.4b", 1.415e9, "config.json of EleutherAI; arXiv:2304.01373", 50304, 2048, 24, 16, 0, tied=False),
    _gpt("pythia-6.9b", 6.857e9, "config.json of EleutherAI; arXiv:2304.01373", 50432, 4096, 32, 32, 0, tied=False),
    _gpt("pythia-12b", 11.846e9, "config.json of EleutherAI; arXiv:2304.01373", 50688, 5120, 36, 40, 0, tied=False),
)  # fmt: skip

_BLOOM = "config.json of bigscience; arXiv:2211.05100"
_OPT = "config.json of facebook; arXiv:2205.01068"
_OPEN = (
    _gpt("bloom-560m", 559.2e6, _BLOOM, 250880, 1024, 24, 16, 0, embedding_norm=True),
    _gpt("bloom-1b1", 1065e6, _BLOOM, 250880, 1536, 24, 16, 0, embedding_norm=True),
    _gpt("bloom-1b7", 1722e6, _BLOOM, 250880, 2048, 24, 16, 0, embedding_norm=True),
    _gpt("bloom-3b", 3.003e9, _BLOOM, 250880, 2560, 30, 32, 0, embedding_norm=True),
    _gpt("bloom-7b1", 7.069e9, _BLOOM, 250880, 4096, 30, 32, 0, embedding_norm=True),
    _gpt("bloom-176b", 176.247e9, _BLOOM, 250880, 14336, 70, 112, 0, embedding_norm=True, aliases=("bloom",)),
    _gpt("opt-125m", 125.2e6, _OPT, 50272, 768, 12, 12, 2050, context=2048),
    _gpt("opt-350m", 331.2e6, _OPT, 50272, 1024, 24, 16, 2050, context=2048, embedding_width=512, final_norm=False),
    _gpt("opt-1.3b", 1.316e9, _OPT, 50272, 2048, 24, 32, 2050, context=2048),
    _gpt("opt-2.7b", 2.652e9, _OPT, 50272, 2560, 32, 32, 2050, context=2048),
    _gpt("opt-6.7b", 6.658e9, _OPT, 50272, 4096, 32, 32, 2050, context=2048),
    _gpt("opt-13b", 12.853e9, _OPT, 50272, 5120, 40, 40, 2050, context=2048),
    _gpt("opt-30b", 29.975e9, _OPT, 50272, 7168, 48, 56, 2050, context=2048),
    _gpt("opt-66b", 65.718e9, _OPT, 50272, 9216, 64, 72, 2050, context=2048),
    _gpt("opt-175b", 174.604e9, _OPT, 50272, 12288, 96, 96, 2050, context=2048),
)


def _falcon(name: str, published: float, *sizes: int, **more: Any) -> Entry:
    vocab, hidden, layers, heads, kv_heads = sizes
    shape = ModelShape(
        name, vocab, hidden, layers, heads, 4 * hidden, kv_heads=kv_heads, gated=False, norm="layernorm", tied=True,
        source="config.json of tiiuae; arXiv:2311.16867", **more,
    )  # fmt: skip
    return Entry(shape, published)


_FALCONS = (
    _falcon("falcon-7b", 6.922e9, 65024, 4544, 32, 71, 1, norms_per_layer=1),
    _falcon("falcon-40b", 41.303e9, 65024, 8192, 60, 128, 8),
    _falcon("falcon-180b", 178.66e9, 65024, 14848, 80, 232, 8),
)


def _sized(prefix: str, source: str, rows: tuple[tuple[str, float, int, int, int], ...], **more: Any) -> tuple[Entry, ...]:
    """Rows are size in words, published parameters, hidden, layers, heads."""
    return tuple(
        _gpt(f"{prefix}-{size}", published, source, more.get("vocab", 51200), hidden, layers, heads, more.get("positions", 2048),
             **{key: value for key, value in more.items() if key not in ("vocab", "positions")})
        for size, published, hidden, layers, heads in rows
    )  # fmt: skip


_PAPERS = (
    *_sized("sc21-gpt", _SC21, (
        ("1.7b", 1.65e9, 2304, 24, 24), ("3.6b", 3.56e9, 3072, 30, 32), ("7.5b", 7.5e9, 4096, 36, 32), ("18.4b", 18.4e9, 6144, 40, 48),
        ("39.1b", 39.1e9, 8192, 48, 64), ("76.1b", 76.1e9, 10240, 60, 80), ("145.6b", 145.6e9, 12288, 80, 96),
        ("310.1b", 310.1e9, 16384, 96, 128), ("529.6b", 529.6e9, 20480, 105, 128), ("1008.0b", 1008e9, 25600, 128, 160),
    )),
    *_sized("megatron", _KORTHIKANTI, (
        ("22b", 22.0e9, 6144, 48, 64), ("175b", 174.9e9, 12288, 96, 96), ("530b", 529.6e9, 20480, 105, 128), ("1t", 1008e9, 25600, 128,
         160),
    )),
    *_sized("megatron-h100", _MEGATRON, (
        ("7.1b", 7.1e9, 4096, 30, 32), ("177b", 177e9, 12288, 96, 96), ("314b", 314e9, 16384, 96, 128), ("462b", 462e9, 18432, 112, 144),
    ), vocab=131072, positions=0, tied=False, context=4096, qkv_bias=False, output_bias=False, mlp_bias=False),
    _gpt("mt-nlg-530b", 530e9, "arXiv:2201.11990", 50257, 20480, 105, 128, 2048),
    _gpt("megascale-175b", 175e9, "arXiv:2402.15627 table 1", 64000, 12288, 96, 128, 2048),
    _gpt("gpt-1t", 1.008e12, _SC21, 51200, 25600, 128, 160, 2048),
    _gpt("nemotron4-15b", 15.6e9, "arXiv:2402.16819", 256000, 6144, 32, 48, 0, kv_heads=8, tied=False, qkv_bias=False,
         output_bias=False, mlp_bias=False, context=4096),
    _gpt("nemotron4-340b", 341e9, "arXiv:2406.11704", 256000, 18432, 96, 96, 0, kv_heads=8, tied=False, qkv_bias=False,
         output_bias=False, mlp_bias=False, context=4096),
    _gpt("mpt-7b", 6.65e9, "config.json of mosaicml", 50432, 4096, 32, 32, 0, qkv_bias=False, output_bias=False, mlp_bias=False,
         norm="rms"),
    _gpt("mpt-30b", 29.96e9, "config.json of mosaicml", 50432, 7168, 48, 64, 0, qkv_bias=False, output_bias=False, mlp_bias=False,
         norm="rms"),
)  # fmt: skip


def _bert(name: str, published: float, hidden: int, layers: int, heads: int) -> Entry:
    shape = gpt(
        name, 30522, hidden, layers, heads, 512, token_types=2, embedding_norm=True, final_norm=False, pooler=True, causal=False,
        context=512, source="config.json of google-bert; arXiv:1810.04805",
    )  # fmt: skip
    return Entry(shape, published)


def _t5(name: str, published: float, hidden: int, layers: int, heads: int, head_dim: int, ffn: int) -> Entry:
    shape = ModelShape(
        name, 32128, hidden, layers, heads, ffn, head_dim=head_dim, gated=False, tied=True, encoder_layers=layers, relative_buckets=32,
        context=512, source="config.json of google-t5; arXiv:1910.10683",
    )  # fmt: skip
    return Entry(shape, published)


def _vit(name: str, published: float, hidden: int, layers: int, heads: int, patch: int) -> Entry:
    vision = Vision(224, patch, classes=1000)
    shape = gpt(
        name, 0, hidden, layers, heads, vision.patches + 1, vision=vision, causal=False, context=vision.patches + 1, tied=False,
        source="arXiv:2010.11929",
    )  # fmt: skip
    return Entry(shape, published)


_ENCODERS = (
    _bert("bert-base", 109.5e6, 768, 12, 12),
    _bert("bert-large", 335.1e6, 1024, 24, 16),
    _t5("t5-small", 60.5e6, 512, 6, 8, 64, 2048),
    _t5("t5-base", 222.9e6, 768, 12, 12, 64, 3072),
    _t5("t5-large", 737.7e6, 1024, 24, 16, 64, 4096),
    _t5("t5-3b", 2851.6e6, 1024, 24, 32, 128, 16384),
    _t5("t5-11b", 11307e6, 1024, 24, 128, 128, 65536),
    _vit("vit-b16", 86.57e6, 768, 12, 12, 16),
    _vit("vit-l16", 304.33e6, 1024, 24, 16, 16),
    _vit("vit-h14", 632.0e6, 1280, 32, 16, 14),
)

OLDER: tuple[Entry, ...] = (*_GPTS, *_OPEN, *_FALCONS, *_PAPERS, *_ENCODERS)
