"""Weights for the world outside: safetensors, a folder for transformers, or files of torch.save; one shard in memory at a time."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeAlias

import torch

from ..errors import CheckpointError
from .batch import Batch
from .opener import open_source
from .progress import Progress
from .source import Source
from .state_dict import AUTO, Weight, dtype_of, read_weight, weights_of

Buffers: TypeAlias = "Mapping[str, torch.Tensor]"
FORMATS = ("safetensors", "hf", "pt")
_STEMS = {"safetensors": ("model", ".safetensors"), "hf": ("model", ".safetensors"), "pt": ("pytorch_model", ".bin")}
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_BESIDE = (  # what transformers keeps beside weights
    "config.json generation_config.json tokenizer.json tokenizer.model tokenizer_config.json special_tokens_map.json added_tokens.json "
    "vocab.json merges.txt vocab.txt spiece.model chat_template.jinja preprocessor_config.json processor_config.json"
)


@dataclass(frozen=True)
class Exported:
    """What was written."""

    files: list[Path]
    num_tensors: int
    num_bytes: int
    remarks: list[str]


def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    format: str = "safetensors",
    dtype: str | torch.dtype | None = None,
    max_shard_size: int | str | None = "5GB",
    tag: str | None = None,
    exclude_frozen: bool = False,
    overwrite: bool = False,
    config: str | os.PathLike[str] | None = None,
    inert: tuple[str, ...] = (),
) -> Exported:
    """Write a checkpoint's weights and buffers into a folder, each file under its name only when it is complete, the index last.

    Args:
        path: any checkpoint; see `open_source`.
        out: folder to write into.
        format: "safetensors"; "hf", which is the same in the model's dtype with the files that transformers keeps beside;
            "pt", files of torch.save with tied names repeated.
        dtype: of floating-point parameters: "fp32", "bf16", "fp16", a torch dtype, or "auto", the one in which the model
            computed. Default: fp32 (from the master copies), for "hf" auto.
        max_shard_size: bytes, or text such as "5GB"; None: one file.
        tag: which checkpoint in `path`; default: the latest.
        exclude_frozen: leave out parameters without gradient.
        overwrite: replace weights that are in `out` already.
        config: folder with config.json and tokenizer for "hf"; default: where the checkpoint lies.
        inert: see `open_source`.

    Raises:
        CheckpointError: the checkpoint cannot be read or lacks some weights, `out` holds weights already, or a value is not known.
    """
    if format not in FORMATS:
        raise CheckpointError(f"format {format!r} is not known; choose {', '.join(FORMATS)}")
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; name a folder")
    old = [] if not folder.is_dir() else [entry for entry in sorted(folder.iterdir()) if _is_output(entry.name, format)]
    if old and not overwrite:
        raise CheckpointError(f"{folder} holds {old[0].name} already; remove it, name another folder, or overwrite it (--overwrite)")
    source = open_source(path, tag, inert)
    wanted = dtype_of(dtype if dtype is not None else AUTO if format == "hf" else None)
    buffers = source.buffers()
    shards = list(_shards(source, buffers, wanted, exclude_frozen, size_of(max_shard_size)))
    files = _write_shards(source, buffers, folder, format, shards)
    for entry in old:
        if entry not in files:
            entry.unlink()
    remarks = list(source.facts()["notes"])
    if format == "hf":
        remarks += _copy_beside(source, folder, Path(config) if config is not None else None, wanted)
    tensors = [weight for shard in shards for weight in shard]
    return Exported(files, len(tensors), sum(weight.num_bytes for weight in tensors), remarks)


def size_of(text: int | str | None) -> int | None:
    """Return a number of bytes from text such as "5GB" or "200MiB".

    Raises:
        CheckpointError: it is no size.
    """
    if text is None or isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise CheckpointError(f"size {text!r} is not known; write it like 5GB or 500MB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _is_output(name: str, format: str) -> bool:
    stem, ending = _STEMS[format]
    return re.fullmatch(rf"{stem}(-\d+-of-\d+)?{re.escape(ending)}(\.index\.json)?", name) is not None


def _shards(source: Source, buffers: Buffers, dtype: torch.dtype | str, exclude_frozen: bool, limit: int | None) -> Iterator[list[Weight]]:
    """Yield the tensors of each file: in order, as many as fit, one at least."""
    pending: list[Weight] = []
    pending_bytes = 0
    unread = [Weight(name, tuple(tensor.shape), tensor.dtype) for name, tensor in buffers.items()]
    for weight in [*weights_of(source, dtype, exclude_frozen), *unread]:
        if pending and limit is not None and pending_bytes + weight.num_bytes > limit:
            yield pending
            pending, pending_bytes = [], 0
        pending.append(weight)
        pending_bytes += weight.num_bytes
    if pending:
        yield pending


def _write_shards(source: Source, buffers: Buffers, folder: Path, format: str, shards: Sequence[list[Weight]]) -> list[Path]:
    stem, ending = _STEMS[format]
    total = sum(weight.num_bytes for shard in shards for weight in shard)
    places: dict[str, str] = {}
    files = []
    with Progress("exporting", total) as progress:
        for number, shard in enumerate(shards, start=1):
            name = f"{stem}{ending}" if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}{ending}"
            tensors = {weight.name: buffers[weight.name] if not weight.state else read_weight(source, weight) for weight in shard}
            with Batch() as batch:
                _WRITERS[ending](batch.stage(folder / name), tensors, shard)
            for weight in shard:
                for known_as in (weight.name, *(weight.aliases if ending == ".bin" else ())):
                    places[known_as] = name
            files.append(folder / name)
            progress.advance(sum(weight.num_bytes for weight in shard))
    if len(shards) > 1:
        index = folder / f"{stem}{ending}.index.json"
        content = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2, sort_keys=True) + "\n"
        with Batch() as batch:
            batch.write(index, partial(_put, content.encode()))
        files.append(index)
    return files


def _put(content: bytes, file: BinaryIO) -> None:
    file.write(content)


def _safetensors(path: Path, tensors: dict[str, torch.Tensor], shard: Sequence[Weight]) -> None:
    from safetensors.torch import save_file

    # a tied tensor is stored under one name; its other names are kept as transformers and safetensors keep them
    metadata = {"format": "pt", **{alias: weight.name for weight in shard for alias in weight.aliases}}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)


def _torch(path: Path, tensors: dict[str, torch.Tensor], shard: Sequence[Weight]) -> None:
    named = {known_as: tensors[weight.name] for weight in shard for known_as in (weight.name, *weight.aliases)}
    with path.open("wb") as file:
        torch.save(named, file)


_WRITERS: dict[str, Callable[[Path, dict[str, torch.Tensor], Sequence[Weight]], None]] = {".safetensors": _safetensors, ".bin": _torch}


def _copy_beside(source: Source, folder: Path, config: Path | None, dtype: torch.dtype | str) -> list[str]:
    """Copy config and tokenizer; return remarks."""
    lies_in = Path(source.facts()["path"])
    places = [config] if config is not None else [lies_in if lies_in.is_dir() else lies_in.parent, lies_in.parent]
    place = next((place for place in places if (place / "config.json").is_file()), None)
    if place is None:
        return [
            f"no config.json lies in {' or '.join(map(str, places))}: transformers needs one beside the weights (--config FOLDER copies it)"
        ]
    with Batch() as batch:
        for name in _BESIDE.split():
            if (place / name).is_file():
                content = (place / name).read_bytes()
                if name == "config.json":
                    content = _with_dtype(content, source, dtype)
                batch.write(folder / name, partial(_put, content))
    return []


def _with_dtype(content: bytes, source: Source, dtype: torch.dtype | str) -> bytes:
    """Let config.json name the dtype that was written, where it names one."""
    values = json.loads(content)
    dtypes = {one.dtype for one in source.parameters.values()} if isinstance(dtype, str) else {dtype}
    changed = False
    for key in ("dtype", "torch_dtype"):
        if values.get(key) is not None and len(dtypes) == 1:
            values[key], changed = str(next(iter(dtypes))).removeprefix("torch."), True
    return (json.dumps(values, indent=2) + "\n").encode() if changed else content
