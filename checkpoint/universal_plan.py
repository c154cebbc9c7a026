"""What a universal directory will consist of: which file holds what, decided and checked before anything is written."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import CheckpointError
from .deepspeed import pickling
from .deepspeed.pickling import record
from .deepspeed.source import DeepSpeedSource
from .elements import Elements
from .source import MASTER, WEIGHT, Scalar, Source

ZERO, OPTIMIZER_STATE, PARAM, CAT_DIM, STEP = "zero", "optimizer_state.pt", "param", "cat_dim", "step"
DEEPSPEED_VERSION = "0.19.8"  # whose readers this layout was tried with
_SCALERS = "deepspeed.runtime.fp16.loss_scaler."
_DYNAMIC = {
    "cur_iter": 0,
    "last_overflow_iter": -1,
    "scale_factor": 2.0,
    "scale_window": 1000,
    "min_scale": 1.0,
    "delayed_shift": 2,
    "cur_hysteresis": 2,
    "consecutive_hysteresis": False,
    "raise_error_at_min_scale": True,
}


@dataclass(frozen=True)
class TensorFile:
    """One state of one parameter: bare and flat as ZeRO-3 reads it, else in its shape in a dictionary with `tags`."""

    path: str
    elements: Elements
    shape: tuple[int, ...]
    bare: bool
    tags: tuple[tuple[str, Any], ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor that is written: fp32, or what it is if it is no floating-point tensor."""
        return self.elements.numel * self.dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that is written."""
        return torch.float32 if self.elements.dtype.is_floating_point else self.elements.dtype


@dataclass(frozen=True)
class ValueFile:
    """A number, or a dictionary without large tensors, as the bytes of its file."""

    path: str
    content: bytes = field(repr=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of the file."""
        return len(self.content)


def value_file(path: str, value: Any) -> ValueFile:
    """Return the file that torch.save would make of a value."""
    content = io.BytesIO()
    pickling.save(value, content)
    return ValueFile(path, content.getvalue())


@dataclass(frozen=True)
class CopiedFile:
    """A file that is taken over as it is."""

    path: str
    origin: str
    num_bytes: int


File = TensorFile | ValueFile | CopiedFile


def plan(source: Source, stage: int | None, strict: bool) -> tuple[list[File], list[str]]:
    """Return the files of a universal directory, the common ones first, and remarks for the user.

    Args:
        source: any checkpoint with an optimizer's states.
        stage: ZeRO stage of the DeepSpeed run that will load it; default: the one that wrote it.
        strict: a state that is missing in part is an error, else it is left out with a remark.

    Raises:
        CheckpointError: names each parameter and state that is missing.
    """
    # what ZeRO wrote for the same kind of reader is taken over as it is
    own = isinstance(source, DeepSpeedSource) and bool(source.common) and (stage is None or (stage == 3) == (source.stage == 3))
    target = stage if stage is not None else int(source.facts().get("stage") or 1)
    bare = target == 3 and not (isinstance(source, DeepSpeedSource) and source.rules)
    remarks = _check(source, strict)
    files: list[File] = []
    if own and isinstance(source, DeepSpeedSource):
        files += [CopiedFile(path.name, str(path), path.stat().st_size) for path in source.model_files]
    else:
        files.append(value_file(f"{'zero_pp_rank_0_' if target == 3 else ''}mp_rank_00_model_states.pt", _model_states(source)))
    files.append(value_file(f"{ZERO}/{OPTIMIZER_STATE}", _common(source, own, target)))
    everything = not (own and target == 3)  # the model states of ZeRO-3 hold buffers and frozen parameters themselves
    for name in source.parameters:
        if source.parameters[name].trainable or everything:
            files += _parameter_files(source, name, bare, _one_step(source) if target == 3 else None)
        if everything and not (isinstance(source, DeepSpeedSource) and source.files.layers):  # a layer's number is no name
            files += [_alias_file(source, name, alias) for alias in source.parameters[name].aliases if _has_weight(source, name)]
    if everything:
        files += _buffer_files(source)
    return files, remarks


def _check(source: Source, strict: bool) -> list[str]:
    """Return remarks about what is left out.

    Raises:
        CheckpointError: something is missing, and `strict`.
    """
    lines = [f"{state} of {name}: {why}" for (name, state), why in source.gaps().items() if state not in source.states(name)]
    trainable = [name for name, parameter in source.parameters.items() if parameter.trainable]
    for group in source.groups():
        held = {name: {*source.states(name)} - {WEIGHT, MASTER} for name in group["params"]}
        union = set().union(*held.values())
        lines += [
            f"{state} of {name}: other parameters of its group have it"
            for name, states in held.items()
            if states  # none at all: it never had a gradient
            for state in sorted(union - states)
            if (name, state) not in source.gaps()
        ]
    if not source.groups():
        lines.append("optimizer states of every parameter: it holds weights alone; `stateroom ckpt export` is for those")
    lines += [f"the weights of {name}: no file has them" for name in trainable if not _has_weight(source, name)]
    if lines and strict:
        shown = "\n  ".join(lines[:20]) + (f"\n  and {len(lines) - 20} more" if len(lines) > 20 else "")
        raise CheckpointError(
            f"{source.facts()['path']} lacks what a universal checkpoint needs; nothing was written:\n  {shown}\n"
            "Choose another tag, or leave these out with --no_strict"
        )
    return [f"left out: {line}" for line in lines]


def _has_weight(source: Source, name: str) -> bool:
    return bool({MASTER, WEIGHT} & {*source.states(name)})


# ---- the folders of parameters


