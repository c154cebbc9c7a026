"""Spellings of the past: deprecated keys are mapped and named, keys of removed features are refused with what to use instead."""

from __future__ import annotations

from typing import Any, NamedTuple

from .draft import MISSING, Draft, dotted, walk
from .scanner import Path

_ZERO = "zero_optimization"


class Dead(NamedTuple):
    """A removed key: the value that means off (besides false, null and empty), and what to use instead.

    `has_switch` blocks are on only if an `enabled` inside them is true.
    """

    instead: str
    has_switch: bool = False
    off_value: Any = MISSING


# current path of a key that was renamed -> old names in the same section
_RENAMED: dict[Path, tuple[str, ...]] = {
    ("bf16",): ("bfloat16",),
    (_ZERO, "stage3_gather_16bit_weights_on_model_save"): (
        "stage3_gather_fp16_weights_on_model_save",
        "gather_16bit_weights_on_model_save",
        "gather_fp16_weights_on_model_save",
    ),
    (_ZERO, "stage3_prefetch_bucket_size"): ("prefetch_bucket_size",),
    (_ZERO, "stage3_param_persistence_threshold"): ("param_persistence_threshold",),
    (_ZERO, "stage3_model_persistence_threshold"): ("model_persistence_threshold",),
    (_ZERO, "stage3_max_live_parameters"): ("max_live_parameters",),
    (_ZERO, "stage3_max_reuse_distance"): ("max_reuse_distance",),
    (_ZERO, "stage3_module_granularity_threshold"): ("module_granularity_threshold",),
    (_ZERO, "stage3_use_all_reduce_for_fetch_params"): ("use_all_reduce_for_fetch_params",),
    (_ZERO, "stage3_allgather_sequential"): ("allgather_sequential",),
    ("tensor_parallel", "replace_with_kernel_inject"): ("kernel_inject",),
    ("aio", "intra_op_parallelism"): ("thread_count",),
}

DEAD: dict[Path, Dead] = {
    ("amp",): Dead("use bf16, fp16 or torch_autocast instead of Apex", has_switch=True),
    ("nebula",): Dead("use the checkpoint section (async, keep_last, dir)", has_switch=True),
    ("compression_training",): Dead("compress the trained model with a tool of its own; training here is uncompressed", has_switch=True),
    ("quantize_training",): Dead("use quantization-aware training of torchao in the model", has_switch=True),
    ("sparse_gradients",): Dead("remove the key; gradients are reduced as they are"),
    ("eigenvalue",): Dead("remove the block; it only served quantize_training", has_switch=True),
    ("sparse_attention",): Dead("use torch's flex_attention in the model"),
    ("elasticity",): Dead("remove the block; a run resumes with any number of ranks that the batch sizes allow", has_switch=True),
    ("graph_harvesting",): Dead('use compile.enabled with compile.mode "reduce-overhead"'),
    ("curriculum_learning",): Dead("use data_efficiency.data_sampling.curriculum_learning", has_switch=True),
    ("progressive_layer_drop",): Dead("drop layers in the model itself", has_switch=True),
    (_ZERO, "mics_shard_size"): Dead("use mesh.dp_shard (ranks of one shard group) with mesh.dp_replicate", off_value=-1),
    (_ZERO, "mics_hierarchical_params_gather"): Dead("use mesh.dp_shard with mesh.dp_replicate"),
    (_ZERO, "zeropp_loco_param"): Dead("use zero_optimization.zero_quantized_gradients without it"),
    (_ZERO, "legacy_stage1"): Dead("remove the key; stage 1 has one implementation"),
}

# foreign keys that configs really carry -> what to tell instead of "unknown key"
_BF16_SCALE = "bf16 needs no loss scale; remove bf16."
HINTS: dict[Path, str] = {
    ("fp16", "opt_level"): "an option of Apex; remove it, fp16.enabled says all there is",
    ("fp16", "fp16"): "not a key; use fp16.enabled",
    ("fp16", "fp16_scale_tolerance"): "an option of another framework; use fp16.hysteresis (overflows tolerated before the scale falls)",
    **{
        ("bf16", name): f"{_BF16_SCALE}{name}"
        for name in (
            "loss_scale",
            "initial_scale_power",
            "loss_scale_window",
            "hysteresis",
            "consecutive_hysteresis",
            "min_loss_scale",
        )
    },
    ("optimizer", "params", "max_grad_norm"): "clipping belongs to the engine; use gradient_clipping at the top level",
}


def modernise(draft: Draft) -> None:
    """Map deprecated spellings to current keys, and take out keys of removed features or record them as problems."""
    _bool_zero(draft)
    for path, old_names in _RENAMED.items():
        for old_name in old_names:
            _rename(draft, (*path[:-1], old_name), path)
    _offload_switches(draft)
    _compile_switches(draft)
    for path, dead in DEAD.items():
        _bury(draft, path, dead)


