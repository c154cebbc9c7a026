"""The device mesh: ranks as a grid with named axes, from the config's `mesh` section."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..errors import ConfigError, RankError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def axis_sizes(mesh_section: Any, world_size: int) -> dict[str, int]:
    """Return the size of each axis; dp_shard takes what the others leave.

    Raises:
        ConfigError: the axes do not multiply to the number of ranks.
    """
    sizes = {axis: int(getattr(mesh_section, axis, None) or 1) for axis in AXES}
    asked_shard = getattr(mesh_section, "dp_shard", None)
    others = 1
    for axis in AXES:
        if axis != "dp_shard":
            others *= sizes[axis]
    if world_size % others:
        wanted = ", ".join(f"{axis} {sizes[axis]}" for axis in AXES if axis != "dp_shard")
        raise ConfigError(f"mesh: {wanted} multiply to {others}, which does not divide the {world_size} ranks")
    sizes["dp_shard"] = world_size // others
    if asked_shard not in (None, -1, 1, "auto") and asked_shard != sizes["dp_shard"]:
        raise ConfigError(f"mesh.dp_shard is {asked_shard}, but {world_size} ranks leave {sizes['dp_shard']} for it")
    return sizes


def build_mesh(device_kind: str, sizes: dict[str, int]) -> DeviceMesh:
    """Return the mesh over all ranks.

    Raises:
        RankError: no process group exists.
    """
    if not dist.is_initialized():
        raise RankError("the mesh needs a process group: call stateroom.init_distributed() first")
    return init_device_mesh(device_kind, tuple(sizes[axis] for axis in AXES), mesh_dim_names=AXES)
