"""Weights alone: safetensors with or without an index, and state dicts of torch.save."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from . import archive
from .elements import Whole
from .pickles import Storage, Stored
from .source import WEIGHT, Parameter, Table

_TORCH_ENDINGS = (".bin", ".pt", ".pth", ".ckpt")
_INDEX_ENDING = ".index.json"
_LARGEST_HEADER = 100_000_000
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def holds_weights(folder: Path) -> bool:
    """Whether a folder holds files with weights."""
    return bool(_files_in(folder))


def open_weights(path: Path, inert: tuple[str, ...] = ()) -> Table:
    """Open a file or folder with weights.

    Raises:
        CheckpointError: a file is damaged, a shard that the index names is missing, or it holds no tensors.
    """
    files = _files_of_index(path) if path.name.endswith(_INDEX_ENDING) else [path] if path.is_file() else _files_in(path)
    source = Table(path=path, about={"writer": "safetensors" if files[0].suffix == ".safetensors" else "torch.save", "ranks": {}})
    notes: list[str] = []
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing: the index names it; copy it beside the others")
        if file.suffix == ".safetensors":
            stored, aliases = read_header(file)
        else:
            stored, aliases, ignored = _state_dict(file, inert)
            notes += [f"{file.name}: {name} is no tensor and is left out" for name in ignored]
        _add(source, stored, aliases, file)
    if not source.table and not source.stored_buffers:
        raise CheckpointError(f"{path} holds no tensors; is it a file with weights?")
    notes.append("weights alone do not tell parameters from buffers: floating-point tensors count as parameters")
    source.about["notes"] = notes
    return source


def _add(source: Table, stored: Mapping[str, Stored], aliases: Mapping[str, str], file: Path) -> None:
    for name, tensor in stored.items():
        if name in source.table or name in source.stored_buffers:
            raise CheckpointError(f"{file} holds {name}, which another file beside it holds too; remove the one that is stale")
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            names = tuple(alias for alias, owner in aliases.items() if owner == name)
            source.table[name] = Parameter(name, tensor.shape, tensor.dtype, True, names)
            source.where[name] = {WEIGHT: Whole(tensor)}
        else:
            source.stored_buffers[name] = Whole(tensor)
            source.buffer_shapes[name] = tensor.shape


def _files_in(folder: Path) -> list[Path]:
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (folder / index).is_file():
            return _files_of_index(folder / index)
    found = sorted(folder.glob("*.safetensors"))
    return found or sorted(folder.glob("pytorch_model*.bin"))


def _files_of_index(index: Path) -> list[Path]:
    try:
        named = json.loads(index.read_text())["weight_map"].values()
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} is no index of weights ({type(error).__name__}: {error})") from None
    return [index.parent / name for name in sorted(set(named))]


def read_header(file: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Return name -> tensor of a safetensors file, unread, and alias -> name from its metadata.

    Raises:
        CheckpointError: the file is damaged or no safetensors file.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > min(size - 8, _LARGEST_HEADER):
                raise ValueError("a header longer than the file")
            header = json.loads(opened.read(length))
        metadata = header.pop("__metadata__", None) or {}
        stored = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            dtype, shape = DTYPES[entry["dtype"]], tuple(int(extent) for extent in entry["shape"])
            if end - begin != torch.Size(shape).numel() * dtype.itemsize or 8 + length + end > size:
                raise ValueError(f"{name} does not lie in the file as its shape says")
            stored[name] = Stored(Storage(str(file), end - begin, 8 + length + begin), dtype, 0, shape, _row_major(shape))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        text = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{file} is damaged or no safetensors file ({text}); restore it from a copy") from None
    return stored, {alias: owner for alias, owner in metadata.items() if owner in stored and alias not in stored}


def _row_major(shape: Iterable[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(tuple(shape)):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def _state_dict(file: Path, inert: tuple[str, ...]) -> tuple[dict[str, Stored], dict[str, str], list[str]]:
    """Return tensors, alias -> name for those that share elements, and the names of what is no tensor."""
    if file.suffix not in _TORCH_ENDINGS:
        raise CheckpointError(f"{file} is no checkpoint: weights end in .safetensors, {', '.join(_TORCH_ENDINGS)} or {_INDEX_ENDING}")
    value = archive.load(file, inert)
    for key in ("state_dict", "module", "model"):  # what scripts and engines wrap a state dict in
        if isinstance(value, Mapping) and isinstance(value.get(key), Mapping):
            value = value[key]
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{file} holds a {type(value).__name__}, not a state dict")
    return _once(value)


def _once(value: Mapping[Any, Any]) -> tuple[dict[str, Stored], dict[str, str], list[str]]:
    stored: dict[str, Stored] = {}
    aliases: dict[str, str] = {}
    owner: dict[Any, str] = {}
    for name, tensor in value.items():
        if isinstance(tensor, Stored):
            first = owner.setdefault(tensor.place, str(name)) if tensor.numel else str(name)
            if first == name:
                stored[str(name)] = tensor
            else:
                aliases[str(name)] = first
    return stored, aliases, [str(name) for name, tensor in value.items() if not isinstance(tensor, Stored)]
