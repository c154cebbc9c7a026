"""Read a model's weights from safetensors files into its shards: each rank reads the bytes that it owns and no others.

transformers' own `from_pretrained` under ZeRO-3 reads the whole checkpoint into the memory of rank 0 and broadcasts it
one module at a time. Here nothing is broadcast: a rank's interval of a unit is cut into slices of the stored tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..engine import Engine
from ..errors import CheckpointError
from ..zero.parameter import slot_of
from ..zero.unit import Unit

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass
class Loaded:
    """What load_safetensors did on this rank.

    Attributes:
        missing: parameters of the model that the files do not have; they keep their values.
        unexpected: names in the files that the model does not have.
        read_bytes: bytes taken from the files by this rank.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    read_bytes: int = 0


def load_safetensors(model: nn.Module, source: str | Path, *, strict: bool = True) -> Loaded:
    """Fill a model, or the model of an engine, from safetensors files; every rank must call it, before training starts.

    Sharded parameters (of an engine at stage 3, or built inside `zero.Init`) take only this rank's slices. Parameters
    that every rank keeps whole under an engine are read in shares and gathered. Master weights follow. Buffers are
    read whole. Stored names may lack the model's base prefix (`model.`), or have it where the model does not.

    Args:
        model: a module with real or sharded parameters, or an Engine.
        source: a folder as save_pretrained() writes it (one file, or several with an index), or one file.
        strict: raise when a parameter is missing or a stored name is unknown.

    Raises:
        CheckpointError: nothing to read at `source`, shapes differ, a parameter is on the meta device, or (strict)
            names differ.
    """
    module = model.module if isinstance(model, Engine) else model
    files = _files(Path(source))
    with _Reader(files) as reader:
        places, loaded = _match(module, reader)
        if strict:
            _refuse_differences(source, loaded)
        _check(places, reader)
        for unit, tensors in _by_unit(places):
            if unit is None:
                _read_whole(tensors, reader)
            else:
                _read_own(unit, {slot_of(tensor).index: name for tensor, name in tensors}, reader)  # type: ignore[union-attr]
        loaded.read_bytes = reader.read_bytes
    return loaded


def _refuse_differences(source: str | Path, loaded: Loaded) -> None:
    if not loaded.missing and not loaded.unexpected:
        return
    some = "; the first five of each" if max(len(loaded.missing), len(loaded.unexpected)) > 5 else ""
    missing, unexpected = loaded.missing[:5] or "nothing", loaded.unexpected[:5] or "nothing"
    raise CheckpointError(
        f"{source} does not fit the model: missing {missing}, unexpected {unexpected}{some}. "
        "Pass strict=False to load what fits, or use from_pretrained() for checkpoints whose tensors are renamed or merged on loading"
    )


def _files(source: Path) -> dict[str, Path]:
    """Return stored name -> file.

    Raises:
        CheckpointError: there is no safetensors file.
    """
    if source.is_dir() and (source / INDEX).is_file():
        return {name: source / file for name, file in json.loads((source / INDEX).read_text())["weight_map"].items()}
    path = source / SINGLE if source.is_dir() else source
    if not path.is_file():
        raise CheckpointError(f"no {SINGLE} and no {INDEX} in {source}; save with save_pretrained(), which writes safetensors by default")
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return dict.fromkeys(file.keys(), path)


