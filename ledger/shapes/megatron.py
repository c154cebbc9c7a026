"""Reads the sizes that Megatron-LM's command line names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..problems import LedgerError
from .shape import Latent, Mixture, ModelShape

Arguments = Mapping[str, Any]


def shape_from_megatron(args: Arguments, name: str = "megatron") -> ModelShape:
    """Return the shape that Megatron's arguments (underscored names) describe.

    Raises:
        LedgerError: a size is missing, or the pattern of mixture layers is not dense layers first, then every nth.
    """
    needed = ["num_layers", "hidden_size", "num_attention_heads", "padded_vocab_size"]
    needed += ["num_query_groups"] if args.get("group_query_attention") else []
    needed += ["kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"] if args.get("multi_latent_attention") else []
    missing = [key for key in needed if args.get(key) is None]
    if missing:
        raise LedgerError(f"Megatron's arguments lack {', '.join(missing)}")
    hidden, heads, layers = int(args["hidden_size"]), int(args["num_attention_heads"]), int(args["num_layers"])
    bias = bool(args.get("add_bias_linear", True))
    grouped = bool(args.get("group_query_attention"))
    return ModelShape(
        name,
        int(args["padded_vocab_size"]),
        hidden,
        layers,
        heads,
        int(args.get("ffn_hidden_size") or 4 * hidden),
        kv_heads=int(args["num_query_groups"]) if grouped else heads,
        head_dim=int(args.get("kv_channels") or hidden // heads),
        gated=bool(args.get("swiglu")),
        norm="rms" if args.get("normalization") == "RMSNorm" else "layernorm",
        tied=not args.get("untie_embeddings_and_output_weights"),
        qkv_bias=bias or bool(args.get("add_qkv_bias")),
        output_bias=bias,
        mlp_bias=bias,
        qk_norm="head" if args.get("qk_layernorm") and not args.get("multi_latent_attention") else "none",
        mixture=_mixture(args, layers),
        latent=_latent(args) if args.get("multi_latent_attention") else None,
        mtp=int(args.get("mtp_num_layers") or 0),
        context=int(args.get("seq_length") or 2048),
        source="Megatron-LM arguments",
    )


def _latent(args: Arguments) -> Latent:
    rank = args.get("q_lora_rank")
    return Latent(
        int(args["kv_lora_rank"]), None if rank is None else int(rank), int(args["qk_head_dim"]), int(args["qk_pos_emb_head_dim"]),
        int(args["v_head_dim"]),
    )  # fmt: skip


def _mixture(args: Arguments, layers: int) -> Mixture | None:
    if not args.get("num_experts"):
        return None
    dense, every, leads = _pattern(args.get("moe_layer_freq", 1), layers)
    shared = int(args.get("moe_shared_expert_intermediate_size") or 0)
    return Mixture(
        int(args["num_experts"]), int(args.get("moe_router_topk") or 1), int(args.get("moe_ffn_hidden_size") or args["ffn_hidden_size"]),
        shared=1 if shared else 0, shared_ffn=shared or None, dense_layers=dense, every=every, leads=leads,
        gated_shared=bool(args.get("moe_shared_expert_gate")),
    )  # fmt: skip


def _pattern(frequency: int | list[int], layers: int) -> tuple[int, int, bool]:
    """Return (dense layers first, one mixture in so many after them, whether it is the first of those).

    Megatron's integer n makes layers 0, n, 2n … mixtures.
    """
    if isinstance(frequency, int):
        if frequency < 1:
            raise LedgerError(f"moe_layer_freq is {frequency}; it must be at least 1")
        return 0, frequency, frequency > 1
    pattern = [int(each) for each in frequency]
    if len(pattern) != layers:
        raise LedgerError(f"moe_layer_freq has {len(pattern)} entries for {layers} layers")
    if 1 not in pattern:
        raise LedgerError("moe_layer_freq marks no layer as a mixture")
    first = pattern.index(1)
    for every in range(1, layers + 1):
        for dense in range(max(0, first - every + 1), first + 1):
            if [int(i >= dense and (i - dense) % every == every - 1) for i in range(layers)] == pattern:
                return dense, every, False
        if [int(i >= first and (i - first) % every == 0) for i in range(layers)] == pattern:
            return first, every, True
    raise LedgerError(f"moe_layer_freq {frequency} is not dense layers first and then every nth a mixture")
