"""Cutting a model that is no list of layers, as pipeline.split asks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..config_schemas import Config
from ..errors import ConfigError
from ..ledger.pipeline import partition
from ..parallel import local_device
from ..pipe.auto import CutModel, Trunk, find_trunk
from ..pipe.module import PipelineModule
from ..pipe.schedules import KINDS, chunks_of
from ..pipe.topology import Grid
from ..pipe.weigh import weigh
from .pipeline_setup import Cut
from .stages import shape_or_none


def cut_automatically(model: nn.Module, cfg: Config, optimizer: Any) -> Cut:
    """Cut an nn.Sequential into its items, or another model along its one nn.ModuleList.

    Raises:
        ConfigError: there is nothing to cut along, or too little of it.
    """
    section = cfg.pipeline
    schedule, chunks = section.schedule, chunks_of(section.schedule, section.chunks)
    if type(model) is nn.Sequential:
        method = "parameters" if section.partition == "best" else section.partition
        listed = PipelineModule(
            list(model), section.stages, partition_method=method, schedule=schedule, chunks=section.chunks,
            activation_checkpoint_interval=section.activation_checkpoint_interval, names=[name for name, _ in model.named_children()],
        )  # fmt: skip
        drop_absent(optimizer, listed)
        return Cut(listed, listed, listed.grid, schedule, chunks, whole_batches=False)
    if section.activation_checkpoint_interval:
        raise ConfigError(
            "pipeline.activation_checkpoint_interval counts the layers of a PipelineModule; for a model that is cut by pipeline.split "
            "set activation_checkpointing.policy to full (and every)"
        )
    if cfg.zero_optimization.stage == 3 and section.stages > 1:
        raise ConfigError(
            "zero_optimization.stage 3 with pipeline.split: a stage leaves the model's forward in its middle, where gathered weights could "
            "not be told from those still needed; use stage 2 or less, or write the model as a stateroom.pipe.PipelineModule"
        )
    vee = KINDS[schedule].vee
    grid = Grid.over(dist.get_world_size(), section.stages)
    trunk = find_trunk(model, section.split or "auto")
    bounds = _bounds(trunk, section.partition, section.stages * chunks)
    stage, _ = grid.at(dist.get_rank())
    shape = shape_or_none(model)
    parts = CutModel(model, trunk, bounds, grid, stage, chunks, vee=vee, device=local_device())
    drop_absent(optimizer, model)
    cut = Cut(model, parts, grid, schedule, chunks, whole_batches=True)
    cut.shape = shape
    return cut


def _bounds(trunk: Trunk, method: Any, parts: int) -> list[int]:
    """Return how the layers are shared out; what stands before and after them weighs on the first and the last part."""
    count = len(trunk.layers)
    if count < parts:
        raise ConfigError(f"the {count} layers of {trunk.path} cannot be cut into {parts} parts; use at most {count} stages (x chunks)")
    if not isinstance(method, str):
        return partition.explicit(method, count, parts)
    kind, _, pattern = method.partition(":")
    kind = kind.lower()
    if kind == "uniform":
        return partition.uniform(count, parts)
    if kind == "type":
        return partition.by_type([type(layer).__name__ for layer in trunk.layers], pattern, parts)
    of = {"flops": "flops", "memory": "state_bytes"}.get(kind, "parameters")
    weights = [float(getattr(weight, of)) for weight in weigh(list(trunk.layers), list(trunk.layers))]
    around = {side: [each.module for each in trunk.outside if each.is_before is side] for side in (True, False)}
    ends = {side: sum(float(getattr(weight, of)) for weight in weigh(modules, modules)) for side, modules in around.items()}
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)

    def cost(part: int, start: int, stop: int) -> float:
        return sums[stop] - sums[start] + (ends[True] if part == 0 else 0.0) + (ends[False] if part == parts - 1 else 0.0)

    return partition.lightest(cost, count, parts)


def drop_absent(optimizer: Any, module: nn.Module) -> None:
    """Take parameters that are on other stages out of an optimizer that was built over the whole model."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    here = {id(param) for param in module.parameters()}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in here:
                optimizer.state.pop(param, None)
        group["params"] = [param for param in group["params"] if id(param) in here]
