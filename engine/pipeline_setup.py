"""What initialize() does first for a model in stages: cut it as the config says, and connect the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..config_schemas import Config
from ..errors import ConfigError
from ..ledger.shapes.shape import ModelShape
from ..parallel import Collectives
from ..pipe.handover import hand_over
from ..pipe.module import PipelineModule
from ..pipe.schedules import KINDS, chunks_of
from ..pipe.standing import leave, stand
from ..pipe.ties import Tie
from ..pipe.topology import Grid, PipelineParallelGrid
from ..zero.unit import Unit


class Cut:
    """A model in stages, as this rank sees it.

    Attributes:
        module: what is placed: this stage's part of the model under the whole model's names. parts: runs chunks of it.
        stage, copy: where this rank stands. chain: global ranks of this rank's copy of the model, by stage.
        whole_batches: every stage needs the batch's inputs.
    """

    def __init__(self, module: nn.Module, parts: Any, grid: Grid, schedule: str, chunks: int, *, whole_batches: bool) -> None:
        self.module, self.parts, self.grid = module, parts, grid
        self.stages, self.chunks = grid.stages, chunks
        self.whole_batches = whole_batches
        self.shape: ModelShape | None = None  # of a model that was whole before it was cut, where it says its sizes
        self.built_whole = False  # the script has the whole model, and an optimizer over all of it may come
        self.stage, self.copy = grid.at(dist.get_rank())
        self.chain = [row[self.copy] for row in grid.ranks]
        last = 0 if KINDS[schedule].vee else self.stages - 1
        self.holds_last = self.stage == last
        self.takes_inputs = self.stage == 0 or whole_batches
        self.takes_labels = self.holds_last
        self.last_ranks = list(grid.ranks[last])
        taking = range(self.stages) if whole_batches else sorted({0, last})
        self.takers = [rank for stage in taking for rank in grid.ranks[stage]]
        self.loss_fn = getattr(parts, "loss_fn", None)
        self.dynamic_shape = bool(getattr(parts, "dynamic_shape", False))
        self._group: Any = None  # of the ranks that hold this stage
        self._chain_group: Any = None  # of the stages of this copy, for scripts

    def ties(self) -> list[Tie]:
        """Return what stages share."""
        return self.parts.ties()

    def where(self, rank: int) -> str:
        """Return a rank's place in words."""
        stage, copy = self.grid.at(rank)
        return f"stage {stage}" if self.grid.copies == 1 else f"stage {stage}, copy {copy}"

    def own_parameters(self, given: Any) -> Any:
        """Return parameters or groups that a script gave, without those of other stages of a model that it built whole."""
        if given is None or not self.built_whole or isinstance(given, torch.Tensor):
            return given
        here = {id(param) for param in self.module.parameters()}
        kept = []
        for item in given:
            if isinstance(item, dict):
                kept.append(
                    {**item, "params": [each for each in item["params"] if id(each[1] if isinstance(each, tuple) else each) in here]}
                )
            elif id(item[1] if isinstance(item, tuple) else item) in here:
                kept.append(item)
        return kept

    # ---- ranks

    def copies_of_stage(self, job: Collectives, ring_path: Any) -> Collectives:
        """Return collectives over the ranks that hold this stage; every rank must call it."""
        stand(self.seen)
        if self.stages == job.world:
            self._chain_group = job.group
        elif self.stages > 1:
            for chain in zip(*self.grid.ranks, strict=True):
                group = dist.new_group(list(chain))
                if job.rank in chain:
                    self._chain_group = group
        return Collectives(self.connect_copies(), job.device, ring_path)

    def connect_copies(self) -> Any:
        """Make the group of the ranks that hold this stage, and return it; every rank must call it."""
        for row in self.grid.ranks:
            group = dist.new_group(row)
            if dist.get_rank() in row:
                self._group = group
        return self._group

    def close_copies(self) -> None:
        """Let the group of this stage's ranks go: whoever waits there raises."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def close(self) -> None:
        """Let all groups go."""
        leave(self.seen)
        self.close_copies()
        group, self._chain_group = self._chain_group, None
        if group is not None and dist.is_initialized() and group is not dist.group.WORLD:
            dist.destroy_process_group(group)

    def seen(self) -> PipelineParallelGrid:
        """Return where this rank stands, under DeepSpeed's names."""
        return self.grid.seen_from(dist.get_rank(), self._group, self._chain_group)

    # ---- weights of a chunk

    def weights(self, chunk: int) -> list[nn.Parameter]:
        """Return the trained weights that a chunk uses."""
        return [param for param in self._parameters(chunk) if param.requires_grad]

    def _parameters(self, chunk: int) -> Iterable[nn.Parameter]:
        seen = {id(param): param for module in self.parts.modules_of(chunk) for param in module.parameters()}
        return seen.values()

    def units(self, chunk: int, units: Sequence[Unit]) -> list[Unit]:
        """Return those of `units` that hold a chunk's weights."""
        own = {id(param) for param in self._parameters(chunk)}
        return [unit for unit in units if any(id(slot.param) in own for slot in unit.slots)]


