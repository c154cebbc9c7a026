"""Seeding, memory lines and moving of batches where DeepSpeed scripts import them from."""

from __future__ import annotations

from ..engine.batches import to_device as move_to_device
from ..engine.progress import see_memory_usage
from ..engine.seeding import set_random_seed

__all__ = ["move_to_device", "see_memory_usage", "set_random_seed"]
