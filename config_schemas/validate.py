"""Runs the typed sections over the raw values and turns what they object to into lines that users can act on."""

from __future__ import annotations

import difflib
import json
from typing import Any

from pydantic import ValidationError

from .draft import MISSING, Draft
from .fields import Section
from .legacy import HINTS
from .optim import DEAD_OPTIMIZERS, KNOWN_PARAMS, OptimizerParams
from .precision import Bf16, Fp16, TorchAutocast
from .root import Config
from .scanner import Path
from .schedule import KNOWN_SCHEDULES
from .tree import advise, find, keys_of, sections_in

_PRECISION: dict[str, type[Section]] = {"fp16": Fp16, "bf16": Bf16, "torch_autocast": TorchAutocast}


def quiet_idle_precision(draft: Draft) -> None:
    """Take invalid and foreign keys out of precision blocks that are off, with a note for each."""
    for name, model in _PRECISION.items():
        block = draft.get(name)
        if not isinstance(block, dict) or block.get("enabled", False) is not False:
            continue
        for error in _errors(model, block):
            path: Path = (name, *error["loc"][:1])
            if error["type"] == "extra_forbidden" and difflib.get_close_matches(str(path[1]), ["enabled"], cutoff=0.75):
                continue  # a misspelt switch would leave the block off in silence
            if draft.get(*path) is not MISSING:
                draft.note(path, "ignored_block", f"not valid, and without effect: {name} is off ({_explain(path, error)})")
                draft.drop(path)


def validate(draft: Draft) -> None:
    """Check every section, the parameters of known optimizers and schedules included; problems go to the draft."""
    _optimizer_params(draft)
    _scheduler_params(draft)
    for error in _errors(Config, draft.data):
        path: Path = tuple(error["loc"])
        if path not in draft.refused:
            draft.refuse(path, _explain(path, error))


def _errors(model: type[Section], data: Any) -> list[Any]:
    try:
        model.model_validate(data)
    except ValidationError as error:
        return error.errors(include_url=False)
    return []


def _optimizer_params(draft: Draft) -> None:
    kind, params = draft.get("optimizer", "type"), draft.get("optimizer", "params")
    if isinstance(kind, str) and kind.lower() in DEAD_OPTIMIZERS:
        draft.refuse(("optimizer", "type"), f"{kind} is gone; use {DEAD_OPTIMIZERS[kind.lower()]}")
    if not isinstance(params, dict):
        return
    known = KNOWN_PARAMS.get(kind.lower()) if isinstance(kind, str) else None
    for name in list(params):
        path = ("optimizer", "params", name)
        if path in HINTS:
            draft.refuse(path, HINTS[path])
        elif known is not None and name not in known:
            draft.refuse(path, f"{kind} has no such parameter; {advise(path, sorted(known))}")
    _adopt(draft, ("optimizer", "params"), OptimizerParams, params, defaults=False)


def _scheduler_params(draft: Draft) -> None:
    kind, params = draft.get("scheduler", "type"), draft.get("scheduler", "params")
    model = KNOWN_SCHEDULES.get(kind) if isinstance(kind, str) else None
    if model is None:
        near = [name for name in KNOWN_SCHEDULES if isinstance(kind, str) and name.lower() == kind.lower()]
        if near:
            draft.refuse(("scheduler", "type"), f"names are case-sensitive; write {near[0]}")
        return
    params = {} if params is MISSING else params
    if not isinstance(params, dict):
        return
    if "total_num_steps" in keys_of(model) and "total_num_steps" not in params:
        draft.refuse(("scheduler", "params", "total_num_steps"), f'required by {kind}; give the steps of the run, or "auto"')
    _adopt(draft, ("scheduler", "params"), model, params, defaults=True)


def _adopt(draft: Draft, path: Path, model: type[Section], params: dict[str, Any], defaults: bool) -> None:
    """Check free parameters against their model and put the converted values back; with `defaults` all of them."""
    errors = [error for error in _errors(model, params) if (*path, *error["loc"]) not in draft.refused]
    for error in errors:
        full = (*path, *error["loc"])
        if error["type"] == "extra_forbidden":
            draft.refuse(full, f"unknown key; {advise(full, list(keys_of(model)))}")
        else:
            draft.refuse(full, _explain(full, error))
    if errors or any(refused[: len(path)] == path for refused in draft.refused):
        return
    for name, value in model.model_validate(params).model_dump(exclude_unset=not defaults).items():
        draft.put((*path, name), value, draft.origins.get((*path, name), "default"))


def _explain(path: Path, error: Any) -> str:
    kind, given, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return HINTS.get(path) or f"unknown key; {advise(path, _siblings(path))}"
    if kind == "missing":
        return "required, but not given"
    wanted = _WANTED.get(kind)
    if kind == "value_error":
        text = str(context["error"])
    elif wanted is not None:
        text = "expected " + wanted.format(**context)
    else:
        text = error["msg"][:1].lower() + error["msg"][1:]
    return f"{text}, got {_shown(given)}"


_WANTED = {
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object {{ ... }}",
    "model_type": "an object {{ ... }}",
    "model_attributes_type": "an object {{ ... }}",
    "literal_error": "one of {expected}",
    "greater_than_equal": "a number of at least {ge}",
    "greater_than": "a number above {gt}",
    "less_than_equal": "a number of at most {le}",
    "less_than": "a number below {lt}",
}


def _siblings(path: Path) -> list[str]:
    if len(path) == 1:
        return list(keys_of(Config))
    field = find(path[:-1]) or find(path[:-2])
    model = sections_in(field)[0] if field is not None else None
    return list(keys_of(model)) if model is not None else []


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
