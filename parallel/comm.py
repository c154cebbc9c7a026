"""`stateroom.comm`: the names of torch.distributed, for scripts that import them from the engine's package."""

from __future__ import annotations

from typing import Any

import torch.distributed as _dist

from ..environment import read_launch
from .distributed import init_distributed

__all__ = ["get_local_rank", "get_world_group", "init_distributed", "is_available", "is_initialized"]


def get_local_rank() -> int:
    """Return this process's number on its host (0 without a launcher)."""
    launch = read_launch()
    return 0 if launch is None else launch.local_rank


def get_world_group() -> Any:
    """Return the default process group."""
    return _dist.group.WORLD


def is_initialized() -> bool:
    """Return whether a default process group exists."""
    return _dist.is_initialized()


def is_available() -> bool:
    """Return whether torch was built with distributed support."""
    return _dist.is_available()


def get_rank(group: Any = None) -> int:
    """Return this process's rank (0 without a process group)."""
    return _dist.get_rank(group) if _dist.is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    """Return the number of ranks (1 without a process group)."""
    return _dist.get_world_size(group) if _dist.is_initialized() else 1


def __getattr__(name: str) -> Any:
    try:
        return getattr(_dist, name)
    except AttributeError:
        raise AttributeError(f"stateroom.comm has no {name!r}: it offers torch.distributed's names") from None
