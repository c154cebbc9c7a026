"""`stateroom.initialize`: config, mesh, units, optimizer, engine, in the order in which they depend on each other."""

from __future__ import annotations

import gc
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config_schemas import Config, Facts, load
from ..environment import malloc_is_steered
from ..errors import ConfigError, EngineError
from ..parallel import Collectives, axis_sizes, init_distributed, local_device
from ..parallel.host_memory import keep_freed_memory
from ..parallel.imagined import imagined_world
from ..parallel.links import Links
from ..pipe.ties import Ties
from ..version import __version__
from ..zero.backward import IN_FLIGHT
from ..zero.leaf import set_z3_leaf_modules_by_name, set_z3_leaf_modules_by_suffix
from ..zero.model import ShardedModel, UnitOptions
from ..zero.optimizer import ShardedOptimizer
from ..zero.parameter import slot_of
from ..zero.placement import STAGES
from ..zero.tiers.tiers import Tiers
from .arguments import find_config
from .data import EngineLoader
from .engine import Engine
from .groups import OptimizerLike, Prepared, prepare
from .loss_scale import LossScale
from .offload import is_separable, tiers_of
from .pipeline_setup import Cut, cut_model, settled, stages_of
from .precision import loss_scale, state_dtypes
from .progress import Progress, get_logger
from .regions import Regions, compiler_of
from .running import running_job
from .schedules import build_scheduler
from .seeding import set_random_seed

_DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def initialize(
    model: nn.Module | None = None,
    config: Any = None,
    optimizer: OptimizerLike = None,
    model_parameters: Any = None,
    training_data: Any = None,
    collate_fn: Callable[..., Any] | None = None,
    lr_scheduler: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    args: Any = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    config_params: Any = None,
    mesh_device: Any = None,
    distributed_port: int = 29500,
    mesh_param: Any = None,
) -> tuple[Engine, ShardedOptimizer | None, EngineLoader | None, Any]:
    """Wrap an unmodified module for training as the config says.

    Args:
        model: any nn.Module, also on the meta device (its parameters then come to life sharded).
        config: path (json or hjson), dict, or JSON string; also config_params, args.deepspeed_config.
        optimizer: a torch optimizer over model.parameters(), or callable(params) -> optimizer; wins over the config's.
        model_parameters: parameters or group dicts; default all that require grad.
        training_data: a dataset; the engine builds the loader of each rank's share.
        lr_scheduler: a scheduler, or callable(optimizer) -> scheduler; wins over the config's.
        loss_fn: (outputs, labels) -> scalar, for train_batch and eval_batch.
        mpu, mesh_device, mesh_param: accepted where they describe plain data parallelism over all ranks, else refused.

    Returns:
        (engine, optimizer, data loader, lr scheduler); what does not exist is None.

    Raises:
        ConfigError: the config, the optimizer or the parameters cannot be honoured.
        EngineError: the model is on the wrong device, or belongs to another engine.
    """
    model, compiled_with = _unwrap_compiled(model)
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    device = local_device()
    _check_model(model, device)
    _refuse_other_meshes(mpu, mesh_device, mesh_param, stages_of(model) or 1)
    cfg = _load_config(find_config(config, config_params, args), model, optimizer)
    run_dir = Path(cfg.run_dir) if cfg.run_dir and imagined_world() is None else None  # a dry run leaves nothing behind
    job = Collectives(None, device, _ring(run_dir, ".ring"))
    cut = cut_model(model, cfg, optimizer, model_parameters, job)
    if cut is not None:
        model, model_parameters = cut.module, cut.own_parameters(model_parameters)
    comm = job if cut is None else cut.copies_of_stage(job, _ring(run_dir, ".copies.ring"))
    ties = None if cut is None else Ties(cut.ties(), cut.grid.ranks, cut.stage, device)
    progress = _begin(cfg, job, run_dir)
    prepared = prepare(model, optimizer, model_parameters, cfg.optimizer, state_dtypes(cfg), fp32_states=not cfg.bf16.bf16_optimizer_states)
    tiers = tiers_of(cfg, model, prepared, comm, job, progress.say)
    sharded, sharded_optimizer, scale = _place(model, cfg, prepared, comm, job, ties, tiers)
    scheduler = _scheduler(lr_scheduler, cfg, sharded_optimizer, prepared)
    loader = _loader(training_data, collate_fn, cfg, comm)
    made = (sharded, sharded_optimizer, scheduler, cfg, scale, _regions(sharded, cfg, compiled_with), progress, loss_fn, loader, job)
    engine = Engine(*made) if cut is None or ties is None else pipelined(cut, ties, made)
    _open_account(engine, run_dir)
    return engine, sharded_optimizer, loader, scheduler


