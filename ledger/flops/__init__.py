"""Floating-point operations of training: by layer kind from the shape, and by the closed forms that papers use."""

from .layers import StepFlops, forward_flops, step_flops, training_flops_per_token
from .published import (
    dense_flops_per_token,
    dgxc_attention,
    dgxc_embedding,
    dgxc_mlp,
    narayanan_flops,
    six_n_d,
    training_days,
    training_seconds,
)
from .utilisation import hfu_from_mfu, mfu_from_hfu, model_share_of_hardware, utilisation

__all__ = [
    "StepFlops",
    "dense_flops_per_token",
    "dgxc_attention",
    "dgxc_embedding",
    "dgxc_mlp",
    "forward_flops",
    "hfu_from_mfu",
    "mfu_from_hfu",
    "model_share_of_hardware",
    "narayanan_flops",
    "six_n_d",
    "step_flops",
    "training_days",
    "training_flops_per_token",
    "training_seconds",
    "utilisation",
]
