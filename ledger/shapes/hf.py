"""Reads a Hugging Face `config.json` (as plain data): each model type is a row of what differs from the usual decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..problems import LedgerError, nearest
from .shape import Latent, Mixture, ModelShape, Vision

Config = Mapping[str, Any]
_NAMES = {
    "vocab": ("vocab_size",),
    "hidden": ("hidden_size", "n_embd", "d_model", "n_embed"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
}


def shape_from_config(config: Config, name: str | None = None) -> ModelShape:
    """Return the shape that a config describes.

    Raises:
        LedgerError: no model type, one that is not known, or a size is missing.
    """
    inner = config.get("text_config")
    if isinstance(inner, Mapping):  # a model of images and text: the decoder is what is trained at scale
        config = {**inner, "tie_word_embeddings": config.get("tie_word_embeddings", inner.get("tie_word_embeddings"))}
    kind = config.get("model_type")
    if not kind:
        raise LedgerError(
            "the config names no model_type, so its keys cannot be read safely; add one of: "
            f"{', '.join(sorted(_TYPES))}; or give the ledger's own keys (vocab, hidden, layers, heads, ffn)"
        )
    if kind not in _TYPES:
        near = nearest(str(kind), _TYPES)
        raise LedgerError(f"unknown model_type {kind!r}; nearest: {', '.join(near) or 'none'}; known: {', '.join(sorted(_TYPES))}")
    given: dict[str, Any] = {
        field: _first(config, names, kind) for field, names in _NAMES.items() if not (kind == "vit" and field == "vocab")
    }
    given |= _TYPES[kind](config)
    label = name or str(config.get("_name_or_path") or kind)
    return ModelShape(**{"name": label, "vocab": 0, "source": f"config.json, model_type {kind}", **given})


def _first(config: Config, names: tuple[str, ...], kind: str) -> int:
    for name in names:
        if config.get(name) is not None:
            return int(config[name])
    raise LedgerError(f"a config of model_type {kind!r} needs {' or '.join(names)}")


def _tied(config: Config, default: bool) -> bool:
    found = config.get("tie_word_embeddings")
    return default if found is None else bool(found)


def _decoder(config: Config, *, tied: bool = False, **more: Any) -> dict[str, Any]:
    """The usual decoder: grouped-query attention, gated MLP, RMS norm, no biases."""
    heads = _first(config, _NAMES["heads"], "decoder")
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    kinds = config.get("layer_types") or []
    windowed = sum(kind == "sliding_attention" for kind in kinds) / len(kinds) if kinds else 1.0
    found = {
        "ffn": int(config.get("intermediate_size") or 0),
        "kv_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": config.get("head_dim"),
        "tied": _tied(config, tied),
        "context": min(int(config.get("max_position_embeddings") or 2048), 8192),
        "window": int(window) if window and windowed else None,
        "windowed": windowed if window and windowed else 1.0,
    }
    if config.get("attention_bias"):
        found |= {"qkv_bias": True, "output_bias": True}
    if config.get("mlp_bias"):
        found["mlp_bias"] = True
    return found | more


def _routed(config: Config, **more: Any) -> Mixture:
    experts = config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts")
    if not experts or not config.get("num_experts_per_tok"):
        raise LedgerError("a config of a mixture of experts needs the number of experts and num_experts_per_tok")
    return Mixture(
        **{
            "experts": int(experts),
            "top_k": int(config["num_experts_per_tok"]),
            "ffn": int(config.get("moe_intermediate_size") or config["intermediate_size"]),
            **more,
        }
    )


def _qwen_moe(config: Config, **more: Any) -> dict[str, Any]:
    if config.get("mlp_only_layers"):
        raise LedgerError("mlp_only_layers is set; give the ledger's own keys (mixture: dense_layers, every) for such a pattern")
    shared = int(config.get("shared_expert_intermediate_size") or 0)
    extra = {"shared": 1, "shared_ffn": shared, "gated_shared": True} if shared else {}
    mixture = _routed(config, every=int(config.get("decoder_sparse_step") or 1), **extra)
    return _decoder(config, mixture=mixture, **more)


def _deepseek(config: Config) -> dict[str, Any]:
    rank = config.get("q_lora_rank")
    latent = Latent(
        int(config["kv_lora_rank"]), None if rank is None else int(rank), int(config["qk_nope_head_dim"]),
        int(config["qk_rope_head_dim"]), int(config["v_head_dim"]),
    )  # fmt: skip
    mixture = _routed(config, shared=int(config.get("n_shared_experts") or 0), dense_layers=int(config.get("first_k_dense_replace") or 0))
    return _decoder(config, latent=latent, mixture=mixture, head_dim=None, kv_heads=None)


def _gpt2(config: Config) -> dict[str, Any]:
    hidden = _first(config, _NAMES["hidden"], "gpt2")
    positions = int(config.get("n_positions") or config.get("n_ctx") or 1024)
    return _biased(hidden, config.get("n_inner"), tied=_tied(config, True), positions=positions, context=positions)


def _biased(hidden: int, ffn: int | None, **more: Any) -> dict[str, Any]:
    """GPT-2's block: layer norms and biases everywhere, two MLP matrices."""
    return {
        "ffn": int(ffn or 4 * hidden), "gated": False, "norm": "layernorm", "qkv_bias": True, "output_bias": True, "mlp_bias": True, **more,
    }  # fmt: skip


