"""What a step moves between a device, host memory and a drive, where states rest off the device."""

from __future__ import annotations

from ..job import Job
from ..memory.rank import drive_units, placed_units, unit_share
from ..memory.states import placement_of
from ..tiers import Moves, predict_moves
from .axes import Flow

HOST_AXIS, DRIVE_AXIS = "host", "nvme"
_AWAY = ("cpu", "nvme")


def drive_moves(job: Job, stage: int) -> Moves:
    """Return ("read" or "written", state) -> bytes between drive and memory in a step, as the engine counts them."""
    layout = job.layout
    if "nvme" not in (layout.optimizer_tier, layout.parameter_tier):
        return {}
    every_pass = placement_of(layout.zero).reduces_every_pass and layout.shard_world > 1
    return predict_moves(drive_units(job, stage), layout.accumulation, layout.accumulation if every_pass else 1)


def tier_flows(job: Job, stage: int) -> list[Flow]:
    """Return the traffic of one rank over the host bus, and to and from its drive; the drive's speed is not known, so that it has no time.

    Reduced gradients go to where the optimizer's states rest, new parameters come back once, and parameters that rest in host
    memory or on a drive come for each gather.
    """
    layout = job.layout
    if layout.optimizer_tier == layout.parameter_tier == "device":
        return []
    placement, sizes = placement_of(layout.zero), layout.sizes
    units = placed_units(job, stage)
    shares = [(unit, unit_share(job, unit)) for unit in units]
    elements = sum(unit.count * share for unit, share in shares)
    count = sum(unit.count for unit in units)
    found = []
    if layout.optimizer_tier in _AWAY:
        times = layout.accumulation if placement.reduces_every_pass else 1
        found.append(_bus(job, "to host", "gradients", times * count, elements / count * sizes.grad, "backward"))
        if layout.parameter_tier not in _AWAY:
            found.append(_bus(job, "from host", "new parameters", count, elements / count * sizes.param, "nothing"))
    if layout.parameter_tier in _AWAY:
        gathers = [layout.accumulation * unit.count * (1 if unit.is_root else 2) for unit, _ in shares]
        moved = sum(each * share for each, (_, share) in zip(gathers, shares, strict=True)) * sizes.param
        found.append(_bus(job, "from host", "parameters", sum(gathers), moved / sum(gathers), "forward and backward"))
    for (direction, state), size in sorted(drive_moves(job, stage).items(), key=lambda item: (item[0][1], item[0][0])):
        found.append(Flow(DRIVE_AXIS, direction, state, 1.0, float(size), float(size), 0.0, "drive", "(its speed is not known)"))
    return found


def _bus(job: Job, primitive: str, state: str, calls: float, size: float, behind: str) -> Flow:
    moved = calls * size
    seconds = moved / job.cluster.accelerator.needed("host_bytes_s")
    return Flow(HOST_AXIS, primitive, state, calls, size, moved, seconds, "host bus", behind)
