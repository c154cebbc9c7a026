"""Pipelines: one file of weights for each layer, and names that start with the layer's number or with `tied_modules`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch

from .. import elements
from ..elements import Elements
from ..pickles import Stored
from .files import Files, load

TIED = "tied_modules."


@dataclass
class Layers:
    """The weights of all layers: layer -> name within the layer -> one tensor for each tensor-parallel rank."""

    weights: dict[int, dict[str, list[Stored]]] = field(default_factory=dict)

    def flat(self) -> dict[str, list[Stored]]:
        """Return them under the names that the module of the whole pipeline would give them if nothing were tied."""
        return {f"{layer}.{name}": held for layer, named in self.weights.items() for name, held in named.items()}


def read_layers(files: Files, tp: int, inert: tuple[str, ...]) -> Layers:
    """Read which tensors each layer's file holds.

    Raises:
        CheckpointError: a file is damaged, or a tensor-parallel rank's is missing.
    """
    layers = Layers()
    for layer in sorted({layer for layer, _ in files.layers}):
        named: dict[str, list[Stored]] = {}
        for rank in range(tp):
            for name, stored in load(files.need("layers", (layer, rank)), inert).items():
                if isinstance(stored, Stored):
                    named.setdefault(name, []).append(stored)
        layers.weights[layer] = named
    return layers


def tie(layers: Layers, masters: Mapping[str, Elements], shapes: Mapping[str, tuple[int, ...]], buffers: Collection[str]) -> dict[str, str]:
    """Return `layer.name` -> `tied_modules.key.name` for the layers that are occurrences of a tied module.

    The files do not say which layers these are: they are those whose names no optimizer and no list of buffers knows. If
    several have the right names and shapes, the master's values decide.

    Args:
        layers: the layers' weights.
        masters: where the optimizer keeps the parameters, under its names.
        shapes: the shapes of these parameters on one tensor-parallel rank.
        buffers: the names of the buffers of all stages.
    """
    tied: dict[str, dict[str, str]] = {}
    for name in (*shapes, *buffers):
        if name.startswith(TIED):
            key, _, rest = name[len(TIED) :].partition(".")
            tied.setdefault(key, {})[rest] = name
    found: dict[str, str] = {}
    for names in tied.values():
        fitting = [layer for layer, named in layers.weights.items() if _fits(layer, named, names, shapes)]
        if len(fitting) > 1:
            fitting = [layer for layer in fitting if _equal(layers.weights[layer], names, masters)]
        for layer in fitting:
            found.update({f"{layer}.{rest}": full for rest, full in names.items()})
    return found


def _fits(layer: int, named: Mapping[str, list[Stored]], names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    for rest, full in names.items():
        if rest not in named or f"{layer}.{rest}" in shapes:
            return False
        if full in shapes and named[rest][0].shape != shapes[full]:
            return False
    return True


def _equal(named: Mapping[str, list[Stored]], names: Mapping[str, str], masters: Mapping[str, Elements]) -> bool:
    for rest, full in names.items():
        if full in masters and len(named[rest]) == 1:
            weight = elements.read(elements.Whole(named[rest][0]))
            if not torch.equal(elements.read(masters[full]).to(weight.dtype), weight):
                return False
    return True