def _bool_zero(draft: Draft) -> None:
    value = draft.get(_ZERO)
    if isinstance(value, bool):
        stage = 1 if value else 0
        draft.drop((_ZERO,))
        draft.put((_ZERO, "stage"), stage, draft.where((_ZERO,)))
        draft.written[(_ZERO, "stage")] = (_ZERO,)
        draft.note((_ZERO, "stage"), "deprecated", f"deprecated spelling named; {str(value).lower()} means zero_optimization.stage {stage}")


def _rename(draft: Draft, old: Path, new: Path) -> None:
    if draft.get(*old) is MISSING:
        return
    if draft.get(*new) is not MISSING:
        value = draft.get(*old)
        if value != draft.get(*new):
            draft.refuse(old, f"deprecated spelling of {dotted(new)}, which is given too; keep only {dotted(new)}")
        draft.drop(old)
        return
    draft.move(old, new)
    draft.note(new, "deprecated", f"deprecated spelling named; write {dotted(new)}")


def _offload_switches(draft: Draft) -> None:
    pinned = draft.get(_ZERO, "cpu_offload_use_pin_memory")
    for old_name, target in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        old, new = (_ZERO, old_name), (_ZERO, target)
        value = draft.get(*old)
        if value is MISSING:
            continue
        if value is not None and not isinstance(value, bool):
            draft.refuse(old, f"deprecated spelling, expected true or false; write {dotted(new)}.device")
        text = f'deprecated spelling named; write {dotted(new)} {{"device": "{"cpu" if value is True else "none"}"}}'
        draft.note(old, "deprecated", text)
        origin = draft.where(old)
        draft.drop(old)
        if value is True and draft.get(*new, "device") not in (MISSING, None, "cpu"):
            draft.refuse((*new, "device"), f"contradicts {dotted(old)}, which is true; keep only {dotted(new)}")
        if value is True and draft.get(*new) is MISSING:
            device: Path = (*new, "device")
            draft.put(device, "cpu", origin)
            draft.written[device] = old
            if isinstance(pinned, bool):
                draft.put((*new, "pin_memory"), pinned, draft.where((_ZERO, "cpu_offload_use_pin_memory")))
    if pinned is not MISSING:
        old = (_ZERO, "cpu_offload_use_pin_memory")
        if pinned is not None and not isinstance(pinned, bool):
            draft.refuse(old, "deprecated spelling, expected true or false; write offload_optimizer.pin_memory")
        draft.note(old, "deprecated", "deprecated spelling named; write zero_optimization.offload_optimizer.pin_memory")
        draft.drop(old)


def _compile_switches(draft: Draft) -> None:
    disable, deep = draft.get("compile", "disable"), draft.get("compile", "deepcompile")
    if isinstance(disable, bool):
        draft.note(("compile", "disable"), "deprecated", "deprecated spelling named; write compile.enabled")
        origin = draft.where(("compile", "disable"))
        draft.drop(("compile", "disable"))
        if draft.get("compile", "enabled") is MISSING:
            draft.put(("compile", "enabled"), not disable, origin)
            draft.written[("compile", "enabled")] = ("compile", "disable")
    elif disable is not MISSING:
        draft.refuse(("compile", "disable"), f"deprecated spelling of compile.enabled; expected true or false, got {disable!r}")
        draft.drop(("compile", "disable"))
    if deep is True and draft.get("compile", "enabled") is MISSING:
        draft.put(("compile", "enabled"), True, draft.where(("compile", "deepcompile")))
        draft.note(("compile", "deepcompile"), "derived", "honoured as compile.enabled: units are compiled with torch.compile")


def _bury(draft: Draft, path: Path, dead: Dead) -> None:
    value = draft.get(*path)
    if value is MISSING:
        return
    if _is_off(value, dead):
        draft.note(path, "ignored_block", f"switched off, and the feature is gone ({dead.instead}); the key can be removed")
    else:
        draft.refuse(path, f"this feature is gone: {dead.instead}")
    draft.drop(path)


def _is_off(value: Any, dead: Dead) -> bool:
    if value in (None, False) or value == {} or (dead.off_value is not MISSING and value == dead.off_value):
        return True
    if not dead.has_switch or not isinstance(value, dict):
        return False
    switches = [leaf for path, leaf in walk(value) if path and path[-1] == "enabled"]
    return all(switch in (False, None, "auto") for switch in switches)


def renamed_keys() -> list[tuple[Path, Path]]:
    """Return (old path, present path) of every key that was only renamed, for the schema."""
    return [((*path[:-1], old_name), path) for path, old_names in _RENAMED.items() for old_name in old_names]


def replaced_switches() -> list[tuple[Path, Path]]:
    """Return (path of an old true-or-false key, path of the key that took its place), for the schema."""
    return [
        ((_ZERO, "cpu_offload"), (_ZERO, "offload_optimizer", "device")),
        ((_ZERO, "cpu_offload_param"), (_ZERO, "offload_param", "device")),
        ((_ZERO, "cpu_offload_use_pin_memory"), (_ZERO, "offload_optimizer", "pin_memory")),
        (("compile", "disable"), ("compile", "enabled")),
    ]
