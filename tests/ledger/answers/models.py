"""Parameters and FLOPs: kinds `params` and `flops`."""

from __future__ import annotations

import re
from typing import Any

from stateroom.ledger.derive import derive
from stateroom.ledger.flops import (
    dense_flops_per_token,
    dgxc_attention,
    dgxc_embedding,
    dgxc_mlp,
    forward_flops,
    narayanan_flops,
    six_n_d,
    training_days,
    training_flops_per_token,
    training_seconds,
)
from stateroom.ledger.shapes import (
    Latent,
    Mixture,
    ModelShape,
    active_from_total,
    blocks,
    count_parameters,
    layer_parameters,
    narayanan_parameters,
    read_shape,
)
from stateroom.ledger.shapes.megatron import shape_from_megatron

from .case import Case, Unanswered, flop_scale, in_seconds, is_flop, is_seconds, leading_number


def shape_of(case: Case) -> ModelShape:
    """Return the shape that a case's sizes describe.

    A case names either a gated MLP (or RMS norm, experts, latent attention) or a plain GPT: biases and layer norms.
    """
    i = case.inputs
    if "vocab" not in i and "model" in i:
        return read_shape(str(i["model"]))
    hidden, heads = int(i["hidden"]), int(i.get("heads") or max(1, i["hidden"] // 128))
    mixture, latent = _mixture(i), _latent(i)
    modern = bool(i.get("gated_mlp", i.get("gated", i.get("swiglu", False)))) or i.get("norm") in ("rms", "rmsnorm") or mixture or latent
    plain = {"qkv_bias": True, "output_bias": True, "mlp_bias": True} if i.get("bias", not modern) else {}
    width = i.get("embed_dim", i.get("word_embed_dim"))
    return ModelShape(
        "case", int(i["vocab"]), hidden, int(i["layers"]), heads,
        int(i.get("ffn") or i.get("dense_ffn") or (0 if mixture and not i.get("dense_layers") else 4 * hidden)),
        kv_heads=i.get("kv_heads"), head_dim=i.get("head_dim") or (None if hidden % heads == 0 or latent else hidden // heads),
        gated=bool(i.get("gated_mlp", i.get("gated", i.get("swiglu", bool(modern))))),
        norm="rms" if i.get("norm", "rms" if modern else "layernorm") in ("rms", "rmsnorm") else "layernorm",
        norms_per_layer=int(i.get("norms_per_layer",
            4 if i.get("post_norms") or i.get("sandwich_norm") else 1 if i.get("parallel") else 2)),
        tied=bool(i.get("tied", not modern)), qk_norm="head" if i.get("qk_norm") else "none",
        positions=int(i.get("positions") or 0) + int(i.get("position_offset") or 0),
        token_types=int(i.get("token_types") or i.get("type_vocab") or 0), pooler=bool(i.get("pooler")),
        embedding_norm=bool(i.get("embed_layernorm") or i.get("embedding_norm")),
        embedding_width=None if width in (None, hidden) else int(width), final_norm=bool(i.get("final_norm", True)),
        mixture=mixture, latent=latent, mtp=int(i.get("mtp") or 0), window=i.get("window"),
        **{**plain, **{key: bool(i[key]) for key in ("qkv_bias", "output_bias", "mlp_bias") if key in i}},
    )  # fmt: skip


def _mixture(i: dict[str, Any]) -> Mixture | None:
    experts = i.get("experts") or i.get("routed_experts") or i.get("num_experts")
    if not experts:
        return None
    shared = int(i.get("shared_experts") or (1 if i.get("shared_ffn") else 0))
    return Mixture(
        int(experts), int(i.get("top_k") or 1), int(i.get("moe_ffn") or i.get("ffn")), shared=shared, shared_ffn=i.get("shared_ffn"),
        dense_layers=int(i.get("dense_layers") or 0), every=int(i.get("moe_every") or 1), gated_shared=bool(i.get("shared_gate")),
    )  # fmt: skip


def _latent(i: dict[str, Any]) -> Latent | None:
    if i.get("attention") != "mla" and "kv_lora_rank" not in i:
        return None
    return Latent(int(i["kv_lora_rank"]), i.get("q_lora_rank"), int(i["qk_nope"]), int(i["qk_rope"]), int(i["v_head_dim"]))


def answer_params(case: Case) -> float:
    scale = leading_number(case.unit)
    if case.has("total", "routed"):
        return active_from_total(case["total"], case["routed"], case["experts"], case["top_k"]) / scale
    if case.has("num_layers", "hidden_size"):
        return count_parameters(shape_from_megatron(case.inputs), active="active" in case.words).total / scale
    if case.has("hidden") and not case.has("vocab"):  # one layer
        given = Case(case.id, case.kind, {"vocab": 1, "layers": 1, **case.inputs}, 0, "", 0)
        return layer_parameters(shape_of(given)) / scale
    if case.has("vocab", "hidden") and not case.has("layers"):
        return case["vocab"] * case["hidden"] * (1 if case.get("tied", True) else 2) / scale
    if not case.has("hidden") and not case.has("model"):
        raise Unanswered("params")
    if case.has("seq", "layers", "vocab") and not case.has("positions", "ffn"):
        return narayanan_parameters(case["layers"], case["hidden"], case["vocab"], case["seq"]) / scale
    shape = shape_of(case)
    if "layer" in case.words:
        return layer_parameters(shape) / scale
    if "embedding" in case.words:
        return next(block for block in blocks(shape) if block.role == "embedding").numel / scale
    left_out = case.first("without_embedding", "exclude_embedding", "non_embedding", default=bool({"nonembedding", "nonemb"} & case.words))
    counted = count_parameters(shape, active="active" in case.words, embeddings="none" if left_out else "all")
    return counted.total / scale


def answer_flops(case: Case) -> float:
    if is_seconds(case.unit):
        return _time(case) / in_seconds(case.unit)
    if case.has("params", "tokens") and case.unit.lower().startswith("tokens"):
        return case["tokens"] / case["params"]
    if not is_flop(case.unit):
        raise Unanswered("flops")
    scale = flop_scale(case.unit)
    for ask in (_megatron, _terms, _model, _sizes):
        found = ask(case)
        if found is not None:
            return found / scale
    raise Unanswered("flops")


def _time(case: Case) -> float:
    i = case.inputs
    if case.has("params", "tokens") and case.first("tflops", "tflops_per_gpu") is not None:
        passes = i.get("factor") or _digit_before(case.formula, "TP|PT|NT|ND") or 8
        days = training_days(
            i["params"], i["tokens"], case.first("gpus", "chips", default=1), case.first("tflops", "tflops_per_gpu") * 1e12, passes
        )
        return days * 86400
    if case.has("flops_per_token", "tokens"):
        work = i["flops_per_token"] * i["tokens"]
    elif case.has("flops"):
        work = i["flops"]
    elif case.has("params", "tokens"):
        work = six_n_d(i["params"], i["tokens"], i.get("factor", 6))
    else:
        raise Unanswered("time of FLOPs")
    rate = i["peak"] if "peak" in i else case.first("peak_tflops", "tflops") * 1e12
    share = i.get("mfu", i.get("utilization", 1.0))
    return training_seconds(work, rate, case.first("gpus", "chips", "devices", default=1), share / 100 if share > 1 else share)


def _digit_before(text: str, symbols: str) -> float | None:
    found = re.search(rf"(\d+)\s*\*?\s*(?:{symbols})", text.replace(" ", ""))
    return float(found[1]) if found else None


def _megatron(case: Case) -> float | None:
    if not case.has("num_layers", "hidden_size"):
        return None
    shape = shape_from_megatron(case.inputs)
    per_token = training_flops_per_token(shape, int(case["seq_length"]), router=False)
    if "token" in unit_tail(case.unit):
        return per_token
    return per_token * case["seq_length"] * case.get("global_batch_size", 1)


def unit_tail(unit: str) -> str:
    """Return what a unit is counted per: `FLOP/sequence` is per sequence."""
    return re.split(r"[\s(]", unit.split("/", 1)[1])[0].lower() if "/" in unit else ""


def _terms(case: Case) -> float | None:
    """NVIDIA's dgxc-benchmarking prints a model's FLOPs as three terms per token, and their sum times s."""
    i = case.inputs
    if case.has("attn", "mlp"):
        total = i["attn"] + i["mlp"] + i.get("emb", 0)
        return total * i.get("seq", 1) if "token" not in unit_tail(case.unit) else total
    if case.has("layers", "hidden", "ffn") and not case.has("vocab") and not case.has("heads"):
        gated = i.get("gated", i.get("swiglu", not case.formula_has("12 L h f")))
        return dgxc_mlp(i["layers"], i["hidden"], i["ffn"], gated=gated, top_k=i.get("top_k", 1))
    if case.has("layers", "hidden", "heads", "kv_heads", "seq") and not case.has("vocab"):
        counting = "full" if i.get("full_square", not i.get("causal", False)) else "causal"
        return dgxc_attention(i["layers"], i["hidden"], i["heads"], i["kv_heads"], i["seq"], counting)
    if case.has("vocab", "hidden") and not case.has("layers"):
        return dgxc_embedding(i["vocab"], i["hidden"])
    return None


def _model(case: Case) -> float | None:
    """Forms in N: 6 N D, PaLM's 6 N + 12 L a d s, and the same with an embedding left out or attention halved."""
    i = case.inputs
    count = case.first("active", "params")
    if count is None:
        return None
    if case.has("qk", "heads", "layers"):
        per_token = dense_flops_per_token(
            count, embedding=case.first("input_embedding", "embedding", default=0.0), layers=i["layers"], width=i["heads"] * i["qk"],
            value_width=i["heads"] * i.get("v", i["qk"]), seq=i["seq"], attention="causal" if i.get("causal") else "full",
        )  # fmt: skip
    elif case.has("layers", "seq"):
        width = i["heads"] * i["head_dim"] if case.has("heads", "head_dim") else i["hidden"]
        per_token = dense_flops_per_token(
            count, embedding=case.first("emb", "embedding", "input_embedding", default=0.0), layers=i["layers"], width=width, seq=i["seq"],
            attention="causal" if i.get("causal") else "full",
        )  # fmt: skip
    else:
        passes = i.get("factor") or (8 if i.get("recompute") == "full" else 6)
        per_token = six_n_d(count, 1, passes)
        if "tokens" in i:
            return per_token * i["tokens"]
    if "tokens" in i and "token" not in unit_tail(case.unit):
        return per_token * i["tokens"]
    return per_token * i["seq"] if "sequence" in unit_tail(case.unit) or "sample" in unit_tail(case.unit) else per_token


def _sizes(case: Case) -> float | None:
    """Forms in sizes: Narayanan's and Korthikanti's closed forms, and the forward by layer kind."""
    i = case.inputs
    if case.has("flops"):
        return i["flops"]
    if not case.has("layers", "hidden", "seq", "vocab"):
        return derive("run_flops", {key: value for key, value in i.items() if isinstance(value, (int, float))}).value
    if case.has("batch") or case.has("tokens") or case.has("recompute"):
        batch = i["tokens"] / i["seq"] if "tokens" in i else i.get("batch", 1)
        return narayanan_flops(batch, i["layers"], i["hidden"], i["seq"], i["vocab"], i.get("recompute") or "none")
    shape = shape_of(Case(case.id, case.kind, {"bias": False, "tied": True, "norm": "layernorm", **i}, 0, "", 0))
    forward = forward_flops(shape, i["seq"], attention="causal" if i.get("causal") else "full")
    return forward.total * (3 if {"train", "training", "fwdbwd"} & case.words else 1)
