"""Bytes on a rank: states, activations, what else there is, and their course over a step."""

from .activations import FORMS, activation_ratio, core_factor, embedding_activations, layer_activations, model_activations, tensor_bytes
from .deepspeed import deepspeed_zero2, deepspeed_zero3
from .megatron import megatron_activation_bytes, megatron_weight_bytes
from .states import StateSizes, mixed_precision, state_bytes, zero_states

__all__ = [
    "FORMS",
    "StateSizes",
    "activation_ratio",
    "core_factor",
    "deepspeed_zero2",
    "deepspeed_zero3",
    "embedding_activations",
    "layer_activations",
    "megatron_activation_bytes",
    "megatron_weight_bytes",
    "mixed_precision",
    "model_activations",
    "state_bytes",
    "tensor_bytes",
    "zero_states",
]
