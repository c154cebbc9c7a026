"""The copy of Megatron-LM's estimate against its published form, written out here from the sizes alone."""

from __future__ import annotations

import itertools

import pytest
from stateroom.ledger.memory import megatron_weight_bytes
from stateroom.ledger.problems import LedgerError
from stateroom.ledger.shapes.megatron import shape_from_megatron

BASE = {
    "hidden_size": 2048, "num_attention_heads": 16, "kv_channels": 128, "group_query_attention": True, "num_query_groups": 4,
    "ffn_hidden_size": 5632, "padded_vocab_size": 50304, "seq_length": 4096, "micro_batch_size": 1, "multi_latent_attention": False,
    "tensor_model_parallel_size": 1, "data_parallel_size": 4, "swiglu": True, "normalization": "RMSNorm", "num_layers": 24,
    "pipeline_model_parallel_size": 2, "untie_embeddings_and_output_weights": True, "use_distributed_optimizer": True,
}  # fmt: skip
MIXTURE = {"num_experts": 8, "moe_ffn_hidden_size": 1024, "moe_router_topk": 2, "moe_shared_expert_intermediate_size": 512}


def published(args, pattern):
    """Bytes of the most loaded shard without tensor parallelism: layers over stages, prediction layers, embedding; 18 or 6 + 12/d each."""
    hidden, heads = args["hidden_size"], args["num_attention_heads"]
    norm = 1 if args["normalization"] == "RMSNorm" else 2
    matrices = 1.5 if args["swiglu"] else 1.0
    attention = 2 * hidden * (heads + args["num_query_groups"]) * args["kv_channels"]
    inner = {
        0: args["ffn_hidden_size"] * matrices,
        1: (args.get("moe_ffn_hidden_size", 0) * args.get("num_experts", 0) + args.get("moe_shared_expert_intermediate_size", 0))
        * matrices,
    }
    layer = {kind: attention + 2 * hidden * (inner[kind] + norm) for kind in (0, 1)}
    block = sum(layer[kind] for kind in pattern) + norm * hidden
    table = hidden * args["padded_vocab_size"]
    stages = args["pipeline_model_parallel_size"]
    shard = block / stages + layer[pattern[-1]] * args.get("mtp_num_layers", 0) + table
    if args["untie_embeddings_and_output_weights"] and stages == 1:
        shard += table
    return shard * (6 + 12 / args["data_parallel_size"] if args["use_distributed_optimizer"] else 18)


@pytest.mark.parametrize("change", [
    {}, {"swiglu": False, "normalization": "LayerNorm"}, {"pipeline_model_parallel_size": 1}, {"num_query_groups": 16},
    {"pipeline_model_parallel_size": 1, "untie_embeddings_and_output_weights": False}, {"use_distributed_optimizer": False},
    {"mtp_num_layers": 1}, {"num_layers": 27, "pipeline_model_parallel_size": 3},
])  # fmt: skip
def test_dense_models(change):
    args = {**BASE, **change}
    assert megatron_weight_bytes(args).total == pytest.approx(published(args, [0] * args["num_layers"]), rel=1e-12)


@pytest.mark.parametrize(("every", "layers", "mtp"), list(itertools.product((1, 2, 3), (24, 27), (0, 1))))
def test_mixtures_with_an_integer_pattern(every, layers, mtp):
    """Layers 0, n, 2n … are mixtures, and a prediction layer is of the last layer's kind; routers are counted here, and small."""
    args = {**BASE, **MIXTURE, "moe_layer_freq": every, "num_layers": layers, "mtp_num_layers": mtp, "pipeline_model_parallel_size": 1}
    pattern = [int(index % every == 0) for index in range(layers)]
    found, expected = megatron_weight_bytes(args), published(args, pattern)
    routers = (sum(pattern) + pattern[-1] * mtp) * args["hidden_size"] * args["num_experts"] * 9
    assert found.total == pytest.approx(expected + routers, rel=1e-12)


@pytest.mark.parametrize("pattern", [[0, 0, 0, 1, 1, 1], [0, 1, 0, 1, 0, 1], [1, 0, 0, 1, 0, 0], [0, 1, 0, 0, 1, 0]])
def test_patterns_as_lists(pattern):
    shape = shape_from_megatron({**BASE, **MIXTURE, "num_layers": 6, "moe_layer_freq": pattern})
    assert [int(shape.is_mixture(index)) for index in range(6)] == pattern


def test_a_pattern_without_order_is_refused():
    with pytest.raises(LedgerError, match="dense layers first"):
        shape_from_megatron({**BASE, **MIXTURE, "num_layers": 6, "moe_layer_freq": [1, 1, 0, 1, 0, 1]})
    with pytest.raises(LedgerError, match="at least 1"):
        shape_from_megatron({**BASE, **MIXTURE, "num_layers": 6, "moe_layer_freq": 0})
