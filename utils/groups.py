"""Groups of ranks under DeepSpeed's names, derived from the default process group: all ranks are data-parallel in this version."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..errors import RankError

_FIRST = "no process group exists: call stateroom.init_distributed() or stateroom.initialize() first"


def get_data_parallel_group() -> Any:
    """Return the group over which gradients are averaged.

    Raises:
        RankError: there is no process group yet.
    """
    if not dist.is_initialized():
        raise RankError(_FIRST)
    return dist.group.WORLD


def get_data_parallel_rank() -> int:
    """Return this rank's number in the data-parallel group."""
    return dist.get_rank(get_data_parallel_group())


def get_data_parallel_world_size() -> int:
    """Return the number of data-parallel ranks."""
    return dist.get_world_size(get_data_parallel_group())


def get_model_parallel_world_size() -> int:
    """Return 1: no rank shares a matrix with another."""
    return 1


def get_model_parallel_rank() -> int:
    """Return 0, the only rank that holds this rank's matrices."""
    return 0


def get_tensor_model_parallel_src_rank() -> int:
    """Return the global rank that starts this rank's tensor-parallel group: itself."""
    return dist.get_rank(get_data_parallel_group())


# the spellings that scripts use for the same three, private ones included
_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_rank = get_data_parallel_rank
_get_data_parallel_world_size = get_data_parallel_world_size
get_tensor_model_parallel_world_size = get_model_parallel_world_size
_get_model_parallel_world_size = get_model_parallel_world_size
_get_sequence_parallel_world_size = get_model_parallel_world_size
get_tensor_model_parallel_rank = get_model_parallel_rank
_get_sequence_parallel_rank = get_model_parallel_rank


def __getattr__(name: str) -> Any:
    if name in ("get_model_parallel_group", "get_tensor_model_parallel_group"):
        raise AttributeError(f"stateroom.utils.groups.{name}: there is no model-parallel group in this version; its size is 1")
    raise AttributeError(f"stateroom.utils.groups has no {name!r}: it offers data-parallel and model-parallel group, rank and size")