def _neox(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", True))
    found = _biased(int(config["hidden_size"]), config.get("intermediate_size"), tied=_tied(config, False))
    return found | {"qkv_bias": bias, "output_bias": bias, "context": int(config.get("max_position_embeddings") or 2048)}


def _gptj(config: Config) -> dict[str, Any]:
    found = _biased(int(config["n_embd"]), config.get("n_inner"), tied=_tied(config, False), norms_per_layer=1, head_bias=True)
    return found | {"qkv_bias": False, "output_bias": False}


def _opt(config: Config) -> dict[str, Any]:
    hidden, positions = int(config["hidden_size"]), int(config.get("max_position_embeddings") or 2048)
    width = int(config.get("word_embed_proj_dim") or hidden)
    return _biased(
        hidden, config.get("ffn_dim"), tied=_tied(config, True), positions=positions + 2, context=positions,
        embedding_width=None if width == hidden else width, final_norm=bool(config.get("do_layer_norm_before", True)),
    )  # fmt: skip


def _bloom(config: Config) -> dict[str, Any]:
    return _biased(_first(config, _NAMES["hidden"], "bloom"), None, tied=_tied(config, True), embedding_norm=True)


def _falcon(config: Config) -> dict[str, Any]:
    hidden, heads = int(config["hidden_size"]), _first(config, _NAMES["heads"], "falcon")
    grouped = bool(config.get("new_decoder_architecture"))
    kv_heads = int(config.get("num_kv_heads") or 8) if grouped else 1 if config.get("multi_query", True) else heads
    norms = config.get("num_ln_in_parallel_attn") or (2 if grouped or not config.get("parallel_attn", True) else 1)
    bias = bool(config.get("bias", False))
    return _biased(hidden, config.get("ffn_hidden_size"), tied=_tied(config, True), kv_heads=kv_heads, norms_per_layer=int(norms)) | {
        "qkv_bias": bias, "output_bias": bias, "mlp_bias": bias,
    }  # fmt: skip


def _bert(config: Config) -> dict[str, Any]:
    positions = int(config.get("max_position_embeddings") or 512)
    return _biased(
        int(config["hidden_size"]), config.get("intermediate_size"), tied=True, positions=positions, context=positions,
        token_types=int(config.get("type_vocab_size") or 0), embedding_norm=True, final_norm=False, pooler=True, causal=False,
    )  # fmt: skip


def _t5(config: Config) -> dict[str, Any]:
    gated = bool(config.get("is_gated_act", str(config.get("feed_forward_proj", "relu")).startswith("gated")))
    return {
        "ffn": int(config["d_ff"]), "head_dim": int(config["d_kv"]), "gated": gated, "tied": _tied(config, True), "context": 512,
        "layers": int(config.get("num_decoder_layers") or config["num_layers"]), "encoder_layers": int(config["num_layers"]),
        "relative_buckets": int(config.get("relative_attention_num_buckets") or 0),
    }  # fmt: skip


def _vit(config: Config) -> dict[str, Any]:
    vision = Vision(int(config.get("image_size") or 224), int(config.get("patch_size") or 16), int(config.get("num_channels") or 3))
    tokens = vision.patches + 1
    found = _biased(int(config["hidden_size"]), config.get("intermediate_size"), vision=vision, positions=tokens, context=tokens)
    return found | {"causal": False, "pooler": True, "tied": False, "qkv_bias": bool(config.get("qkv_bias", True))}


def _mpt(config: Config) -> dict[str, Any]:
    hidden, bias = int(config["d_model"]), not config.get("no_bias", True)
    found = _biased(hidden, int(config.get("expansion_ratio") or 4) * hidden, tied=_tied(config, True))
    return found | {"norm": "layernorm" if bias else "rms", "qkv_bias": bias, "output_bias": bias, "mlp_bias": bias}


def _llama4(config: Config) -> dict[str, Any]:
    mixture = _routed(config, shared=1, every=int(config.get("interleave_moe_layer_step") or 1))
    return _decoder(config, mixture=mixture, ffn=int(config.get("intermediate_size_mlp") or config["intermediate_size"]), window=None)


def _gpt_oss(config: Config) -> dict[str, Any]:
    mixture = _routed(config, router_bias=True)
    biases = {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "sinks": True}
    kinds = config.get("layer_types") or []
    windowed = sum(kind == "sliding_attention" for kind in kinds) / len(kinds) if kinds else 0.5
    return _decoder(config, mixture=mixture, ffn=0, **biases) | {"windowed": windowed}


def _dbrx(config: Config) -> dict[str, Any]:
    ffn, attention = config["ffn_config"], config["attn_config"]
    mixture = Mixture(int(ffn["moe_num_experts"]), int(ffn["moe_top_k"]), int(ffn["ffn_hidden_size"]))
    return {"mixture": mixture, "kv_heads": int(attention["kv_n_heads"]), "tied": _tied(config, False), "context": 4096}


def _plain_mlp(config: Config) -> dict[str, Any]:
    return _decoder(config, gated=False, norm="layernorm")


_TYPES: dict[str, Callable[[Config], dict[str, Any]]] = {
    "llama": _decoder,
    "granite": _decoder,
    "mistral": _decoder,
    "phi3": _decoder,
    "qwen2": lambda config: _decoder(config, qkv_bias=True),
    "qwen3": lambda config: _decoder(config, qk_norm="head"),
    "olmo2": lambda config: _decoder(config, qk_norm="full"),
    "gemma": lambda config: _decoder(config, tied=True),
    "gemma2": lambda config: _decoder(config, tied=True, norms_per_layer=4),
    "gemma3_text": lambda config: _decoder(config, tied=True, norms_per_layer=4, qk_norm="head"),
    "cohere": lambda config: _decoder(config, tied=True, norms_per_layer=1),
    "nemotron": _plain_mlp,
    "mixtral": lambda config: _decoder(config, mixture=_routed(config), ffn=0),
    "olmoe": lambda config: _decoder(config, mixture=_routed(config), ffn=0, qk_norm="full"),
    "qwen2_moe": lambda config: _qwen_moe(config, qkv_bias=bool(config.get("qkv_bias", True))),
    "qwen3_moe": lambda config: _qwen_moe(config, qk_norm="head"),
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
    "llama4_text": _llama4,
    "gpt_oss": _gpt_oss,
    "dbrx": _dbrx,
    "gpt2": _gpt2,
    "gpt_neox": _neox,
    "gptj": _gptj,
    "bloom": _bloom,
    "opt": _opt,
    "falcon": _falcon,
    "mpt": _mpt,
    "bert": _bert,
    "t5": _t5,
    "vit": _vit,
}
