"""What travels between ranks: how much each strategy sends, over which axis, and when it can hide behind compute."""

from .bounds import minimum_block_tokens, minimum_sequence_tokens, mixed_minimum_batch, optimal_fsdp, tensor_parallel_limit
from .collectives import KINDS, bus_factor, collective_seconds, moved_share
from .volumes import (
    causal_pairs,
    context_parallel_elements,
    data_parallel_bytes,
    expert_bytes,
    pipeline_elements,
    ring_bytes,
    strategy_factor,
    tensor_parallel_bytes,
)

__all__ = [
    "KINDS",
    "bus_factor",
    "causal_pairs",
    "collective_seconds",
    "context_parallel_elements",
    "data_parallel_bytes",
    "expert_bytes",
    "minimum_block_tokens",
    "minimum_sequence_tokens",
    "mixed_minimum_batch",
    "moved_share",
    "optimal_fsdp",
    "pipeline_elements",
    "ring_bytes",
    "strategy_factor",
    "tensor_parallel_bytes",
    "tensor_parallel_limit",
]
