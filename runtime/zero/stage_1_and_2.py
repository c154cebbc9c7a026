"""Stage 2's memory estimators where DeepSpeed scripts import them from."""

from __future__ import annotations

from ...zero.estimate import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)

__all__ = ["estimate_zero2_model_states_mem_needs_all_cold", "estimate_zero2_model_states_mem_needs_all_live"]
