"""Dense decoders of the kind built since 2023: gated MLP, RMS norm, rotary positions."""

from __future__ import annotations

from typing import Any

from .catalogue import Entry
from .shape import ModelShape

_LLAMA = "config.json of meta-llama; arXiv:2302.13971, 2307.09288, 2407.21783"
_QWEN = "config.json of Qwen; arXiv:2309.16609, 2407.10671, 2412.15115, 2505.09388"
_MISTRAL = "config.json of mistralai; arXiv:2310.06825"
_GEMMA = "config.json of google; arXiv:2403.08295, 2408.00118, 2503.19786"


def _decoder(
    name: str,
    published: float | None,
    source: str,
    sizes: tuple[int, int, int, int, int, int],
    aliases: tuple[str, ...] = (),
    **more: Any,
) -> Entry:
    """`sizes` are vocab, hidden, layers, heads, kv_heads, ffn."""
    vocab, hidden, layers, heads, kv_heads, ffn = sizes
    shape = ModelShape(name, vocab, hidden, layers, heads, ffn, kv_heads=kv_heads, source=source, **more)
    return Entry(shape, published, aliases=aliases)


_LLAMAS = (
    _decoder("llama-7b", 6.74e9, _LLAMA, (32000, 4096, 32, 32, 32, 11008), ("llama1-7b",)),
    _decoder("llama-13b", 13.02e9, _LLAMA, (32000, 5120, 40, 40, 40, 13824), ("llama1-13b",)),
    _decoder("llama-33b", 32.53e9, _LLAMA, (32000, 6656, 60, 52, 52, 17920), ("llama1-33b", "llama-30b", "llama1-30b")),
    _decoder("llama-65b", 65.29e9, _LLAMA, (32000, 8192, 80, 64, 64, 22016), ("llama1-65b",)),
    _decoder("llama2-7b", 6.738e9, _LLAMA, (32000, 4096, 32, 32, 32, 11008), context=4096),
    _decoder("llama2-13b", 13.016e9, _LLAMA, (32000, 5120, 40, 40, 40, 13824), context=4096),
    _decoder("llama2-70b", 68.977e9, _LLAMA, (32000, 8192, 80, 64, 8, 28672), context=4096),
    _decoder("llama3-8b", 8.030e9, _LLAMA, (128256, 4096, 32, 32, 8, 14336), ("llama3.1-8b", "llama-8b"), context=8192),
    _decoder("llama3-70b", 70.554e9, _LLAMA, (128256, 8192, 80, 64, 8, 28672), ("llama3.1-70b", "llama3.3-70b", "llama-70b"), context=8192),
    _decoder("llama3-405b", 405.853e9, _LLAMA, (128256, 16384, 126, 128, 8, 53248), ("llama3.1-405b", "llama-405b"), context=8192),
    _decoder("llama3.2-1b", 1.236e9, _LLAMA, (128256, 2048, 16, 32, 8, 8192), context=8192, tied=True),
    _decoder("llama3.2-3b", 3.213e9, _LLAMA, (128256, 3072, 28, 24, 8, 8192), context=8192, tied=True),
    _decoder("tinyllama-1.1b", 1.100e9, "config.json of TinyLlama; arXiv:2401.02385", (32000, 2048, 22, 32, 4, 5632)),
    _decoder("yi-6b", 6.06e9, "config.json of 01-ai; arXiv:2403.04652", (64000, 4096, 32, 32, 4, 11008), context=4096),
    _decoder("yi-34b", 34.39e9, "config.json of 01-ai; arXiv:2403.04652", (64000, 7168, 60, 56, 8, 20480), context=4096),
    _decoder("deepseek-7b", 6.91e9, "config.json of deepseek-ai; arXiv:2401.02954", (102400, 4096, 30, 32, 32, 11008), context=4096),
    _decoder("deepseek-67b", 67.4e9, "config.json of deepseek-ai; arXiv:2401.02954", (102400, 8192, 95, 64, 8, 22016), context=4096),
    _decoder("smollm2-135m", 134.5e6, "config.json of HuggingFaceTB; arXiv:2502.02737", (49152, 576, 30, 9, 3, 1536), tied=True),
    _decoder("smollm2-1.7b", 1.711e9, "config.json of HuggingFaceTB; arXiv:2502.02737", (49152, 2048, 24, 32, 32, 8192), tied=True),
)

