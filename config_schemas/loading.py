"""`load`: from any source to a checked, resolved config, or one error that lists every problem."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..environment import world_size_hint
from ..errors import ConfigError
from .auto import BATCH_KEYS, Facts, resolve_auto
from .batch import MICRO, STEPS, TRAIN, solve_batch
from .draft import MISSING, Draft, dotted, walk
from .fields import as_int
from .legacy import modernise
from .root import Config
from .rules import check_rules, model_parallel_ranks
from .source import read_source
from .validate import quiet_idle_precision, validate

_COUNTS = {2: "both", 3: "all three", 4: "all four", 5: "all five"}


def load(
    source: str | os.PathLike[str] | Mapping[str, Any] | Config,
    *,
    dp_world: int | None = None,
    facts: Facts | None = None,
    ranks: int | None = None,
) -> Config:
    """Return the checked config with every default, "auto" and batch size resolved.

    `dp_world` is the number of data-parallel ranks; without it it follows from `ranks` (all ranks of the job), from what
    the launcher announced, or from three given batch sizes, and is 1 otherwise. `facts` resolve "auto".

    Raises:
        ConfigError: the source cannot be read, or does not say something that can be honoured; every problem is listed.
    """
    if isinstance(source, Config):
        source = source.to_dict()
    document = read_source(source)
    draft = Draft(document)
    modernise(draft)
    for name in BATCH_KEYS:  # null is how some tools write "not set"
        if draft.get(name) is None:
            draft.drop((name,))
    resolve_auto(draft, facts or Facts())
    quiet_idle_precision(draft)
    validate(draft)
    check_rules(draft, facts is not None)
    world = _data_parallel_ranks(draft, dp_world, ranks)
    if world is not None:
        _settle_batch(draft, world, facts or Facts())
        _settle_mesh(draft, world, known=dp_world is not None or ranks is not None)
    _derive(draft)
    if draft.problems:
        raise ConfigError(_report(draft))
    config = Config.model_validate(draft.data)
    config.notes.extend(draft.notes)
    origins = {dotted(path): origin for path, origin in draft.origins.items()}
    config.origin.update({dotted(path): origins.get(dotted(path), "default") for path, _ in walk(config.to_dict())})
    return config


def _report(draft: Draft) -> str:
    lines = [text for _, text in sorted(draft.problems, key=lambda problem: problem[0])]
    count = len(lines)
    name = draft.document.name or "config"
    if count == 1:
        return f"{name}: 1 problem\n  {lines[0]}"
    return "\n  ".join([f"{name}: {count} problems, {_COUNTS.get(count, f'all {count}')} in one report", *lines])


def _data_parallel_ranks(draft: Draft, dp_world: int | None, ranks: int | None) -> int | None:
    if dp_world is not None:
        return dp_world
    shared = model_parallel_ranks(draft)
    world = ranks if ranks is not None else _announced_ranks()
    if world is not None:
        if world % shared == 0:
            return world // shared
        draft.refuse(("mesh",), f"{world} ranks cannot be divided by the {shared} ranks that share one model (pp x cp x tp)")
        return None
    given = [_batch_number(draft, name) for name in (TRAIN, MICRO, STEPS)]
    train, micro, gas = given
    if train and micro and gas and train % (micro * gas) == 0:
        return train // (micro * gas)
    return 1


def _announced_ranks() -> int | None:
    try:
        return world_size_hint()
    except ValueError as error:  # a launch variable that is no number
        raise ConfigError(str(error)) from None


def _batch_number(draft: Draft, name: str) -> int | None:
    try:
        value = draft.get(name)
        return None if value in (MISSING, None) else as_int(value)
    except ValueError:
        return None


def _settle_batch(draft: Draft, world: int, facts: Facts) -> None:
    """Solve the batch sizes, filling "auto" with the caller's numbers first, and write all three back."""
    if any((name,) in draft.refused for name in BATCH_KEYS):
        return
    train, micro, gas = (_batch_number(draft, name) for name in BATCH_KEYS)
    reasons: dict[str, str] = {}
    if gas is None and (STEPS,) in draft.autos and (train is None or micro is None) and facts.gradient_accumulation_steps:
        gas, reasons[STEPS] = facts.gradient_accumulation_steps, "from the caller"
    open_micro = micro is None and ((MICRO,) in draft.autos or (TRAIN,) in draft.autos)
    if open_micro and (train is None or gas is None) and facts.micro_batch:
        micro, reasons[MICRO] = facts.micro_batch, "from the caller"
    if open_micro and train is None and micro is None:
        micro, reasons[MICRO] = 1, "the default, as no batch size is given"
    given = {name: draft.where((name,)) for name in BATCH_KEYS if draft.get(name) is not MISSING}
    try:
        solved = solve_batch(train, micro, gas, world, origin={**given, **reasons})
    except ConfigError as error:
        draft.refuse((TRAIN,) if train is not None else (MICRO,), str(error))
        return
    formula = f"{solved.train} = {solved.micro} x {solved.steps} x {world} rank{'' if world == 1 else 's'}"
    for key, value in zip(BATCH_KEYS, solved, strict=True):
        if key in given:
            continue
        was_auto = (key,) in draft.autos
        draft.put((key,), value, "auto" if was_auto else "derived")
        text = f"{'auto -> ' if was_auto else ''}{value} ({reasons.get(key, formula)})"
        draft.note((key,), "auto" if was_auto else "derived", text)


def _settle_mesh(draft: Draft, world: int, known: bool) -> None:
    """Check that the two data-parallel axes multiply to the ranks there are."""
    try:
        replicas = max(1, as_int(draft.get("mesh", "dp_replicate")))
    except ValueError:
        replicas = 1
    if not known:
        return
    try:
        shards = as_int(draft.get("mesh", "dp_shard"))
    except ValueError:
        if world % replicas:
            draft.refuse(("mesh", "dp_replicate"), f"{world} data-parallel ranks cannot be divided into {replicas} copies")
        return
    if shards * replicas != world:
        draft.refuse(
            ("mesh", "dp_shard"), f"dp_replicate {replicas} x dp_shard {shards} must be the {world} data-parallel ranks; leave dp_shard out"
        )


def _derive(draft: Draft) -> None:
    if draft.get("zero_optimization", "overlap_comm") in (MISSING, None) and not draft.problems:
        section = draft.get("zero_optimization")
        stage = 0 if section is MISSING else as_int(section.get("stage", 0))
        path = ("zero_optimization", "overlap_comm")
        draft.put(path, stage == 3, "auto" if path in draft.autos else "default")
