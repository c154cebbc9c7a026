"""Language models of the transformers library, made small by their configs and trained from random weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from case import Call, Case, generator, one_loss
from torch import nn

CASES: list[Case] = []
V, T, B = 33, 6, 2


def tokens(step: int, rank: int) -> torch.Tensor:
    """Return ids [B, T] without the special ones."""
    return torch.randint(3, V, (B, T), generator=generator(step, rank))


def build(model: str, config: str, after: Callable[[nn.Module], Any] | None, options: dict[str, Any]) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    made = getattr(transformers, model)(getattr(transformers, config)(**options, attn_implementation="eager"))
    if after is not None:
        after(made)
    return made


def token_loss(call: Call, step: int, rank: int) -> torch.Tensor:
    ids = tokens(step, rank)
    return call(input_ids=ids, labels=ids).loss


def text(name: str, about: str, model: str, config: str, *, after: Any = None, row: dict[str, Any] | None = None, **options: Any) -> None:
    """Add a model that computes the loss of its labels itself."""
    made = partial(build, model, config, after, options)
    CASES.append(Case(name, about, made, one_loss(token_loss), **(row or {})))


def quiet(*names: str) -> dict[str, float]:
    return dict.fromkeys(names, 0.0)


TINY = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TINY["max_position_embeddings"] = 40
GROUPED = {**TINY, "num_key_value_heads": 1}
HEADS = {**GROUPED, "head_dim": 8}
ENCODER = {**TINY, **quiet("hidden_dropout_prob", "attention_probs_dropout_prob")}
GPT = {"vocab_size": V, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, **quiet("resid_pdrop", "embd_pdrop", "attn_pdrop")}
T5 = {
    "vocab_size": V,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
SEQ = {"vocab_size": V, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
SEQ |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32}
SEQ |= quiet("dropout", "attention_dropout", "activation_dropout")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}

text("BERT", "encoder, masked language model", "BertForMaskedLM", "BertConfig", **ENCODER)
text("RoBERTa", "encoder with positions after the padding", "RobertaForMaskedLM", "RobertaConfig", **ENCODER)
text("ALBERT", "one layer used for all", "AlbertForMaskedLM", "AlbertConfig", **ENCODER, embedding_size=8)
text(
    "DistilBERT",
    "half the layers",
    "DistilBertForMaskedLM",
    "DistilBertConfig",
    **{"vocab_size": V, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, **quiet("dropout", "attention_dropout")},
)
text(
    "DeBERTa",
    "relative positions in attention",
    "DebertaV2ForMaskedLM",
    "DebertaV2Config",
    **ENCODER,
    relative_attention=True,
    pos_att_type=["p2c", "c2p"],
    max_relative_positions=8,
    position_buckets=4,
)
text("ELECTRA", "narrow embeddings and a projection", "ElectraForMaskedLM", "ElectraConfig", **ENCODER, embedding_size=8)
text("ModernBERT", "rotary positions, local and global layers", "ModernBertForMaskedLM", "ModernBertConfig", **TINY, pad_token_id=0)
text("GPT-2", "decoder with a tied head", "GPT2LMHeadModel", "GPT2Config", **GPT)
text("GPT-J", "parallel attention and MLP", "GPTJForCausalLM", "GPTJConfig", **GPT, rotary_dim=4)
text("GPT-NeoX", "decoder with fused attention weights", "GPTNeoXForCausalLM", "GPTNeoXConfig", **TINY)
text("Llama", "decoder with grouped heads", "LlamaForCausalLM", "LlamaConfig", **GROUPED)
text(
    "Llama recomputed",
    "gradient_checkpointing_enable()",
    "LlamaForCausalLM",
    "LlamaConfig",
    after=lambda model: model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False}),
    **GROUPED,
)
text(
    "GPT-2 recomputed, reentrant",
    "gradient_checkpointing_enable() in the older mode",
    "GPT2LMHeadModel",
    "GPT2Config",
    after=lambda model: (
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True}),
        model.enable_input_require_grads(),
    ),
    **GPT,
)
text("Mistral", "sliding window", "MistralForCausalLM", "MistralConfig", **GROUPED, sliding_window=4)
text("Qwen2", "biases on queries, keys and values", "Qwen2ForCausalLM", "Qwen2Config", **GROUPED)
text("Qwen3", "norms on queries and keys", "Qwen3ForCausalLM", "Qwen3Config", **HEADS)
text("Gemma 2", "tied head, soft caps", "Gemma2ForCausalLM", "Gemma2Config", **HEADS)
text("Phi", "parallel block with biases", "PhiForCausalLM", "PhiConfig", **TINY, **quiet("resid_pdrop", "embd_pdrop"))
text(
    "Falcon",
    "one key-value head",
    "FalconForCausalLM",
    "FalconConfig",
    vocab_size=V,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
)
text(
    "OPT",
    "projections in and out of the embedding",
    "OPTForCausalLM",
    "OPTConfig",
    **{k: v for k, v in TINY.items() if k != "intermediate_size"},
    ffn_dim=32,
    word_embed_proj_dim=8,
    dropout=0.0,
)
text(
    "Bloom",
    "ALiBi positions",
    "BloomForCausalLM",
    "BloomConfig",
    **{"vocab_size": V, "hidden_size": 16, "n_layer": 2, "n_head": 2, **quiet("hidden_dropout", "attention_dropout")},
)
text(
    "Mixtral",
    "mixture of experts with a router loss",
    "MixtralForCausalLM",
    "MixtralConfig",
    **GROUPED,
    num_local_experts=4,
    num_experts_per_tok=1,
    output_router_logits=True,
)
text("Qwen3-MoE", "many small experts", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", **HEADS, **EXPERTS, output_router_logits=True)
text(
    "DeepSeek-V3",
    "latent attention, shared and routed experts",
    "DeepseekV3ForCausalLM",
    "DeepseekV3Config",
    **{**TINY, "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    **LATENT,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
)
text(
    "Switch",
    "each expert a module of its own, which may get no token on a rank",
    "SwitchTransformersForConditionalGeneration",
    "SwitchTransformersConfig",
    row={"no_bf16": "its router casts its own weight to fp32 in the forward, as Module.to() does; refused at stages 0 to 2"},
    **T5,
    num_decoder_layers=2,
    num_experts=2,
    num_sparse_encoder_layers=1,
    num_sparse_decoder_layers=1,
    expert_capacity=64,
    router_jitter_noise=0.0,
)
text("Mamba", "state-space layers", "MambaForCausalLM", "MambaConfig", vocab_size=V, hidden_size=16, num_hidden_layers=2, state_size=4)
text(
    "RWKV",
    "linear attention with a state and a custom function",
    "RwkvForCausalLM",
    "RwkvConfig",
    **{"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "attention_hidden_size": 16, "intermediate_size": 32},
)
text(
    "Jamba",
    "attention, state-space and expert layers in turn",
    "JambaForCausalLM",
    "JambaConfig",
    **{
        **GROUPED,
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    **{"num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False},
)
text("T5", "encoder and decoder with shared embeddings and positions", "T5ForConditionalGeneration", "T5Config", **T5)
text("BART", "encoder and decoder with one tied embedding", "BartForConditionalGeneration", "BartConfig", **SEQ)
text("Pegasus", "fixed sinusoidal positions", "PegasusForConditionalGeneration", "PegasusConfig", **SEQ)
text(
    "M2M-100 with LayerDrop",
    "layers are skipped at random, others on each rank",
    "M2M100ForConditionalGeneration",
    "M2M100Config",
    row={"refused": {3: "ranks are out of step"}, "cast_first": "a table of positions is added to the hidden states"},
    **SEQ,
    encoder_layerdrop=0.3,
    decoder_layerdrop=0.3,
)