def pipelined(cut: Cut, ties: Ties, made: tuple[Any, ...]) -> Engine:
    """Return the engine of a model in stages, its stages connected."""
    from .pipeline import PipelineEngine

    job: Collectives = made[-1]
    chains = [[row[copy] for row in cut.grid.ranks] for copy in range(cut.grid.copies)]
    return PipelineEngine(*made, cut=cut, ties=ties, links=Links(chains, job.device, job.ring))


# ---- config


def _load_config(source: Any, model: nn.Module, optimizer: Any) -> Config:
    world = torch.distributed.get_world_size()
    stages = stages_of(model)
    copies = None if stages is None else world // stages
    cfg = settled(load(source, dp_world=copies, ranks=world, facts=_facts(model, optimizer)), model)
    refused = cfg.unsupported("result")
    if refused:
        raise ConfigError(
            "the config asks for what this version does not do, and ignoring it would train wrongly:\n  " + "\n  ".join(refused)
        )
    axis_sizes(cfg.mesh, world)
    return cfg


def _refuse_other_meshes(mpu: Any, mesh_device: Any, mesh_param: Any, stages: int) -> None:
    """Accept process grids that say what the engine does anyway: all ranks of a stage are data-parallel ranks."""
    world = torch.distributed.get_world_size() // stages
    sizes = {
        "mpu": mpu.get_data_parallel_world_size() if hasattr(mpu, "get_data_parallel_world_size") else None,
        "mesh_param": mesh_param[0] if isinstance(mesh_param, (tuple, list)) and mesh_param else None,
        "mesh_device": mesh_device.shape[0] if hasattr(mesh_device, "shape") else None,
    }
    for name, size in sizes.items():
        if size not in (None, world):
            raise ConfigError(f"{name}: {size} data-parallel ranks of {world}; model-parallel groups are not supported in this version")


def _facts(model: nn.Module, optimizer: Any) -> Facts:
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    hidden = getattr(getattr(model, "config", None), "hidden_size", None)
    lr = optimizer.param_groups[0].get("lr") if isinstance(optimizer, torch.optim.Optimizer) else None
    return Facts(
        param_dtype=_DTYPE_NAMES.get(first.dtype) if first is not None else None,
        hidden_size=hidden if isinstance(hidden, int) else None,
        optimizer_lr=None if lr is None else float(lr),
    )


def _ring(run_dir: Path | None, suffix: str) -> Path | None:
    """Return where this rank's collectives are traced."""
    return None if run_dir is None else run_dir / "trace" / f"rank_{torch.distributed.get_rank()}{suffix}"


def _begin(cfg: Config, job: Collectives, run_dir: Path | None) -> Progress:
    """Set what holds for the whole process, say what the config came to, and return what prints from now on."""
    get_logger(cfg.log_level)
    progress = Progress(job.rank, cfg.steps_per_print, run_dir, job.device, cfg.wall_clock_breakdown, cfg.memory_breakdown)
    _say_notes(cfg, progress)
    _apply_globals(cfg)
    if job.device.type == "cpu" and not job.is_imagined and not malloc_is_steered():
        keep_freed_memory()
    return progress


def _say_notes(cfg: Config, progress: Progress) -> None:
    for note in cfg.notes:
        progress.say(f"config: {note.path}: {note.text}")
    for verdict in cfg.verdicts():
        if verdict.verdict != "honoured":
            progress.say(f"config: {verdict.path}: {verdict.verdict}{': ' + verdict.reason if verdict.reason else ''}")