def _parameter_files(source: Source, name: str, bare: bool, common_step: Scalar | None) -> list[File]:
    files: list[File] = []
    tags, states = _tags(source, name), source.states(name)
    bare = bare and source.parameters[name].trainable  # no reader wants the others bare, and they would lose their shape
    for state in states:
        if state == WEIGHT:
            continue
        flat = bare and source.shape_of(name, state) == source.parameters[name].shape
        files.append(TensorFile(_path(name, state), source.elements(name, state), source.shape_of(name, state), flat, tags))
    if MASTER not in states and WEIGHT in states:
        files.append(TensorFile(_path(name, MASTER), source.elements(name, WEIGHT), source.parameters[name].shape, bare, tags))
    for key, value in source.scalars(name).items():
        if key != STEP or common_step is None:
            files.append(value_file(_path(name, key), value))
    return files


def _tags(source: Source, name: str) -> tuple[tuple[str, Any], ...]:
    """Return what a file says about how its tensor is cut; without tensor parallelism it could be cut along the first dimension."""
    rule = source.rules.get(name) if isinstance(source, DeepSpeedSource) else None
    if not source.parameters[name].trainable:
        return ()
    return ((CAT_DIM, 0),) if rule is None else rule.tags


def _alias_file(source: Source, name: str, alias: str) -> TensorFile:
    state = WEIGHT if WEIGHT in source.states(name) else MASTER
    return TensorFile(_path(alias, MASTER), source.elements(name, state), source.parameters[name].shape, False)


def _buffer_files(source: Source) -> list[File]:
    files: list[File] = []
    if isinstance(source, DeepSpeedSource):  # its buffers need not be read now
        for name, elements in source.stored_buffers.items():
            files.append(TensorFile(_path(name, MASTER), elements, source.buffer_shapes[name], False))
        return files
    for name, tensor in source.buffers().items():
        content = tensor.float() if tensor.is_floating_point() else tensor
        files.append(value_file(_path(name, MASTER), {PARAM: content}))
    return files


def _path(name: str, state: str) -> str:
    if "/" in name or name.startswith("."):
        raise CheckpointError(f"parameter {name!r} cannot name a folder; rename it before converting")
    return f"{ZERO}/{name}/{state}.pt"


# ---- the common files


def _common(source: Source, own: bool, target: int) -> dict[str, Any]:
    """Return the optimizer's values that are not per parameter, with the keys that DeepSpeed's readers ask for."""
    if own and isinstance(source, DeepSpeedSource) and source.common:
        return {"ds_version": source.facts().get("version") or DEEPSPEED_VERSION, **source.common} if target != 3 else source.common
    groups = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": [index]}
        for index, group in enumerate(source.groups())
    ]
    scaler = source.loss_scaler() or {}
    common = {
        "loss_scaler": _loss_scaler(scaler),
        "dynamic_loss_scale": bool(scaler.get("dynamic")),
        "overflow": False,
        "zero_stage": target,
        "partition_count": 1 if target == 3 else [1] * len(groups),
        "ds_version": DEEPSPEED_VERSION,
        "param_groups": groups,
    }
    if target != 3:
        return {**common, "group_paddings": [0] * len(groups)}
    numbers = {index: dict(source.scalars(group["params"][0])) if group["params"] else {} for index, group in enumerate(source.groups())}
    return {**common, "optimizer_state_dict": {"state": numbers, "param_groups": groups}}


def _loss_scaler(scaler: Mapping[str, Any]) -> Any:
    scale = float(scaler.get("cur_scale", 1.0))
    if not scaler.get("dynamic"):
        return record(_SCALERS + "LossScaler", {"cur_scale": scale, "dynamic": False})
    kept = {key: scaler.get(key, default) for key, default in _DYNAMIC.items()}
    return record(_SCALERS + "DynamicLossScaler", {"cur_scale": scale, **kept, "dynamic": True, "dtype": torch.float16})


def _model_states(source: Source) -> dict[str, Any]:
    """Return what DeepSpeed reads beside the parameters' folders: no weights, they are in the folders."""
    trainable = [{name: torch.Size(source.parameters[name].shape) for name in group["params"]} for group in source.groups()]
    facts = source.facts()
    frozen = {name: torch.Size(one.shape) for name, one in source.parameters.items() if not one.trainable}
    dtypes = {one.dtype for one in source.parameters.values() if one.trainable}
    config = {key: {"enabled": True} for key, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)) if dtype in dtypes}
    return {
        "module": {},
        "buffer_names": list(source.buffers()),
        "optimizer": None,
        "param_shapes": trainable,
        "frozen_param_shapes": frozen,
        "shared_params": {alias: name for name, one in source.parameters.items() for alias in one.aliases},
        "frozen_param_fragments": {},
        "lr_scheduler": source.scheduler(),
        "data_sampler": None,
        "random_ltd": None,
        **{key: source.counters().get(key, 0) for key in ("skipped_steps", "global_steps", "global_samples")},
        "dp_world_size": 1,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": config,
        "ds_version": facts["version"] if facts.get("writer") == "DeepSpeed" and facts.get("version") else DEEPSPEED_VERSION,
        **source.client_state(),
    }


def _one_step(source: Source) -> Scalar | None:
    """Return the step that all parameters have taken; None if they differ, then each has a file of its own."""
    steps = [source.scalars(name).get(STEP) for name, one in source.parameters.items() if one.trainable]
    first = next((step for step in steps if step is not None), None)
    return first if first is not None and all(step is None or float(step) == float(first) for step in steps) else None
