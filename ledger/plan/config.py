"""Between a layout and the config that the engine runs: written from a plan, and read back from a file that a user has."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..job import Job, Layout
from ..memory.drive import DriveOptions, drive_options
from ..pipeline.cut import cut_of
from ..pipeline.formulas import schedule_named
from ..pipeline.partition import part_sizes
from ..problems import LedgerError
from ..shapes.shape import ModelShape

if TYPE_CHECKING:
    from ...config_schemas.root import Config


# schedules as the ledger's formulas name them -> as the engine does
_SCHEDULES = {"1f1b": "1f1b", "gpipe": "gpipe", "zb-h1": "zero-bubble", "zb-v": "zbv"}


def config_of(job: Job) -> dict[str, Any]:
    """Return the config of a job: DeepSpeed's keys, and `mesh` for the axes."""
    layout = job.layout
    zero: dict[str, Any] = {"stage": layout.zero}
    if layout.optimizer_tier != "device":
        zero["offload_optimizer"] = {"device": layout.optimizer_tier}
    if layout.parameter_tier != "device":
        zero["offload_param"] = {"device": layout.parameter_tier}
    found: dict[str, Any] = {
        "train_batch_size": layout.sequences,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.accumulation,
        "zero_optimization": zero,
        "activation_checkpointing": {"policy": "selective" if layout.recompute == "core" else layout.recompute},
        "mesh": {
            "pp": layout.pp, "dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard, "cp": layout.cp, "tp": layout.tp,
             "ep": layout.ep,
        },
    }  # fmt: skip
    if layout.pp > 1:
        schedule = "interleaved-1f1b" if layout.vp > 1 else _SCHEDULES.get(schedule_named(layout.schedule).name, "1f1b")
        found["pipeline"] = {"stages": layout.pp, "schedule": schedule, "chunks": layout.vp, "split": "auto"}
        sizes = layout.cut or part_sizes(job.shape.layers, layout.parts)
        if min(sizes) > 0:
            found["pipeline"]["partition"] = list(sizes)
    if layout.param in ("bf16", "fp16"):
        found[layout.param] = {"enabled": True}
        found["data_types"] = {"grad_accum_dtype": layout.grad}
    if layout.wire is not None and layout.wire != layout.grad:
        found["communication_data_type"] = layout.wire
    return found


def notes_of(job: Job) -> list[str]:
    """Return what a config cannot say about a layout, one a line."""
    layout, found = job.layout, []
    if layout.pp > 1 and schedule_named(layout.schedule).name not in _SCHEDULES:
        found.append(f"the schedule {layout.schedule} is not one that the engine runs: the config says 1f1b")
    if layout.pp > 1 and min(layout.cut or part_sizes(job.shape.layers, layout.parts)) < 1:
        found.append(f"{layout.parts} parts of {job.shape.layers} layers leave a part without a layer, which pipeline.split cannot cut")
    if layout.loss_chunks > 1:
        found.append(f"the loss is computed in {layout.loss_chunks} chunks by the model's own code")
    return found


def job_of_config(source: str | os.PathLike[str] | Mapping[str, Any], base: Job, ranks: int | None = None) -> Job:
    """Return `base` with the layout that a config describes.

    Args:
        base: its shape, cluster and sequence are kept.
        ranks: number of ranks; the cluster's devices by default.

    Raises:
        ConfigError: the config is not valid. LedgerError: its axes do not make the ranks.
    """
    from ...config_schemas import load

    count = ranks or base.cluster.devices
    config = load(source, ranks=count)
    return Job(base.shape, base.cluster, layout_of(config, count, base.shape), base.seq, base.attention)


def layout_of(config: Config, ranks: int, shape: ModelShape | None = None) -> Layout:
    """Return the layout of a loaded config over `ranks` ranks.

    Args:
        shape: says where the engine cuts its layers into stages; without it they are shared out evenly.

    Raises:
        LedgerError: the axes do not divide the ranks, or the pipeline's schedule has no account here.
    """
    mesh, zero = config.mesh, config.zero_optimization
    tp = max(mesh.tp, config.tensor_parallel.autotp_size or 1, config.tensor_parallel.tp.tp_size)
    ep = max(mesh.ep, config.expert_parallel.autoep_size if config.expert_parallel.enabled else 1)
    cp = max(mesh.cp, config.sequence_parallel_size)
    pp = max(mesh.pp, config.pipeline.stages)
    inner = tp * cp * pp
    if ranks % inner:
        raise LedgerError(f"{ranks} ranks do not divide by tp {tp} x cp {cp} x pp {pp} = {inner}")
    dp = ranks // inner
    param = "bf16" if config.bf16.enabled else "fp16" if config.fp16.enabled else config.data_types.param_dtype or "fp32"
    narrow = config.bf16.bf16_master_weights_and_grads or config.fp16.fp16_master_weights_and_grads
    moments = param if config.bf16.bf16_optimizer_states else "fp32"
    optimizer_tier = _tier(zero.offload_optimizer.device) if zero.stage >= 1 else "device"
    parameter_tier = _tier(zero.offload_param.device) if zero.stage >= 3 else "device"
    drive = DriveOptions() if optimizer_tier == parameter_tier == "device" else drive_options(config)
    found = Layout(
        tp=tp, pp=pp, cp=cp, ep=ep, dp_shard=dp // mesh.dp_replicate, dp_replicate=mesh.dp_replicate, zero=zero.stage,
        micro_batch=config.train_micro_batch_size_per_gpu, accumulation=config.gradient_accumulation_steps,
        recompute=config.activation_checkpointing.policy, param=param,
            grad=config.data_types.grad_accum_dtype or (param if narrow else "fp32"),
        wire=config.communication_data_type, master=None if narrow or param == "fp32" else "fp32", first=moments, second=moments,
        compute=param if param != "fp32" else (config.torch_autocast.dtype or "bf16") if config.torch_autocast.enabled else "fp32",
        optimizer_tier=optimizer_tier, parameter_tier=parameter_tier, drive=drive,
        sequence_parallel=tp > 1, vp=_chunks(config), schedule=_schedule(config.pipeline.schedule),
    )  # fmt: skip
    if pp == 1 or shape is None:
        return found
    return replace(found, cut=cut_of(shape, config.pipeline.partition, found.pp, found.parts))


def _chunks(config: Config) -> int:
    section = config.pipeline
    if section.schedule != "interleaved-1f1b":
        return 1  # a schedule with a shape of its own says itself how many
    return max(section.chunks, 2)


def _schedule(name: str) -> str:
    """Return the formula for one of the engine's schedules; chunks are counted apart."""
    if name == "interleaved-1f1b":
        return "1f1b"
    known = next((ours for ours, theirs in _SCHEDULES.items() if theirs == name), None)
    if known is None:
        raise LedgerError(f"pipeline.schedule {name} has no account here; known: {', '.join(['interleaved-1f1b', *_SCHEDULES.values()])}")
    return known


def _tier(device: str) -> str:
    return "device" if device == "none" else device