class _Reader:
    """Open safetensors files, read by ranges of the flattened tensors; counts what it reads."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self.files = files
        self.read_bytes = 0
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        for file in self._open.values():
            file.__exit__(None, None, None)
        self._open = {}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the stored shape."""
        return tuple(self._slice(name).get_shape())

    def whole(self, name: str) -> torch.Tensor:
        """Return a whole tensor in host memory."""
        tensor = self._file(name).get_tensor(name)
        self.read_bytes += tensor.nbytes
        return tensor

    def flat(self, name: str, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (offset, flat piece) that together are elements [start, stop) of the flattened tensor."""
        shape = self.shape(name)
        if not shape:
            yield start, self.whole(name).reshape(1)
            return
        for index, at in _boxes(shape, start, stop):
            piece = self._slice(name)[index].reshape(-1)
            self.read_bytes += piece.nbytes
            yield at, piece

    def _slice(self, name: str) -> Any:
        return self._file(name).get_slice(name)

    def _file(self, name: str) -> Any:
        path = self.files[name]
        if path not in self._open:
            from safetensors import safe_open

            self._open[path] = safe_open(path, framework="pt", device="cpu").__enter__()
        return self._open[path]


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[slice, ...], int]]:
    """Cut elements [start, stop) of a row-major tensor into boxes without a gap: (index, offset of its first element).

    Two boxes an axis at most: what is left of a row, whole rows, and what is begun of another.
    """
    row = 1
    for size in shape[1:]:
        row *= size
    while start < stop:
        first, inside = divmod(start, row)
        if inside == 0 and stop - start >= row:
            last = stop // row
            yield (slice(first, last),), start
            start = last * row
            continue
        end = min(stop, (first + 1) * row)
        for index, at in _boxes(shape[1:], inside, end - first * row):
            yield (slice(first, first + 1), *index), at + first * row
        start = end


Place = tuple[torch.Tensor, str]


def _match(module: nn.Module, reader: _Reader) -> tuple[list[Place], Loaded]:
    """Pair each parameter and persistent buffer, once, with its stored name."""
    names: dict[int, tuple[torch.Tensor, list[str]]] = {}
    persistent = module.state_dict(keep_vars=True)
    for name, tensor in persistent.items():
        if isinstance(tensor, torch.Tensor):
            names.setdefault(id(tensor), (tensor, []))[1].append(name)
    prefix = getattr(module, "base_model_prefix", "")
    places, loaded, used = [], Loaded(), set()
    for tensor, own in names.values():
        stored = [spelt for name in own for spelt in _spellings(name, prefix) if spelt in reader.files][: len(own)]
        used.update(stored)
        if stored:
            places.append((tensor, stored[0]))
        else:
            loaded.missing.append(own[0])
    loaded.unexpected = sorted(set(reader.files) - used)
    return places, loaded


def _spellings(name: str, prefix: str) -> tuple[str, ...]:
    if not prefix:
        return (name,)
    return (name, name.removeprefix(f"{prefix}.")) if name.startswith(f"{prefix}.") else (name, f"{prefix}.{name}")


def _check(places: list[Place], reader: _Reader) -> None:
    wrong = [f"{name}: stored {reader.shape(name)}, model {tuple(t.shape)}" for t, name in places if reader.shape(name) != tuple(t.shape)]
    if wrong:
        raise CheckpointError(f"shapes differ: {'; '.join(wrong[:5])}{' …' if len(wrong) > 5 else ''}")
    empty = [name for tensor, name in places if tensor.is_meta]
    if empty:
        raise CheckpointError(
            f"{empty[0]!r} is on the meta device and has nothing to load into; pass the model to stateroom.initialize() first and load "
            "into the engine, or build it inside `with stateroom.zero.Init():`"
        )


def _by_unit(places: list[Place]) -> Iterator[tuple[Unit | None, list[Place]]]:
    """Yield the units, and what belongs to each; None for tensors that are in none."""
    groups: dict[int, tuple[Unit | None, list[Place]]] = {}
    for tensor, name in places:
        slot = slot_of(tensor)
        unit = None if slot is None else slot.unit
        groups.setdefault(id(unit), (unit, []))[1].append((tensor, name))
    yield from groups.values()


def _read_whole(tensors: list[Place], reader: _Reader) -> None:
    with torch.no_grad():
        for tensor, name in tensors:
            tensor.copy_(reader.whole(name))


def _read_own(unit: Unit, stored: dict[int, str], reader: _Reader) -> None:
    """Fill this rank's interval of a unit, then let whoever keeps more than that follow."""
    unit.release()
    if unit.sharded and unit.gathered:
        raise CheckpointError(f"unit {unit.name!r} is held by GatheredParameters; leave that context before loading")
    with torch.no_grad(), unit.at_hand(write=True):
        own = unit.shard if unit.sharded else unit.full[unit.lo : unit.hi]
        for part in unit.layout.slices(unit.lo, unit.hi):
            if part.extent in stored:
                for at, piece in reader.flat(stored[part.extent], part.start, part.stop):
                    low = part.at + at - part.start
                    own[low : low + piece.numel()].copy_(piece)
        if not unit.sharded:
            unit.comm.all_gather(unit.full, unit.layout.bounds, state="parameters", unit=unit.name).wait()
        if unit.master is not None and not unit.master_is_shard:
            low, high = unit.master_interval
            unit.master.copy_(unit.shard if unit.sharded else unit.full[low:high])
    unit.acknowledge()
