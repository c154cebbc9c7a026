"""Megatron-LM's own theoretical estimate, so that its figures and the ledger's can be set side by side.

Its docs: `theoretical_memory_usage.py`. It assumes bf16 with fp32 gradients (18 bytes, or 6 + 12 / d), takes the most loaded
shard to be a pipeline stage with the embedding, and counts activations as s b h (18 + 4 f/h) a layer, which for f = 4h is 34.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..account import Account, account
from ..shapes.megatron import shape_from_megatron
from ..shapes.parts import Block, blocks
from .states import mixed_precision, state_bytes

_SIZES = mixed_precision("bf16", "fp32")


def _degrees(args: Mapping[str, Any]) -> tuple[int, int, int, int, int]:
    tp, pp = int(args.get("tensor_model_parallel_size") or 1), int(args.get("pipeline_model_parallel_size") or 1)
    dp = int(args.get("data_parallel_size") or 1)
    ep = int(args.get("expert_model_parallel_size") or 1)
    etp = int(args.get("expert_tensor_parallel_size") or 1)
    return tp, pp, dp, ep, etp


def megatron_weight_bytes(args: Mapping[str, Any]) -> Account:
    """Return bytes of weights, gradients and optimizer states on the most loaded shard.

    Biases of matrices are not counted, and routers, norms and latent norms are whole on every tensor-parallel rank.
    """
    shape = shape_from_megatron(args)
    tp, pp, dp, ep, etp = _degrees(args)
    world = int(args.get("world_size") or tp * pp * dp)
    expert_dp = world // (etp * ep * pp)
    sharded = bool(args.get("use_distributed_optimizer"))
    cut = whole = experts = 0.0
    for block in blocks(shape):
        if block.role != "layer":
            continue
        stages = 1 if block.name == "prediction layer" else pp
        for name, numel in _counted(block):
            total = block.repeat * numel / stages
            if name == "experts":
                experts += total
            elif name in ("norms", "router", "shared gate"):  # latent norms are counted with the matrices they follow
                whole += total
            else:
                cut += total
    whole += shape.hidden * shape.norm_width / pp
    table = shape.vocab * shape.hidden
    embeddings = table * (2 if pp == 1 and not shape.tied else 1)
    dense_bytes = state_bytes(_SIZES, sharded_optimizer=sharded, world=dp)
    expert_bytes = state_bytes(_SIZES, sharded_optimizer=sharded, world=max(1, expert_dp))
    return account(
        "Megatron-LM's estimate: weights, gradients and optimizer states of the most loaded shard",
        "bytes",
        [
            ("layers", cut / tp * dense_bytes, f"{cut:,.0f} / tp {tp} x {dense_bytes:g}"),
            ("embedding", embeddings / tp * dense_bytes, f"{embeddings:,.0f} / tp {tp} x {dense_bytes:g}"),
            ("whole on every rank", whole * dense_bytes, f"{whole:,.0f} x {dense_bytes:g}"),
            ("experts", experts / (ep * etp) * expert_bytes, f"{experts:,.0f} / (ep {ep} x etp {etp}) x {expert_bytes:g}"),
        ],
        bytes_per_parameter=f"{dense_bytes:g}",
        data_parallel_of_experts=expert_dp,
    )


def _counted(block: Block) -> list[tuple[str, float]]:
    return [
        (part.name, float(part.numel))
        for part in block.parts
        if "bias" not in part.name and not part.name.startswith(("joining", "query and key norms"))
    ]


def megatron_activation_bytes(args: Mapping[str, Any], microbatches: int | None = None, *, sequence_parallel: bool = True) -> Account:
    """Return bytes of activations of the first pipeline stage.

    Args:
        microbatches: of a step; fewer than stages leave less in flight. None: enough.
        sequence_parallel: the estimate with selective recomputation and sequence parallelism; without, s b h (10 + 24/t) a
            layer, and 5 % more at the end.
    """
    tp, pp, _, _, _ = _degrees(args)
    seq, micro, hidden = int(args["seq_length"]), int(args["micro_batch_size"]), int(args["hidden_size"])
    ffn, layers, vocab = int(args.get("ffn_hidden_size") or 4 * hidden), int(args["num_layers"]), int(args["padded_vocab_size"])
    sbh = float(seq * micro * hidden)
    per_layer = sbh * (18 + 4 * ffn / hidden) if sequence_parallel else sbh * (10 + 24 / tp)
    flight = in_flight_factor(pp, args.get("virtual_pipeline_model_parallel_size"), microbatches)
    tail = 1.0 / tp if sequence_parallel else 1.05
    head = 4 * sbh * (1 + vocab / hidden) if sequence_parallel else 2.0 * (seq * micro * vocab / tp + sbh)
    return account(
        "Megatron-LM's estimate: activations of the first stage",
        "bytes",
        [
            ("layers", per_layer * layers * flight * tail, f"{layers} x {per_layer:,.0f} x {flight:g} in flight"),
            ("token numbers", 8.0 * seq * micro * pp * flight * tail, "8 s b p"),
            ("embedding dropout", sbh * pp * flight * tail, "s b h p"),
            ("head and loss", head * tail if pp == 1 else 0.0, "only where one stage does everything"),
        ],
        sequence_parallel=sequence_parallel,
        rounding_up=tail if not sequence_parallel else "none",
    )


def in_flight_factor(pp: int, virtual: int | None, microbatches: int | None = None) -> float:
    """Return micro-batches' worth of activations over pp: 1 + (p - 1) / (p v) when stages are interleaved, less when they are few."""
    if virtual is not None:
        return 1 + (pp - 1) / (pp * virtual)
    if pp > 1 and microbatches is not None:
        return min(1.0, microbatches / pp)
    return 1.0