_MISTRALS = (
    _decoder("mistral-7b", 7.242e9, _MISTRAL, (32000, 4096, 32, 32, 8, 14336), ("mistral-7b-v0.1",), context=8192, window=4096),
    _decoder("mistral-nemo-12b", 12.248e9, _MISTRAL, (131072, 5120, 40, 32, 8, 14336), head_dim=128, context=8192),
    _decoder("mistral-small-24b", 23.57e9, _MISTRAL, (131072, 5120, 40, 32, 8, 32768), head_dim=128, context=8192),
    _decoder("mistral-large-123b", 122.61e9, _MISTRAL, (32768, 12288, 88, 96, 8, 28672), ("mistral-large-2",), context=8192),
)


def _qwen2(name: str, published: float, *sizes: int, **more: Any) -> Entry:
    vocab, hidden, layers, heads, kv_heads, ffn = sizes
    return _decoder(name, published, _QWEN, (vocab, hidden, layers, heads, kv_heads, ffn), qkv_bias=True, context=4096, **more)


def _qwen3(name: str, published: float, *sizes: int, **more: Any) -> Entry:
    vocab, hidden, layers, heads, kv_heads, ffn = sizes
    return _decoder(
        name, published, _QWEN, (vocab, hidden, layers, heads, kv_heads, ffn), head_dim=128, qk_norm="head", context=4096, **more
    )


_QWENS = (
    _qwen2("qwen1.5-0.5b", 464e6, 151936, 1024, 24, 16, 16, 2816, tied=True),
    _qwen2("qwen1.5-7b", 7.721e9, 151936, 4096, 32, 32, 32, 11008),
    _qwen2("qwen1.5-14b", 14.167e9, 152064, 5120, 40, 40, 40, 13696),
    _qwen2("qwen1.5-32b", 32.512e9, 152064, 5120, 64, 40, 8, 27392),
    _qwen2("qwen1.5-72b", 72.288e9, 152064, 8192, 80, 64, 64, 24576),
    _qwen2("qwen1.5-110b", 111.21e9, 152064, 8192, 80, 64, 8, 49152),
    _qwen2("qwen2-0.5b", 494e6, 151936, 896, 24, 14, 2, 4864, tied=True),
    _qwen2("qwen2-1.5b", 1.544e9, 151936, 1536, 28, 12, 2, 8960, tied=True),
    _qwen2("qwen2-7b", 7.616e9, 152064, 3584, 28, 28, 4, 18944),
    _qwen2("qwen2-72b", 72.706e9, 152064, 8192, 80, 64, 8, 29568),
    _qwen2("qwen2.5-0.5b", 494e6, 151936, 896, 24, 14, 2, 4864, tied=True),
    _qwen2("qwen2.5-1.5b", 1.544e9, 151936, 1536, 28, 12, 2, 8960, tied=True),
    _qwen2("qwen2.5-3b", 3.086e9, 151936, 2048, 36, 16, 2, 11008, tied=True),
    _qwen2("qwen2.5-7b", 7.616e9, 152064, 3584, 28, 28, 4, 18944),
    _qwen2("qwen2.5-14b", 14.770e9, 152064, 5120, 48, 40, 8, 13824),
    _qwen2("qwen2.5-32b", 32.764e9, 152064, 5120, 64, 40, 8, 27648),
    _qwen2("qwen2.5-72b", 72.706e9, 152064, 8192, 80, 64, 8, 29568),
    _qwen3("qwen3-0.6b", 596e6, 151936, 1024, 28, 16, 8, 3072, tied=True),
    _qwen3("qwen3-1.7b", 1.721e9, 151936, 2048, 28, 16, 8, 6144, tied=True),
    _qwen3("qwen3-4b", 4.022e9, 151936, 2560, 36, 32, 8, 9728, tied=True),
    _qwen3("qwen3-8b", 8.191e9, 151936, 4096, 36, 32, 8, 12288),
    _qwen3("qwen3-14b", 14.768e9, 151936, 5120, 40, 40, 8, 17408),
    _qwen3("qwen3-32b", 32.762e9, 151936, 5120, 64, 64, 8, 25600),
)


