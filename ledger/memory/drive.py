"""States that rest on a drive or in host memory: which units are where, their padding in the files, and the buffers in front."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...zero.tiers.space import ALIGN, Span, cut_points, padded
from ..tiers import DriveUnit, predict_buffers

if TYPE_CHECKING:
    from ...config_schemas import Config

_SECTOR_BYTES = 4096  # what a small buffer has more, to begin at a multiple of it
_HUGE_PAGE_BYTES = 2 << 20  # larger ones begin on a page of their own
_UNTOUCHED = 8 << 20  # elements of a sub-group where the config says nothing: large for a drive, small for a host


@dataclass(frozen=True)
class DriveOptions:
    """How states go to a drive and come back.

    Attributes:
        sub_group: elements that are updated together. rooms: sub-groups that are in memory at once, under nvme.
        staging, staging_bytes: buffers for parameters and gradients on their way.
        in_host: elements of parameters that stay in host memory all the same, on each rank.
    """

    sub_group: int = _UNTOUCHED
    rooms: int = 3
    staging: int = 5
    staging_bytes: int = 1 << 20
    in_host: int = 1_000_000_000


def drive_options(config: Config) -> DriveOptions:
    """Return what a config says, with the engine's choices where it leaves them open."""
    zero, name = config.zero_optimization, "zero_optimization"

    def given(key: str) -> bool:
        return config.origin.get(f"{name}.{key}", "default") != "default"

    rooms = 3 - sum(given(f"offload_optimizer.{key}") and not getattr(zero.offload_optimizer, key) for key in _PIPELINED)
    if given("offload_optimizer.buffer_count"):
        rooms = min(rooms, max(zero.offload_optimizer.buffer_count // _STATES_AT_LEAST, 1))
    request = -(-config.aio.block_size // _SECTOR_BYTES) * _SECTOR_BYTES
    staging = min(zero.offload_param.buffer_size * 2, request)
    return DriveOptions(
        sub_group=max(zero.sub_group_size if given("sub_group_size") else _UNTOUCHED, ALIGN),
        rooms=rooms,
        staging=zero.offload_param.buffer_count,
        staging_bytes=-(-staging // _SECTOR_BYTES) * _SECTOR_BYTES,
        in_host=zero.offload_param.max_in_cpu,
    )


_PIPELINED = ("pipeline_read", "pipeline_write")
_STATES_AT_LEAST = 4  # buffers that a sub-group takes: master weights, gradients and Adam's two states


def tiles_of(numel: int, options: DriveOptions) -> tuple[int, ...]:
    """Return the elements of each tile of one unit's share, which are moved and updated as one."""
    points = cut_points(0, numel, [Span(0, numel)], options.sub_group)
    return tuple(high - low for low, high in itertools.pairwise(points))


def padded_tile(numel: int) -> int:
    """Return the elements that a tile takes in each file."""
    return padded(numel)


def held(numel: int, options: DriveOptions) -> int:
    """Return the elements that one unit's share takes in each file."""
    return sum(padded(tile) for tile in tiles_of(numel, options))


def stay_in_host(shares: Sequence[int], options: DriveOptions) -> list[bool]:
    """Return which units' parameters stay in host memory although the others go to the drive; the engine asks in this order."""
    found, numel = [], 0
    for share in shares:
        stays = numel + share <= options.in_host
        numel += share if stays else 0
        found.append(stays)
    return found


def buffer_bytes(shares: Sequence[int], params: Sequence[int], itemsizes: tuple[int, int, int], options: DriveOptions) -> tuple[int, int]:
    """Return bytes of host memory of the buffers that sub-groups are updated in, and of the staging buffers.

    Args:
        shares: elements of each unit on this rank. params: bytes of a parameter of each, 0 where it does not rest on the drive.
        itemsizes: of master weights, gradients, and the optimizer's states together; 0 elsewhere.
    """
    master, grad, moments = itemsizes
    units = [
        DriveUnit(tuple((tile, padded(tile)) for tile in tiles_of(share, options)), param, master, grad, (("moments", moments),))
        for share, param in zip(shares, params, strict=True)
    ]
    updates = predict_buffers(units, options.sub_group, options.rooms)
    rooms = round(updates / max(predict_buffers(units, options.sub_group, 1), 1))
    return rooms * _allocated(updates // max(rooms, 1)), _allocated(options.staging * options.staging_bytes)


def _allocated(num_bytes: int) -> int:
    """Return the bytes behind a buffer that begins at an aligned place."""
    return num_bytes + (_SECTOR_BYTES if num_bytes < _HUGE_PAGE_BYTES else 0)
