"""Names of a module's parameters, buffers and extra states as a checkpoint knows them: the plain model's, compiled or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

_COMPILED = "_orig_mod."  # what torch.compile puts into the names of a wrapped module


def plain(name: str) -> str:
    """Return a name without what torch.compile put into it."""
    return name.replace(_COMPILED, "")


class ModuleNames(NamedTuple):
    """What a module holds by name, each thing once.

    Attributes:
        parameters: id of a parameter -> its names, the first one first.
        buffers: name -> (module, key) of each persistent buffer.
        aliases: further name -> first name, of buffers.
        extra: name -> module, where a module has an extra state of its own.
    """

    parameters: dict[int, list[str]]
    buffers: dict[str, tuple[nn.Module, str]]
    aliases: dict[str, str]
    extra: dict[str, nn.Module]


def names_of(module: nn.Module) -> ModuleNames:
    """Return the names in a module; reads no values."""
    found = ModuleNames({}, {}, {}, {})
    first_of: dict[int, str] = {}
    for name, owner, key, value in _tensors(module):
        if isinstance(value, nn.Parameter):
            names = found.parameters.setdefault(id(value), [])
            if name not in names:
                names.append(name)
        elif id(value) in first_of:
            found.aliases[name] = first_of[id(value)]
        else:
            first_of[id(value)] = name
            found.buffers[name] = (owner, key)
    for path, owner in module.named_modules():
        if type(owner).get_extra_state is not nn.Module.get_extra_state:
            found.extra[plain(f"{path}._extra_state" if path else "_extra_state")] = owner
    return found


def _tensors(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    for path, owner in module.named_modules(remove_duplicate=False):
        lead = plain(f"{path}.") if path else ""
        for key, param in owner._parameters.items():
            if param is not None:
                yield lead + key, owner, key, param
        for key, buffer in owner._buffers.items():
            if isinstance(buffer, torch.Tensor) and key not in owner._non_persistent_buffers_set:
                yield lead + key, owner, key, buffer
