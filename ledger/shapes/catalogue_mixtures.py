"""Mixtures of experts."""

from __future__ import annotations

from typing import Any

from .catalogue import Entry
from .shape import Latent, Mixture, ModelShape

_DEEPSEEK = "config.json of deepseek-ai; arXiv:2401.06066, 2405.04434, 2412.19437"
_QWEN = "config.json of Qwen; arXiv:2407.10671, 2505.09388"


def _mixture(
    name: str,
    published: tuple[float, float | None],
    source: str,
    sizes: tuple[int, int, int, int],
    mixture: Mixture,
    aliases: tuple[str, ...] = (),
    **more: Any,
) -> Entry:
    """`published` are all and active parameters; `sizes` are vocab, hidden, layers, heads."""
    shape = ModelShape(name, *sizes, mixture=mixture, source=source, **more)
    return Entry(shape, *published, aliases=aliases)


_MLA_LARGE = Latent(kv_rank=512, q_rank=1536, qk_nope=128, qk_rope=64, v_head=128)
_MLA_SMALL = Latent(kv_rank=512, q_rank=None, qk_nope=128, qk_rope=64, v_head=128)

MIXTURES: tuple[Entry, ...] = (
    _mixture(
        "mixtral-8x7b", (46.7e9, 12.9e9), "config.json of mistralai; arXiv:2401.04088", (32000, 4096, 32, 32),
        Mixture(8, 2, 14336), kv_heads=8, context=4096,
    ),
    _mixture(
        "mixtral-8x22b", (140.6e9, 39.1e9), "config.json of mistralai", (32768, 6144, 56, 48),
        Mixture(8, 2, 16384), kv_heads=8, context=4096,
    ),
    _mixture("grok-1", (314e9, None), "xai-org/grok-1 run.py", (131072, 6144, 64, 48), Mixture(8, 2, 32768), kv_heads=8, tied=True,
             context=8192),
    _mixture(
        "dbrx", (131.6e9, 36.5e9), "config.json of databricks", (100352, 6144, 40, 48),
        Mixture(16, 4, 10752), ("dbrx-132b",), kv_heads=8, context=4096,
    ),
    _mixture(
        "deepseek-moe-16b", (16.4e9, 2.8e9), _DEEPSEEK, (102400, 2048, 28, 16),
        Mixture(64, 6, 1408, shared=2, dense_layers=1), ffn=10944, context=4096,
    ),
    _mixture(
        "deepseek-v2-lite", (15.7e9, 2.66e9), _DEEPSEEK, (102400, 2048, 27, 16),
        Mixture(64, 6, 1408, shared=2, dense_layers=1), ffn=10944, latent=_MLA_SMALL, context=4096,
    ),
    _mixture(
        "deepseek-v2", (235.7e9, 21.4e9), _DEEPSEEK, (102400, 5120, 60, 128),
        Mixture(160, 6, 1536, shared=2, dense_layers=1), ("deepseek-v2-236b",), ffn=12288, latent=_MLA_LARGE, context=4096,
    ),
    _mixture(
        "deepseek-v3", (671.0e9, 37.6e9), _DEEPSEEK, (129280, 7168, 61, 128),
        Mixture(256, 8, 2048, shared=1, dense_layers=3), ("deepseek-r1", "deepseek-v3-671b"), ffn=18432, latent=_MLA_LARGE, context=4096,
    ),
    _mixture(
        "kimi-k2", (1026e9, 32.9e9), "config.json of moonshotai; arXiv:2507.20534", (163840, 7168, 61, 64),
        Mixture(384, 8, 2048, shared=1, dense_layers=1), ffn=18432, latent=_MLA_LARGE, context=4096,
    ),
    _mixture(
        "qwen1.5-moe-a2.7b", (14.3e9, 2.7e9), _QWEN, (151936, 2048, 24, 16),
        Mixture(60, 4, 1408, shared=1, shared_ffn=5632, gated_shared=True), qkv_bias=True, context=4096,
    ),
    _mixture(
        "qwen2-57b-a14b", (57.4e9, 14.2e9), _QWEN, (151936, 3584, 28, 28),
        Mixture(64, 8, 2560, shared=1, shared_ffn=20480, gated_shared=True), kv_heads=4, qkv_bias=True, context=4096,
    ),
    _mixture(
        "qwen3-30b-a3b", (30.5e9, 3.35e9), _QWEN, (151936, 2048, 48, 32),
        Mixture(128, 8, 768), kv_heads=4, head_dim=128, qk_norm="head", context=4096,
    ),
    _mixture(
        "qwen3-235b-a22b", (235.1e9, 22.2e9), _QWEN, (151936, 4096, 94, 64),
        Mixture(128, 8, 1536), kv_heads=4, head_dim=128, qk_norm="head", context=4096,
    ),
    _mixture(
        "llama4-scout", (107.8e9, 17.2e9), "config.json of meta-llama", (202048, 5120, 48, 40),
        Mixture(16, 1, 8192, shared=1), ("llama4-scout-17b-16e",), kv_heads=8, head_dim=128, context=8192,
    ),
    _mixture(
        "llama4-maverick", (400.7e9, 17.2e9), "config.json of meta-llama", (202048, 5120, 48, 40),
        Mixture(128, 1, 8192, shared=1, every=2), ("llama4-maverick-17b-128e",), ffn=16384, kv_heads=8, head_dim=128, context=8192,
    ),
    _mixture(
        "gpt-oss-20b", (20.9e9, 4.19e9), "config.json of openai; arXiv:2508.10925", (201088, 2880, 24, 64),
        Mixture(32, 4, 2880, router_bias=True), kv_heads=8, head_dim=64, qkv_bias=True, output_bias=True, mlp_bias=True,
        sinks=True, window=128, windowed=0.5, context=4096,
    ),
    _mixture(
        "gpt-oss-120b", (116.8e9, 5.7e9), "config.json of openai; arXiv:2508.10925", (201088, 2880, 36, 64),
        Mixture(128, 4, 2880, router_bias=True), kv_heads=8, head_dim=64, qkv_bias=True, output_bias=True, mlp_bias=True,
        sinks=True, window=128, windowed=0.5, context=4096,
    ),
    _mixture(
        "olmoe-7b", (6.92e9, 1.28e9), "config.json of allenai; arXiv:2409.02060", (50304, 2048, 16, 16),
        Mixture(64, 8, 1024), ("olmoe-1b-7b",), qk_norm="full", context=4096,
    ),
)  # fmt: skip