def _gemma(name: str, published: float, sizes: tuple[int, int, int, int, int, int], head_dim: int, **more: Any) -> Entry:
    return _decoder(name, published, _GEMMA, sizes, head_dim=head_dim, tied=True, context=8192, **more)


_GEMMAS = (
    _gemma("gemma-2b", 2.506e9, (256000, 2048, 18, 8, 1, 16384), 256),
    _gemma("gemma-7b", 8.538e9, (256000, 3072, 28, 16, 16, 24576), 256),
    _gemma("gemma2-2b", 2.614e9, (256000, 2304, 26, 8, 4, 9216), 256, norms_per_layer=4, window=4096, windowed=0.5),
    _gemma("gemma2-9b", 9.242e9, (256000, 3584, 42, 16, 8, 14336), 256, norms_per_layer=4, window=4096, windowed=0.5),
    _gemma("gemma2-27b", 27.227e9, (256000, 4608, 46, 32, 16, 36864), 128, norms_per_layer=4, window=4096, windowed=0.5),
    _gemma("gemma3-1b", 1.000e9, (262144, 1152, 26, 4, 1, 6912), 256, norms_per_layer=4, qk_norm="head", window=512, windowed=5 / 6),
    _gemma("gemma3-4b", 3.88e9, (262208, 2560, 34, 8, 4, 10240), 256, norms_per_layer=4, qk_norm="head", window=1024, windowed=5 / 6),
    _gemma("gemma3-12b", 11.77e9, (262208, 3840, 48, 16, 8, 15360), 256, norms_per_layer=4, qk_norm="head", window=1024, windowed=5 / 6),
    _gemma("gemma3-27b", 27.01e9, (262208, 5376, 62, 32, 16, 21504), 128, norms_per_layer=4, qk_norm="head", window=1024, windowed=5 / 6),
)

_OTHERS = (
    _decoder("phi-3-mini", 3.821e9, "config.json of microsoft; arXiv:2404.14219", (32064, 3072, 32, 32, 32, 8192), context=4096),
    _decoder("phi-3-medium", 13.96e9, "config.json of microsoft; arXiv:2404.14219", (32064, 5120, 40, 40, 10, 17920), context=4096),
    _decoder("phi-4", 14.66e9, "config.json of microsoft; arXiv:2412.08905", (100352, 5120, 40, 40, 10, 17920), context=4096),
    _decoder(
        "olmo2-7b", 7.299e9, "config.json of allenai; arXiv:2501.00656", (100352, 4096, 32, 32, 32, 11008), qk_norm="full", context=4096
    ),
    _decoder(
        "olmo2-13b", 13.72e9, "config.json of allenai; arXiv:2501.00656", (100352, 5120, 40, 40, 40, 13824), qk_norm="full", context=4096
    ),
    _decoder(
        "olmo2-32b", 32.23e9, "config.json of allenai; arXiv:2501.00656", (100352, 5120, 64, 40, 8, 27648), qk_norm="full", context=4096
    ),
    _decoder(
        "command-r-35b",
        34.98e9,
        "config.json of CohereForAI",
        (256000, 8192, 40, 64, 64, 22528),
        tied=True,
        norms_per_layer=1,
        context=8192,
    ),
    _decoder("palm-8b", 8.63e9, "arXiv:2204.02311 table 1", (256000, 4096, 32, 16, 1, 16384), head_dim=256, tied=True, norms_per_layer=1),
    _decoder("palm-62b", 62.5e9, "arXiv:2204.02311 table 1", (256000, 8192, 64, 32, 1, 32768), head_dim=256, tied=True, norms_per_layer=1),
    _decoder(
        "palm-540b", 540.35e9, "arXiv:2204.02311 table 1", (256000, 18432, 118, 48, 1, 73728), head_dim=256, tied=True, norms_per_layer=1
    ),
)

DENSE: tuple[Entry, ...] = (*_LLAMAS, *_MISTRALS, *_QWENS, *_GEMMAS, *_OTHERS)
