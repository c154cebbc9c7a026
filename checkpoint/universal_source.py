"""A universal directory as a source: one folder for each parameter, one file for each of its states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from . import archive
from .deepspeed import sharded
from .deepspeed.experts import EXPERT
from .deepspeed.files import DEEPSPEED_CLASSES, find, load, number
from .deepspeed.found import options_of, scalar, shape_of, whole
from .deepspeed.source import COUNTERS, OWN_KEYS, scaler_of
from .deepspeed.whole import names_with
from .elements import Elements
from .pickles import Stored
from .source import MASTER, WEIGHT, Parameter, Scalar, Table

ZERO, OPTIMIZER_STATE, PARAM = "zero", "optimizer_state.pt", "param"
NUMBER_STATES = ("step",)


def is_universal(folder: Path) -> bool:
    """Whether a folder is a universal checkpoint."""
    return (folder / ZERO).is_dir()


def open_universal(folder: Path, inert: tuple[str, ...] = ()) -> UniversalSource:
    """Open a universal directory; a parameter's files are opened when it is asked for.

    Raises:
        CheckpointError: the model states or the common optimizer state are missing or damaged.
    """
    return _Opening(folder, inert).source()


@dataclass
class UniversalSource(Table):
    """A universal directory. Files of a parameter are looked at when it is first asked for."""

    known: set[str] = field(default_factory=set)

    def _of(self, name: str) -> dict[str, Elements]:
        if name in self.table and name not in self.known:
            self.known.add(name)
            self._look(name)
        return super()._of(name)

    def _look(self, name: str) -> None:
        held = self.where.setdefault(name, {})
        for file in sorted((self.path / ZERO / name).glob("*.pt")):
            stored = stored_in(file)
            if not isinstance(stored, Stored) or (not stored.shape and file.stem in NUMBER_STATES):
                kept = scalar(stored)
                if kept is not None:
                    self.numbers.setdefault(name, {})[file.stem] = kept
                continue
            held[file.stem] = whole(stored)
            if stored.numel != self.table[name].numel:
                self.shapes[name, file.stem] = stored.shape
        if MASTER in held and (name, MASTER) in self.shapes:
            self.missing[name, MASTER] = f"it has {held.pop(MASTER).numel} elements, the parameter {self.table[name].numel}"

    def scalars(self, name: str) -> Mapping[str, Scalar]:
        """Return the single numbers that the optimizer keeps for a parameter."""
        self._of(name)
        return super().scalars(name)


def stored_in(file: Path) -> Any:
    """Return the tensor, unread, or the number in one file of a universal directory: bare, or in a dictionary that describes it.

    Raises:
        CheckpointError: the file is damaged or holds something else.
    """
    value = archive.load(file, DEEPSPEED_CLASSES)
    if isinstance(value, dict):
        if not isinstance(value.get(PARAM), Stored):
            raise CheckpointError(f"{file} holds a dictionary without the tensor {PARAM!r}; is it a file of a universal checkpoint?")
        return value[PARAM]
    return value


class _Opening:
    """One universal directory while it is being opened."""

    def __init__(self, folder: Path, inert: tuple[str, ...]) -> None:
        self.folder = folder
        files = find(folder)
        self.heads = [load(files.model[key], inert) for key in sorted(files.model)]
        self.head = self.heads[0]
        self.sharded = files.sharded_model
        self.tp = int((self.head.get("checkpoint_parallel_dimensions") or {}).get("tp_degree") or 1)
        self.common = self._common(inert)

    def _common(self, inert: tuple[str, ...]) -> dict[str, Any]:
        path = self.folder / ZERO / OPTIMIZER_STATE
        return load(path, inert) if path.exists() else {}

    def source(self) -> UniversalSource:
        """Read what is not in the parameters' folders."""
        source = UniversalSource(path=self.folder)
        folders = sorted(entry.name for entry in (self.folder / ZERO).iterdir() if entry.is_dir())
        modules, aliases = self._modules()
        buffers = {name for head in self.heads for name in head.get("buffer_names") or ()}
        aliases.update({alias: owner for alias, owner in (self.head.get("shared_params") or {}).items() if owner != alias})
        shapes = self._shapes()
        weights = {name: (stored.shape, whole(stored)) for name, stored in modules.items() if stored.numel or not self.sharded}
        if self.sharded:
            weights.update(sharded.frozen(self.heads))
        for name in [*weights, *(name for name in folders if name not in weights)]:
            if name in buffers:
                shape, elements = weights.get(name) or self._in_folder(name)
                source.stored_buffers[name], source.buffer_shapes[name] = elements, shape
        known = {*modules, *shapes, *folders, *weights}
        order = [*(name for name in self.head.get("module") or () if name in known), *shapes, *folders, *weights]
        for name in dict.fromkeys(name for name in order if name not in buffers and name not in aliases):
            self._add(source, name, shapes, weights, [alias for alias, owner in aliases.items() if owner == name])
        self._describe(source)
        return source

    def _modules(self) -> tuple[dict[str, Stored], dict[str, str]]:
        """Return the tensors of the model states, and alias -> name for those that share elements."""
        if self.tp > 1 or self.head.get("module") is None:
            return {}, {}
        held, tied = names_with(self.head["module"], ())
        return held, {alias: name for name, others in tied.items() for alias in others}

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of trainable parameters; none where the model states know slices only."""
        if self.tp > 1:
            return {}
        return {name: shape_of(shape) for head in self.heads for group in head.get("param_shapes") or () for name, shape in group.items()}

    def _in_folder(self, name: str) -> tuple[tuple[int, ...], Elements]:
        stored = stored_in(self.folder / ZERO / name / f"{MASTER}.pt")
        return stored.shape, whole(stored)

    def _add(self, source: UniversalSource, name: str, shapes: Mapping[str, Any], weights: Mapping[str, Any], aliases: list[str]) -> None:
        files = {file.stem for file in (self.folder / ZERO / name).glob("*.pt")}
        if name not in weights and MASTER not in files:
            if name in shapes:
                source.missing[name, MASTER] = f"{self.folder / ZERO / name / (MASTER + '.pt')} is missing"
            elif not files:
                return
        shape = shapes.get(name) or (weights[name][0] if name in weights else self._in_folder(name)[0] if MASTER in files else ())
        dtype = weights[name][1].dtype if name in weights else self._dtype()
        trainable = name in shapes or bool(files - {MASTER})
        source.table[name] = Parameter(name, shape, dtype, trainable, tuple(aliases))
        if name in weights:
            source.where[name] = {WEIGHT: weights[name][1]}

    def _dtype(self) -> torch.dtype:
        config = self.head.get("ds_config") or {}
        for key, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            if isinstance(config.get(key), Mapping) and config[key].get("enabled") in (True, "true"):
                return dtype
        return torch.float32

    def _describe(self, source: UniversalSource) -> None:
        source.param_groups = self._groups(source)
        self._numbers(source)
        source.scheduler_state = archive.materialize(self.head.get("lr_scheduler"))
        source.scaler_state = scaler_of(self.common)
        source.counts = {key: int(self.head[key]) for key in COUNTERS if isinstance(self.head.get(key), int)}
        source.client = {key: archive.materialize(value) for key, value in self.head.items() if key not in OWN_KEYS}
        source.about = {
            "writer": "universal",
            "version": self.head.get("ds_version"),
            "tag": self.folder.name,
            "stage": int(number(self.common.get("zero_stage", 1))),
            "ranks": {"tp": self.tp},
            "notes": [],
        }

    def _numbers(self, source: UniversalSource) -> None:
        """Stage 3 keeps the step in the common file, one for each sub-group."""
        states = (self.common.get("optimizer_state_dict") or {}).get("state") or {}
        for index, group in enumerate(self.head.get("param_shapes") or ()):
            for key, value in states.get(index, states.get(0, {})).items():
                kept = scalar(value)
                if kept is not None:
                    for name in group:
                        source.numbers.setdefault(name, {})[key] = kept

    def _groups(self, source: UniversalSource) -> list[dict[str, Any]]:
        groups = []
        placed: set[str] = set()
        for index, options in enumerate(self.common.get("param_groups") or ()):
            ids = options.get("params", [index]) if self.sharded else [index]
            names = [name for head in self.heads for at in ids for name in self._names_in(head, at) if name in source.table]
            if options.get("moe"):  # the shapes are those of one rank, whose experts have numbers of their own
                names = [name for name in source.table if EXPERT.match(name) and source.table[name].trainable and name not in placed]
            names = [name for name in dict.fromkeys(names) if name not in placed]
            placed.update(names)
            groups.append({**options_of(options), "params": names})
        return groups

    def _names_in(self, head: Mapping[str, Any], index: int) -> list[str]:
        listed = head.get("param_shapes") or []
        return list(listed[index]) if index < len(listed) else []
