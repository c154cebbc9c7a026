"""Seeding and memory lines where DeepSpeed scripts import them from."""

from __future__ import annotations

from ..engine.progress import see_memory_usage
from ..engine.seeding import set_random_seed

__all__ = ["see_memory_usage", "set_random_seed"]