def _apply_globals(cfg: Config) -> None:
    if cfg.seed is not None:
        set_random_seed(cfg.seed)
    if cfg.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
    if cfg.disable_python_gc:
        gc.disable()


# ---- model and optimizer


def _unwrap_compiled(model: nn.Module | None) -> tuple[nn.Module, Any]:
    """Return the user's own module and the compiler around it: hooks must stay outside what is compiled."""
    if not isinstance(model, nn.Module):
        raise EngineError(f"initialize needs model=, an nn.Module, got {type(model).__name__}")
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
        return model._orig_mod, model.dynamo_ctx
    compiler = compiler_of(model._compiled_call_impl)
    if compiler is not None:
        model._compiled_call_impl = None
    return model, compiler


def _check_model(model: nn.Module, device: torch.device) -> None:
    for name, param in model.named_parameters():
        if param.device.type not in ("cpu", "meta", device.type):
            raise EngineError(f"parameter {name!r} is on {param.device}, this rank computes on {device}; move the model there or to cpu")
        slot = slot_of(param)
        if slot is not None and slot.unit.lost:
            raise EngineError(f"parameter {name!r} lost its values when the engine that sharded it was destroyed; build the model anew")
        if slot is not None and slot.unit.gradients is not None:
            raise EngineError(f"parameter {name!r} belongs to another engine; destroy() that one first, or pass a copy of the model")


def _place(
    model: nn.Module,
    cfg: Config,
    prepared: Prepared | None,
    comm: Collectives,
    job: Collectives,
    ties: Ties | None,
    tiers: Tiers | None,
) -> tuple[ShardedModel, ShardedOptimizer | None, LossScale]:
    zero = cfg.zero_optimization
    placement = STAGES[zero.stage]
    if tiers is not None:
        placement = placement.on_tiers(tiers.options.params, tiers.options.optimizer)
    whole = prepared is not None and prepared.whole
    _mark_leaves(model, zero.leaf_module)
    options = UnitOptions(
        classes=cfg.units.classes,
        min_numel=None if cfg.units.min_numel == "auto" else cfg.units.min_numel,
        max_numel=cfg.units.max_numel,
        closed=[*zero.leaf_module.classes, *zero.leaf_module.names, *zero.leaf_module.name_suffixes],
        ahead_numel=_ahead(cfg),
        in_flight=0 if _overlap_is_off(cfg) else IN_FLIGHT,
        apart={} if ties is None else ties.apart,
    )
    group_of = prepared.group_of if prepared is not None else {}
    sharded = ShardedModel(model, group_of, placement, comm, state_dtypes(cfg), options, whole=whole, tiers=tiers)
    if ties is not None:
        ties.take_units(sharded.units, sharded.replaced)
    scale = loss_scale(cfg)
    if prepared is None:
        return sharded, None, scale
    sharded.create_masters()
    sharded_optimizer = ShardedOptimizer(
        prepared.inner,
        sharded.units,
        group_of,
        sharded.backward,
        comm,
        whole=prepared.whole,
        scale=scale,
        clip=cfg.gradient_clipping,
        tiers=tiers,
        separable=is_separable(prepared.inner),
        job=job,
    )
    sharded_optimizer.demand_all_gradients = not zero.ignore_unused_parameters
    sharded_optimizer.admit = sharded.growth.admit
    sharded_optimizer.check_overflow = not (cfg.bf16.enabled and not cfg.bf16.check_grad_overflow)
    return sharded, sharded_optimizer, scale


def _mark_leaves(model: nn.Module, section: Any) -> None:
    for key, mark in (("names", set_z3_leaf_modules_by_name), ("name_suffixes", set_z3_leaf_modules_by_suffix)):
        _, missing = mark(model, getattr(section, key), raise_if_not_found=False)
        if missing:
            raise ConfigError(f"zero_optimization.leaf_module.{key}: no module fits {missing}; full names are those of named_modules()")


def _overlap_is_off(cfg: Config) -> bool:
    """Whether the config itself says so: the default of DeepSpeed's lower stages is no reason to wait."""
    return cfg.zero_optimization.overlap_comm is False and cfg.origin.get("zero_optimization.overlap_comm", "default") != "default"


