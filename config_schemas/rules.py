"""Rules between keys: what may not be on together, what needs what, and how many ranks share one model."""

from __future__ import annotations

from typing import Any

from .draft import MISSING, Draft, dotted
from .fields import as_dtype, as_float, as_int
from .scanner import Path

_ZERO = "zero_optimization"
# axis -> (its key in the mesh section, other keys that say the same)
_MODEL_AXES: dict[str, tuple[Path, ...]] = {
    "pp": (("mesh", "pp"), ("pipeline", "stages")),
    "cp": (("mesh", "cp"), ("sequence_parallel_size",)),
    "tp": (("mesh", "tp"), ("tensor_parallel", "autotp_size"), ("tensor_parallel", "tp", "tp_size")),
}


def check_rules(draft: Draft, have_facts: bool) -> None:
    """Check what single sections cannot see; problems go to the draft."""
    _precision(draft)
    _offload(draft)
    _axes_agree(draft)
    _total_steps(draft, have_facts)
    _checkpoint(draft)
    if draft.get("data_parallel_size") not in (MISSING, None) and draft.get("sequence_parallel_size") is MISSING:
        draft.refuse(("data_parallel_size",), "only has a meaning beside sequence_parallel_size; remove it or use mesh")
    if draft.get("gradient_predivide_factor") not in (MISSING, 1, 1.0) and draft.get("prescale_gradients") is not True:
        draft.note(("gradient_predivide_factor",), "no_effect", "no effect here because prescale_gradients is false")


def model_parallel_ranks(draft: Draft) -> int:
    """Return how many ranks share one copy of the model: pipeline stages x sequence ranks x tensor ranks."""
    product = 1
    for paths in _MODEL_AXES.values():
        product *= max(_size(draft, path) for path in paths)
    return product


def _size(draft: Draft, path: Path) -> int:
    try:
        return max(1, as_int(draft.get(*path)))
    except ValueError:
        return 1


def _precision(draft: Draft) -> None:
    fp16, bf16 = draft.get("fp16", "enabled") is True, draft.get("bf16", "enabled") is True
    if fp16 and bf16:
        draft.refuse(("bf16", "enabled"), "fp16.enabled and bf16.enabled are both true; a run has one precision, set one of them to false")
    if draft.get("bf16", "bf16_optimizer_states") is True and draft.get("bf16", "bf16_master_weights_and_grads") is not True:
        draft.refuse(("bf16", "bf16_optimizer_states"), "needs bf16.bf16_master_weights_and_grads to be true")
    wanted = draft.get("data_types", "param_dtype")
    if wanted in (MISSING, None) or (fp16 and bf16):
        return
    actual = "fp16" if fp16 else "bf16" if bf16 else "fp32"
    try:
        agrees = as_dtype(wanted) == actual
    except ValueError:
        return
    if not agrees:
        draft.refuse(("data_types", "param_dtype"), f"is {as_dtype(wanted)}, but the fp16 and bf16 blocks make the weights {actual}")


def _offload(draft: Draft) -> None:
    try:
        stage = as_int(draft.get(_ZERO, "stage"))
    except ValueError:
        stage = 0
    for name, least in (("offload_optimizer", 1), ("offload_param", 3)):
        device, path = _lower(draft.get(_ZERO, name, "device")), (_ZERO, name)
        if device == "nvme" and draft.get(*path, "nvme_path") in (MISSING, None):
            draft.refuse((*path, "nvme_path"), 'required when device is "nvme"; give a folder on the drive')
        if device in ("cpu", "nvme") and stage < least:
            draft.note((*path, "device"), "no_effect", f"no effect here because it needs stage {least}{'' if least == 3 else ' or above'}")
    offloads = any(_lower(draft.get(_ZERO, name, "device")) in ("cpu", "nvme") for name in ("offload_optimizer", "offload_param"))
    if draft.get(_ZERO, "sub_group_size") is not MISSING and not offloads:
        draft.note(
            (_ZERO, "sub_group_size"), "no_effect", "no effect here because nothing is offloaded: the optimizer steps all tensors at once"
        )
    _host_activations(draft)
    ratio = draft.get(_ZERO, "offload_optimizer", "ratio")
    try:
        partial = as_float(ratio) < 1
    except ValueError:
        return
    if partial and stage < 3:
        draft.refuse((_ZERO, "offload_optimizer", "ratio"), "a ratio below 1 needs stage 3")


def _host_activations(draft: Draft) -> None:
    section = "activation_checkpointing"
    if draft.get(section, "cpu_checkpointing") is True and draft.get(section, "policy") in (MISSING, None, "none"):
        text = "no effect here because activation_checkpointing.policy is none: only what the script checkpoints itself goes to the host"
        draft.note((section, "cpu_checkpointing"), "no_effect", text)


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _axes_agree(draft: Draft) -> None:
    for axis, paths in _MODEL_AXES.items():
        sizes = {path: _size(draft, path) for path in paths}
        given = {path: size for path, size in sizes.items() if size > 1}
        if len(set(given.values())) > 1:
            said = " and ".join(f"{dotted(path)} {size}" for path, size in given.items())
            draft.refuse(list(given)[-1], f"{said} disagree about the {axis} axis; give it once, as mesh.{axis}")


def _checkpoint(draft: Draft) -> None:
    """What the engine saves by itself needs a place, and an interval from failures their rate."""
    asked = [name for name in ("save_every_steps", "save_every_minutes") if draft.get("checkpoint", name) not in (MISSING, None)]
    asked += [name for name in ("auto_interval", "save_on_sigterm") if draft.get("checkpoint", name) is True]
    if asked and draft.get("checkpoint", "dir") in (MISSING, None) and draft.get("run_dir") in (MISSING, None):
        draft.refuse(("checkpoint", asked[0]), "needs a place to save to: set checkpoint.dir or run_dir")
    if draft.get("checkpoint", "auto_interval") is True and draft.get("checkpoint", "mtbf_hours") in (MISSING, None):
        draft.refuse(("checkpoint", "auto_interval"), "needs checkpoint.mtbf_hours, the mean hours between failures of the job")


def _total_steps(draft: Draft, have_facts: bool) -> None:
    path = ("scheduler", "params", "total_num_steps")
    if have_facts and draft.get(*path) is None:
        draft.refuse(path, "the number of steps of the run is not known; give it as a number")
