"""The kinds of states that engine.offload_states() moves, where DeepSpeed scripts import them from."""

from __future__ import annotations

from ...zero.tiers.parking import OffloadStateTypeEnum

__all__ = ["OffloadStateTypeEnum"]
