"""Groups of ranks under DeepSpeed's names: those of the newest pipelined engine, or all ranks as copies of one model.

"Model parallel" means the ranks that hold one copy of the model, its stages, as in DeepSpeed's grid; ranks that share
matrices ("tensor model parallel") do not exist in this version. What an engine without stages says is the same for all.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..errors import RankError
from ..pipe.standing import grid_here
from ..pipe.topology import Grid, PipelineParallelGrid

_FIRST = "no process group exists: call stateroom.init_distributed() or stateroom.initialize() first"


def _grid() -> PipelineParallelGrid:
    """Return where this process stands.

    Raises:
        RankError: there is no process group yet.
    """
    if not dist.is_initialized():
        raise RankError(_FIRST)
    return grid_here() or Grid([range(dist.get_world_size())]).seen_from(dist.get_rank(), dist.group.WORLD)


# ---- ranks that average gradients


def get_data_parallel_group() -> Any:
    """Return the group over which gradients are averaged: the ranks that hold the same part of the model.

    Raises:
        RankError: there is no process group yet.
    """
    return _grid().get_data_parallel_group()


def get_data_parallel_rank() -> int:
    """Return this rank's number in the data-parallel group: which copy of the model it is in."""
    return _grid().get_data_parallel_rank()


def get_data_parallel_world_size() -> int:
    """Return the number of data-parallel ranks: of copies of the model."""
    return _grid().get_data_parallel_world_size()


def _get_data_parallel_group_ranks() -> list[int]:
    return _grid().get_data_parallel_group_ranks()


def _get_broadcast_src_rank() -> int:
    return _grid().get_data_parallel_group_ranks()[0]


# ---- ranks that hold one copy of the model


def get_model_parallel_rank() -> int:
    """Return this rank's number among those that hold one copy of the model: its stage."""
    return _grid().get_model_parallel_rank()


def get_model_parallel_world_size() -> int:
    """Return the number of ranks that hold one copy of the model: of stages."""
    return _grid().get_model_parallel_world_size() if dist.is_initialized() else 1


def get_pipe_parallel_rank() -> int:
    """Return this rank's stage; 0 without stages."""
    return _grid().get_pipe_parallel_rank()


def get_pipe_parallel_world_size() -> int:
    """Return the number of stages; 1 without stages."""
    return _grid().get_pipe_parallel_world_size()


def _chain_group() -> Any:
    """Return the group of the stages of this rank's copy of the model."""
    return _grid().get_pipe_parallel_group()


# ---- ranks that share matrices


def get_tensor_model_parallel_world_size() -> int:
    """Return 1: no rank shares a matrix with another."""
    return 1


def get_tensor_model_parallel_rank() -> int:
    """Return 0, the only rank that holds this rank's matrices."""
    return 0


def get_tensor_model_parallel_src_rank() -> int:
    """Return the global rank that starts this rank's tensor-parallel group: itself."""
    return _grid().get_global_rank()


# the spellings that scripts use for the same, private ones included
_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_rank = get_data_parallel_rank
_get_data_parallel_world_size = get_data_parallel_world_size
_get_sequence_data_parallel_group = get_data_parallel_group
_get_sequence_data_parallel_rank = get_data_parallel_rank
_get_sequence_data_parallel_world_size = get_data_parallel_world_size
_get_model_parallel_world_size = get_model_parallel_world_size
get_pipeline_model_parallel_rank = get_pipe_parallel_rank
get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
_get_sequence_parallel_world_size = get_tensor_model_parallel_world_size
_get_sequence_parallel_rank = get_tensor_model_parallel_rank


def __getattr__(name: str) -> Any:
    if name in ("get_model_parallel_group", "get_pipe_parallel_group"):
        if get_model_parallel_world_size() > 1:
            return _chain_group
        raise AttributeError(f"stateroom.utils.groups.{name}: there is no model-parallel group without pipeline stages; its size is 1")
    if name == "get_tensor_model_parallel_group":
        raise AttributeError(f"stateroom.utils.groups.{name}: no ranks share matrices in this version; the group's size is 1")
    raise AttributeError(
        f"stateroom.utils.groups has no {name!r}: it offers group, rank and size of data-, model-, pipe- and tensor-parallel ranks"
    )
