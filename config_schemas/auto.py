"""Resolves "auto": every key gets a value from what is known of the model and the run, and a note says which.

From the facts: fp16.enabled and bf16.enabled (the dtype of the model's parameters), bucket sizes (its hidden size), the
learning rate, the length of the schedule and the batch sizes. pipeline.stages is mesh.pp. Parameters of an optimizer are
left out, so that its own default holds. Every other key gets its default; so the stage is 0 and gradient_clipping 1.0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .batch import MICRO, STEPS, TRAIN
from .draft import MISSING, Draft, walk
from .fields import as_dtype, as_float, as_int
from .optim import KNOWN_PARAMS
from .scanner import Path
from .schedule import KNOWN_SCHEDULES
from .tree import find, keys_of, sections_in

BATCH_KEYS = (TRAIN, MICRO, STEPS)


@dataclass(frozen=True)
class Facts:
    """What the caller knows and a config file cannot: used wherever the config says "auto".

    `param_dtype` is the dtype of the model's parameters ("fp32", "bf16", "fp16", or a torch dtype), `micro_batch` the batch
    size of the caller's loader, `total_steps` the optimizer steps of the whole run. None means not known.
    """

    param_dtype: str | None = None
    hidden_size: int | None = None
    optimizer_lr: float | None = None
    micro_batch: int | None = None
    gradient_accumulation_steps: int | None = None
    total_steps: int | None = None


class _Choice(NamedTuple):
    value: Any  # MISSING: the key is left out
    why: str


def resolve_auto(draft: Draft, facts: Facts) -> None:
    """Replace every "auto" in the draft; those of the batch keys are only marked, for the batch solver."""
    for path, value in list(walk(draft.data)):
        if value != "auto" or not isinstance(value, str) or not _is_known(draft, path):
            continue
        draft.autos.add(path)
        if path[0] in BATCH_KEYS:
            draft.drop(path)
            continue
        choice = _choose(draft, path, facts)
        if choice.value is MISSING:
            draft.drop(path)
            draft.note(path, "auto", f"auto -> {choice.why}")
        else:
            draft.put(path, choice.value, "auto")
            draft.note(path, "auto", f"auto -> {_shown(choice.value)} ({choice.why})")


def _shown(value: Any) -> str:
    return {True: "true", False: "false", None: "null"}[value] if value is None or isinstance(value, bool) else str(value)


def _is_known(draft: Draft, path: Path) -> bool:
    if path[:2] == ("optimizer", "params") and len(path) == 3:
        known = KNOWN_PARAMS.get(str(draft.get("optimizer", "type")).lower())
        return known is None or path[2] in known
    if path[:2] == ("scheduler", "params") and len(path) == 3:
        model = KNOWN_SCHEDULES.get(str(draft.get("scheduler", "type")))
        return model is None or path[2] in keys_of(model)
    return find(path) is not None


def _choose(draft: Draft, path: Path, facts: Facts) -> _Choice:
    special = _SPECIAL.get(path)
    if special is not None:
        choice = special(draft, facts)
        if choice is not None:
            return choice
    if path[:2] == ("optimizer", "params"):
        return _Choice(MISSING, "left out, the optimizer's own default")
    if path[:2] == ("scheduler", "params"):
        model = KNOWN_SCHEDULES.get(str(draft.get("scheduler", "type")))
        field = keys_of(model).get(str(path[2])) if model else None
        return _Choice(MISSING, "left out, the schedule's own default") if field is None else _Choice(field.get_default(), "the default")
    field = find(path)
    assert field is not None, path
    default = field.get_default()
    if sections_in(field)[0] is not None:
        return _Choice(MISSING, "the section's defaults")
    return _Choice(default, "chosen by the part that uses it" if default == "auto" else "the default")


def _number(draft: Draft, *path: str) -> float | None:
    try:
        return as_float(draft.get(*path))
    except ValueError:
        return None


def _precision(dtype: str, other: str) -> Callable[[Draft, Facts], _Choice | None]:
    def choose(draft: Draft, facts: Facts) -> _Choice | None:
        if facts.param_dtype is None:
            return _Choice(False, "the model's dtype is not known here")
        if draft.get(other, "enabled") is True:
            return _Choice(False, f"{other}.enabled is true")
        return _Choice(as_dtype(facts.param_dtype) == dtype, f"the model's parameters are {facts.param_dtype}")

    return choose


def _from_hidden(formula: Callable[[int], int], text: str) -> Callable[[Draft, Facts], _Choice | None]:
    def choose(_: Draft, facts: Facts) -> _Choice | None:
        return None if facts.hidden_size is None else _Choice(formula(facts.hidden_size), f"{text} for hidden size {facts.hidden_size}")

    return choose


def _lr(_: Draft, facts: Facts) -> _Choice | None:
    return None if facts.optimizer_lr is None else _Choice(facts.optimizer_lr, "the learning rate of the run")


def _peak(draft: Draft, facts: Facts) -> _Choice | None:
    configured = _number(draft, "optimizer", "params", "lr")
    if configured is not None:
        return _Choice(configured, "optimizer.params.lr")
    if facts.optimizer_lr is not None:
        return _Choice(facts.optimizer_lr, "the learning rate of the run")
    return _Choice(None, "the optimizer's learning rate")


def _total(_: Draft, facts: Facts) -> _Choice | None:
    return _Choice(None, "known when the run starts") if facts.total_steps is None else _Choice(facts.total_steps, "steps of the run")


def _warmup(draft: Draft, facts: Facts) -> _Choice | None:
    total = facts.total_steps or _number(draft, "scheduler", "params", "total_num_steps")
    return None if not total else _Choice(max(1, round(0.03 * total)), f"3 % of {int(total)} steps")


def _stages(draft: Draft, _: Facts) -> _Choice | None:
    try:
        return _Choice(as_int(draft.get("mesh", "pp")), "mesh.pp")
    except ValueError:
        return _Choice(1, "mesh.pp")


def _split(_: Draft, __: Facts) -> _Choice | None:
    return _Choice("auto", "along the model's one list of layers")


_SPECIAL: dict[Path, Callable[[Draft, Facts], _Choice | None]] = {
    ("fp16", "enabled"): _precision("fp16", other="bf16"),
    ("bf16", "enabled"): _precision("bf16", other="fp16"),
    ("optimizer", "params", "lr"): _lr,
    ("scheduler", "params", "warmup_max_lr"): _peak,
    ("scheduler", "params", "total_num_steps"): _total,
    ("scheduler", "params", "warmup_num_steps"): _warmup,
    ("pipeline", "stages"): _stages,
    ("pipeline", "split"): _split,
    ("zero_optimization", "reduce_bucket_size"): _from_hidden(lambda hidden: hidden * hidden, "hidden^2"),
    ("zero_optimization", "stage3_prefetch_bucket_size"): _from_hidden(lambda hidden: int(0.9 * hidden * hidden), "0.9 hidden^2"),
    ("zero_optimization", "stage3_param_persistence_threshold"): _from_hidden(lambda hidden: 10 * hidden, "10 hidden"),
}
