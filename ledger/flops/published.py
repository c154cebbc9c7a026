"""The closed forms that papers and frameworks print, each under the name of who uses it and with its switches explicit."""

from __future__ import annotations

from ..problems import LedgerError
from ..units import DAY_S

# policy -> (times the matrices are multiplied, times the attention core is); a backward counts twice
_PASSES = {"none": (3, 3), "selective": (3, 6), "full": (4, 4)}


def six_n_d(params: float, tokens: float, passes: float = 6.0) -> float:
    """Return training FLOPs as 6 N D (Kaplan et al. 2020); 8 with full recomputation, 2 for a forward."""
    return passes * params * tokens


def dense_flops_per_token(
    params: float,
    *,
    embedding: float = 0.0,
    layers: int = 0,
    width: float = 0.0,
    seq: int = 0,
    attention: str = "full",
    value_width: float | None = None,
) -> float:
    """Return training FLOPs of a token as 6 (N - embedding) + 12 L w s (PaLM's appendix B; nanoGPT, llm-foundry, torchtitan).

    Args:
        embedding: parameters left out of N; 0 counts every parameter.
        width: all heads together, heads x head_dim; `value_width` when the values' differ (latent attention).
        attention: "full" as the form is printed, "causal" half of the attention term, "none" without it.

    Raises:
        LedgerError: an unknown way to count attention.
    """
    shares = {"full": 1.0, "causal": 0.5, "none": 0.0}
    if attention not in shares:
        raise LedgerError(f"attention is {attention!r}; known: {', '.join(shares)}")
    both = width + (width if value_width is None else value_width)
    return 6.0 * (params - embedding) + shares[attention] * 6.0 * layers * both * seq


def narayanan_flops(batch: float, layers: int, hidden: int, seq: int, vocab: int, recompute: str = "none") -> float:
    """Return the FLOPs of an iteration of a GPT: 72 B L s h² (1 + s/6h + V/12hL) without recomputation.

    Full recomputation turns 72 into 96 and V/12hL into V/16hL (Narayanan et al. 2021, appendix). Selective recomputation
    turns s/6h into s/3h (Korthikanti et al. 2022, eq. 7 and 8); that is the form as printed: one more forward of the
    attention core alone would be s/4.5h, which is what `step_flops` counts
    for its policy "core".

    Raises:
        LedgerError: an unknown policy.
    """
    if recompute not in _PASSES:
        raise LedgerError(f"recompute is {recompute!r}; known: {', '.join(_PASSES)}")
    passes, core_passes = _PASSES[recompute]
    matrices = 24.0 * passes * batch * layers * seq * hidden**2
    core = 4.0 * core_passes * batch * layers * seq**2 * hidden
    return matrices + core + 6.0 * batch * seq * hidden * vocab


def dgxc_attention(layers: int, hidden: int, heads: int, kv_heads: int, seq: int, attention: str = "full") -> float:
    """Return the attention term of NVIDIA's dgxc-benchmarking: 12 L h² (1 + kv/a + s/h), per token."""
    share = {"full": 1.0, "causal": 0.5, "none": 0.0}[attention]
    return 12.0 * layers * hidden**2 * (1 + kv_heads / heads + share * seq / hidden)


def dgxc_mlp(layers: int, hidden: int, ffn: int, *, gated: bool = True, top_k: int = 1) -> float:
    """Return the MLP term per token: 18 L h f for a gated MLP, 12 L h f for a plain one, times the experts of a token."""
    return (18.0 if gated else 12.0) * layers * hidden * ffn * top_k


def dgxc_embedding(vocab: int, hidden: int) -> float:
    """Return the output head's term per token: 6 V h."""
    return 6.0 * vocab * hidden


def training_seconds(flops: float, flops_per_s: float, devices: int = 1, share: float = 1.0) -> float:
    """Return FLOPs over what `devices` do at `share` of `flops_per_s`."""
    return flops / (flops_per_s * devices * share)


def training_days(params: float, tokens: float, devices: int, achieved: float, passes: float = 8.0) -> float:
    """Return days as 8 T P / (n X) (Narayanan et al. 2021, eq. 4): X is achieved hardware FLOP/s, 8 counts full recomputation."""
    return training_seconds(six_n_d(params, tokens, passes), achieved, devices) / DAY_S
