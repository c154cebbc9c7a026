"""Where a rank stands in a model that is cut into stages, and the sizes of the whole model, which no stage holds."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from ..ledger.problems import LedgerError
from ..ledger.records import Place
from ..ledger.shapes.load import read_shape
from ..ledger.shapes.shape import ModelShape
from ..pipe.auto import CutModel
from ..pipe.module import PipelineModule
from ..pipe.specs import name_of, outline

if TYPE_CHECKING:
    from .engine import Engine
    from .pipeline_setup import Cut


def cut_of(engine: Engine) -> Cut | None:
    """Return how an engine's model is cut into stages, or None for one that is whole."""
    return getattr(engine, "cut", None)


def place_of(engine: Engine) -> Place:
    """Return where a rank stands; a model in one piece is one stage."""
    cut = cut_of(engine)
    if cut is None:
        return Place(0, 1, (engine.comm.rank,), tuple(range(engine.comm.world)))
    return Place(cut.stage, cut.stages, tuple(cut.chain), tuple(cut.grid.ranks[cut.stage]), _layers(cut.parts))


def whole_shape(module: nn.Module, cut: Cut | None) -> ModelShape:
    """Return the sizes of the whole model as its modules say them.

    Raises:
        LedgerError: they do not.
    """
    if cut is None:
        return read_shape(module)
    if isinstance(cut.parts, PipelineModule):
        return read_shape(_as_model(cut.parts.layer_specs))
    if cut.shape is None:
        raise LedgerError("the model that was cut into stages does not say its sizes")
    return cut.shape


def shape_or_none(module: nn.Module) -> ModelShape | None:
    """Return the sizes of a model, or None where it does not say them."""
    try:
        return read_shape(module)
    except LedgerError:
        return None


def _layers(parts: Any) -> tuple[int, ...]:
    """Return how many of the model's equal layers each part has."""
    if isinstance(parts, CutModel):
        marks = [1] * parts.bounds[-1]
    elif isinstance(parts, PipelineModule):
        names = [name_of(layer) for layer in parts.layer_specs]
        common = Counter(names).most_common(1)[0][0]
        marks = [int(name == common) for name in names]
    else:
        return ()
    return tuple(sum(marks[low:high]) for low, high in itertools.pairwise(parts.bounds))


def _as_model(specs: Sequence[Any]) -> nn.Module:
    """Return a list of layers as a module with a list of the equal ones, without memory: so sizes can be read off it."""
    bodies = [body for layer in specs if (body := outline(layer)) is not None]
    common = Counter(type(body) for body in bodies).most_common(1)[0][0] if bodies else nn.Module
    whole = nn.Module()
    whole.layers = nn.ModuleList([body for body in bodies if type(body) is common])
    for number, body in enumerate(bodies):
        if type(body) is not common:
            whole.add_module(f"end_{number}", body)
    return whole
