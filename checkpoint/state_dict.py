"""Whole weights out of any checkpoint, on one process and without a process group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import CheckpointError
from . import elements
from .opener import open_source
from .source import WEIGHT, Source

DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
AUTO = "auto"
CHUNK_NUMEL = 4 << 20


@dataclass(frozen=True)
class Weight:
    """One tensor of a state dict before it is read."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    aliases: tuple[str, ...] = ()
    state: str = ""  # of a parameter; a buffer has none

    @property
    def num_bytes(self) -> int:
        """Bytes in the dtype that is asked for."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def dtype_of(given: str | torch.dtype | None) -> torch.dtype | str:
    """Return the dtype that a user names; None means fp32.

    Raises:
        CheckpointError: there is no such dtype.
    """
    if given is None:
        return torch.float32
    if isinstance(given, torch.dtype) or given == AUTO:
        return given
    if given not in DTYPES:
        raise CheckpointError(f"dtype {given!r} is not known; choose {AUTO}, {', '.join(DTYPES)}")
    return DTYPES[given]


def weights_of(source: Source, dtype: torch.dtype | str, exclude_frozen: bool = False) -> Iterator[Weight]:
    """Yield every parameter of a checkpoint, without reading any.

    Args:
        dtype: of floating-point parameters; "auto": in which the model computed.
        exclude_frozen: leave out parameters without gradient.

    Raises:
        CheckpointError: some parameter's weights are nowhere; all such are named.
    """
    lost = []
    for name, parameter in source.parameters.items():
        if exclude_frozen and not parameter.trainable:
            continue
        held = source.states(name)
        try:
            best = source.best_weight(name)
        except CheckpointError as error:
            lost.append(str(error))
            continue
        wanted = parameter.dtype if isinstance(dtype, str) else dtype
        if not parameter.dtype.is_floating_point:
            wanted = parameter.dtype
        exact = WEIGHT in held and source.elements(name, WEIGHT).dtype == wanted and wanted != torch.float32
        yield Weight(name, parameter.shape, wanted, parameter.aliases, WEIGHT if exact else best)
    lost += [f"{name}: {why}" for (name, _), why in source.gaps().items() if name not in source.parameters]
    if lost:
        raise CheckpointError("\n".join(lost))


def read_weight(source: Source, weight: Weight) -> torch.Tensor:
    """Return a parameter's tensor in its shape and dtype; the peak is the tensor and a chunk of 16 MB."""
    held = source.elements(weight.name, weight.state)
    out = torch.empty(held.numel, dtype=weight.dtype)
    if held.dtype == weight.dtype:
        return elements.read(held).view(weight.shape)
    for start in range(0, held.numel, CHUNK_NUMEL):
        stop = min(start + CHUNK_NUMEL, held.numel)
        out[start:stop] = elements.read(held, start, stop)
    return out.view(weight.shape)


def load_state_dict_from_checkpoint(
    path: str | os.PathLike[str],
    tag: str | None = None,
    dtype: str | torch.dtype | None = None,
    exclude_frozen: bool = False,
    inert: tuple[str, ...] = (),
) -> dict[str, torch.Tensor]:
    """Return a state dict for `module.load_state_dict`: whole parameters and buffers on the CPU, no process group needed.

    Tied names share one tensor. Buffers keep their dtype.

    Args:
        path: any checkpoint; see `open_source`.
        tag: which one; default: the latest.
        dtype: of floating-point parameters: "fp32", "bf16", "fp16" or a torch dtype, "auto" for the one in which the model
            computed; default: fp32, from the master copies where there are any.
        exclude_frozen: leave out parameters without gradient.
        inert: see `open_source`.

    Raises:
        CheckpointError: the checkpoint cannot be read, or lacks some parameter's weights.
    """
    return state_dict_of(open_source(path, tag, inert), dtype, exclude_frozen)


def state_dict_of(source: Source, dtype: str | torch.dtype | None = None, exclude_frozen: bool = False) -> dict[str, torch.Tensor]:
    """Return the state dict of an open checkpoint; see `load_state_dict_from_checkpoint`."""
    wanted = list(weights_of(source, dtype_of(dtype), exclude_frozen))
    found: dict[str, torch.Tensor] = {}
    for weight in wanted:
        tensor = read_weight(source, weight)
        for name in (weight.name, *weight.aliases):
            found[name] = tensor
    found.update(source.buffers())
    return found


def load_into(module: nn.Module, path: str | os.PathLike[str], tag: str | None = None) -> nn.Module:
    """Load a checkpoint's fp32 weights into a plain module on the CPU, strictly, and return it.

    Raises:
        CheckpointError: the checkpoint cannot be read or does not fit the module; names what is missing and what is too much.
    """
    state = load_state_dict_from_checkpoint(path, tag)
    module = module.cpu()
    result = module.load_state_dict(state, strict=False)
    if result.missing_keys or result.unexpected_keys:
        raise CheckpointError(
            f"{path} does not fit the module: missing there {result.missing_keys or 'nothing'}, too much there "
            f"{result.unexpected_keys or 'nothing'}; build the module as it was when it was saved"
        )
    return module
