"""Which parameter of the model is which in a checkpoint, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..errors import CheckpointError
from ..zero.unit import Unit
from .names import ModuleNames, names_of, plain
from .source import Source

Rename = Callable[[str], "str | None"]
_SHOWN = 10


@dataclass
class Matching:
    """Names here -> names there.

    Attributes:
        parameters: plain name of a placed parameter -> its name in the checkpoint; those that keep their values are absent.
        buffers: name here -> (buffer here, its name there, its saved value).
        missing: names that the checkpoint lacks. unexpected: names there that the model lacks.
        remarks: lines about what is different but no error.
    """

    parameters: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, tuple[torch.Tensor, str, torch.Tensor]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def match(module: nn.Module, units: Sequence[Unit], source: Source, rename: Rename | None, left_out: Iterable[str]) -> Matching:
    """Find the counterpart of every parameter and buffer.

    Args:
        rename: name here -> name in the checkpoint; None leaves the parameter or buffer as it is.
        left_out: names of frozen parameters that the checkpoint was told to leave out.

    Raises:
        CheckpointError: shapes differ; names each parameter with both shapes.
    """
    found, names = Matching(), names_of(module)
    there, held = source.names(), source.buffers()
    translate = rename or (lambda name: name)
    shapes: list[str] = []
    spared, left_out = set(), set(left_out)
    for unit in units:
        for slot in unit.slots:
            own = plain(slot.name)
            wanted = [translate(name) for name in dict.fromkeys([own, *names.parameters.get(id(slot.param), ())])]
            if all(name is None for name in wanted):
                spared.add(own)
                continue
            name = next((there[name] for name in wanted if name in there), None)
            if name is None:
                if own in left_out and not unit.trainable:
                    found.remarks.append(f"{own!r} keeps its values: the checkpoint was saved without frozen parameters")
                else:
                    found.missing.append(own)
                continue
            saved = source.parameters[name]
            if tuple(saved.shape) != tuple(slot.shape):
                shapes.append(f"{own!r} is {tuple(slot.shape)} here and {tuple(saved.shape)} in the checkpoint")
            if saved.trainable != unit.trainable:
                found.remarks.append(f"{own!r} is {_kind(unit.trainable)} here and was {_kind(saved.trainable)} when it was saved")
            found.parameters[own] = name
    _match_buffers(found, names, source, held, translate, shapes)
    if shapes:
        raise CheckpointError(
            f"{source.facts()['path']} does not fit the model: {_listed(shapes, '; ')}. Build the model as it was saved, "
            "or leave these out with rename=lambda name: None if ... else name"
        )
    spared |= {name for name in names.buffers if translate(name) is None}
    used = set(found.parameters.values()) | {name for _, name, _ in found.buffers.values()} | spared | set(names.aliases)
    used |= {alias for parameter in source.parameters.values() for alias in parameter.aliases}
    found.unexpected = [name for name in [*source.parameters, *held] if name not in used]
    return found


def _match_buffers(
    found: Matching, names: ModuleNames, source: Source, held: Mapping[str, torch.Tensor], translate: Rename, shapes: list[str]
) -> None:
    there = source.names()
    for own, (owner, key) in names.buffers.items():
        buffer, name = owner._buffers[key], translate(own)
        assert buffer is not None
        if name is None:
            continue
        if name in held:
            saved = held[name]
        elif name in there:  # weights alone do not tell parameters from buffers
            name = there[name]
            saved = source.tensor(name, source.best_weight(name))
        else:
            found.missing.append(own)
            continue
        if saved.shape != buffer.shape:
            shapes.append(f"buffer {own!r} is {tuple(buffer.shape)} here and {tuple(saved.shape)} in the checkpoint")
        found.buffers[own] = (buffer, name, saved)


def check(found: Matching, source: Source, strict: bool) -> None:
    """Refuse what is missing or unexpected, or remark on it when not strict.

    Raises:
        CheckpointError: strict, and names differ; lists them.
    """
    parts = []
    if found.missing:
        parts.append(f"the checkpoint lacks {_listed(map(repr, found.missing))}")
    if found.unexpected:
        parts.append(f"the model lacks {_listed(map(repr, found.unexpected))}")
    if parts and strict:
        raise CheckpointError(
            f"{source.facts()['path']} does not fit the model: {' and '.join(parts)}. Pass load_module_strict=False to load what fits, "
            "or rename= to map names"
        )
    found.remarks += [f"{part}; left as it is" for part in parts]


def _kind(trainable: bool) -> str:
    return "trained" if trainable else "frozen"


def _listed(items: Iterable[str], separator: str = ", ") -> str:
    given = list(items)
    more = f"{separator}and {len(given) - _SHOWN} more" if len(given) > _SHOWN else ""
    return separator.join(given[:_SHOWN]) + more