def _ahead(cfg: Config) -> int | None:
    """Return how many elements to gather ahead: one unit unless the config gives a number; none without overlap."""
    if _overlap_is_off(cfg):
        return 0
    given = cfg.origin.get("zero_optimization.stage3_prefetch_bucket_size", "default") != "default"
    return cfg.zero_optimization.stage3_prefetch_bucket_size if given else None


def _scheduler(given: Any, cfg: Config, optimizer: ShardedOptimizer | None, prepared: Prepared | None) -> Any:
    if optimizer is None:
        return None
    if given is not None:
        is_factory = callable(given) and not hasattr(given, "step")
        return given(optimizer) if is_factory else given
    if cfg.scheduler is None or cfg.scheduler.type is None:
        return None
    if cfg.scheduler.params.get("total_num_steps", 1) == 0:  # what trainers write that only evaluate, without an optimizer
        raise ConfigError("scheduler.params.total_num_steps is 0; give the optimizer steps of the whole run")
    return build_scheduler(cfg.scheduler.type, cfg.scheduler.params, optimizer)


def _regions(sharded: ShardedModel, cfg: Config, compiled_with: Any) -> Regions:
    modules = [module for site, _ in sharded.sites[1:] for module in site.modules] or [sharded.module]
    regions = Regions(modules)
    regions.take_in_compiled()
    section = cfg.activation_checkpointing
    regions.recompute(section.policy, section.every, section.cpu_checkpointing)
    if cfg.compile.enabled:
        options = {key: getattr(cfg.compile, key) for key in ("backend", "mode", "fullgraph", "dynamic")}
        regions.compile(**{key: value for key, value in options.items() if value not in (None, False)})
    elif compiled_with is not None:
        regions.compile_with(compiled_with)
    return regions


def _loader(training_data: Any, collate_fn: Any, cfg: Config, comm: Collectives) -> EngineLoader | None:
    if training_data is None:
        return None
    return EngineLoader(
        training_data,
        cfg.train_micro_batch_size_per_gpu,
        comm.rank,
        comm.world,
        seed=cfg.seed or 0,
        drop_last=cfg.dataloader_drop_last,
        collate_fn=collate_fn,
        pin_memory=comm.device.type != "cpu",
    )


# ---- what is left behind


def _open_account(engine: Engine, run_dir: Path | None) -> None:
    """Say and write down what was built; the account of steps starts here."""
    _write_run_dir(engine, run_dir)
    _say_summary(engine)
    engine.dp.traffic.clear()
    world = imagined_world()
    if world is not None:
        world.watcher.job(running_job(engine))


def _write_run_dir(engine: Engine, run_dir: Path | None) -> None:
    if run_dir is None or engine.comm.rank != 0:
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.resolved.json").write_text(json.dumps(engine.config.to_dict(), indent=2))
    facts = {
        "stateroom": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(engine.device),
        "ranks": engine.comm.world,
    }
    (run_dir / "environment.json").write_text(json.dumps(facts, indent=2))


def _say_summary(engine: Engine) -> None:
    units = engine.sharded.units
    stages = engine.config.mesh.pp
    shared = f" of stage 0 of {stages}" if stages > 1 else ""
    ranks = f"{engine.comm.world} rank(s)"
    numel = sum(unit.layout.numel for unit in units)
    trainable = sum(unit.layout.numel for unit in units if unit.trainable)
    train, micro, steps = engine.get_batch_info()
    name = "no optimizer" if engine.optimizer is None else type(engine.optimizer.inner).__name__
    engine.progress.say(
        f"ZeRO stage {engine.zero_optimization_stage()} on {ranks} ({engine.device.type}): {numel:,} parameters{shared} "
        f"({trainable:,} trainable) in {len(units)} units; {name}; batch {train} = {micro} x {steps} x {engine.dp.world}"
    )
    if engine.config.dump_state:
        for unit in units:
            state = "sharded" if unit.sharded else "whole"
            engine.progress.say(f"  unit {unit.name}: {len(unit.slots)} parameters, {unit.layout.padded:,} elements, {unit.dtype}, {state}")