def stages_of(model: nn.Module) -> int | None:
    """Return how many stages a PipelineModule has; None for another model."""
    return model.num_stages if isinstance(model, PipelineModule) else None


def settled(cfg: Config, model: nn.Module) -> Config:
    """Return the config with the number of stages in both places that say it.

    Raises:
        ConfigError: the config and the model disagree.
    """
    asked = {"mesh.pp": cfg.mesh.pp, "pipeline.stages": cfg.pipeline.stages}
    stages = stages_of(model)
    for name, number in asked.items():
        if stages is not None and number not in (1, stages):
            raise ConfigError(f"{name} is {number}, but the PipelineModule has {stages} stages; leave the key out or make them equal")
    number = stages or max(asked.values())
    if number == 1:
        return cfg
    mesh = cfg.mesh.model_copy(update={"pp": number})
    return cfg.model_copy(update={"mesh": mesh, "pipeline": cfg.pipeline.model_copy(update={"stages": number})})


def cut_model(model: nn.Module, cfg: Config, optimizer: Any, model_parameters: Any, job: Collectives) -> Cut | None:
    """Cut a model as the config says; None where there is nothing to cut.

    Raises:
        ConfigError: it cannot be cut so, or stages are asked for and nothing says how to cut this model.
    """
    section = cfg.pipeline
    if isinstance(model, PipelineModule):
        _place(model, cfg, optimizer, model_parameters, job)
        cut = Cut(model, model, model.grid, section.schedule, model.chunks, whole_batches=False)
    elif section.stages > 1 or section.split is not None:
        if section.split is None:
            raise ConfigError(
                f"the config asks for {section.stages} pipeline stages, and the model ({type(model).__name__}) is no list of layers: pass "
                "a stateroom.pipe.PipelineModule, or set pipeline.split to auto (or to the path of its list of layers)"
            )
        from .pipeline_auto import cut_automatically

        cut = cut_automatically(model, cfg, optimizer)
        cut.built_whole = True
    else:
        return None
    _check(cut, cfg)
    return cut


def _place(model: PipelineModule, cfg: Config, optimizer: Any, model_parameters: Any, job: Collectives) -> None:
    section = cfg.pipeline
    method = section.partition if cfg.origin.get("pipeline.partition", "default") != "default" else None
    before, old = model.holders(), model.built_layers()
    moved = model.place(section.schedule, section.chunks, method)
    if moved and (isinstance(optimizer, torch.optim.Optimizer) or model_parameters is not None):
        raise ConfigError(
            f"pipeline.schedule {section.schedule} (chunks {section.chunks}, partition {section.partition}) places the layers "
            "otherwise than PipelineModule did when it was built, and the optimizer or model_parameters hold the parameters of then. "
            "Give PipelineModule(schedule=..., chunks=..., partition_method=...) what the config says, or pass the optimizer as a "
            "function of parameters"
        )
    if moved:
        hand_over(job, model.grid.ranks, before, model.holders(), old, model.built_layers())
    if section.activation_checkpoint_interval:
        model.activation_checkpoint_interval = section.activation_checkpoint_interval


def _check(cut: Cut, cfg: Config) -> None:
    schedule = cfg.pipeline.schedule
    chunks_of(schedule, cfg.pipeline.chunks)
    if cfg.zero_optimization.stage == 3 and KINDS[schedule].split and cut.stages > 1:
        raise ConfigError(
            f"zero_optimization.stage 3 with pipeline.schedule {schedule}: the gradients of weights are computed apart from those of "
            "inputs, after the gathered weights have been released; use stage 2 or less, or gpipe, 1f1b or interleaved-1f1b"
        )
