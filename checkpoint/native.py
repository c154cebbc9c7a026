"""Stateroom's own checkpoint directories as a source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from . import portable
from .elements import Elements
from .flow import Buffers
from .manifest import rank_file, read_checked, read_manifest
from .plan import SEPARATOR, data_file, state_key
from .reader import Needed, Reader, Request, Stored
from .source import MASTER, WEIGHT, Parameter, Scalar, Source
from .values import from_json


@dataclass(frozen=True)
class Region:
    """All elements of one stored tensor, with the items that hold them."""

    folder: Path
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    items: tuple[Stored, ...]
    buffers: Buffers

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def fill(self, out: torch.Tensor, start: int) -> None:
        """Write the elements from `start` on into `out`."""
        stop = start + out.numel()
        needed = Needed(self.folder, self.buffers)
        overlapping = [item for item in self.items if item.start < stop and item.start + item.numel > start]
        needed.add(Request(self.key, start, out), overlapping, self.shape, self.dtype)
        needed.read()

    def places(self) -> Iterator[tuple[str, int]]:
        """Yield (file, number of elements in it) in order."""
        for item in self.items:
            yield str(self.folder / item.file), item.numel


class NativeSource(Source):
    """A directory that `engine.save_checkpoint` wrote; `manifest` is its manifest, `reader` its data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self.reader = Reader(folder, self.manifest)

    @cached_property
    def _parameters(self) -> dict[str, Parameter]:
        aliases: dict[str, list[str]] = {}
        for alias, name in self.manifest["aliases"].items():
            aliases.setdefault(name, []).append(alias)
        return {
            name: Parameter(name, tuple(facts["shape"]), getattr(torch, facts["dtype"]), facts["trainable"], tuple(aliases.get(name, ())))
            for name, facts in self.manifest["parameters"].items()
            if name in self.manifest["tensors"]
        }

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """Parameters under the module's qualified names."""
        return self._parameters

    @cached_property
    def _states(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {name: [] for name in self._parameters}
        for key in self.manifest["tensors"]:
            name, separator, state = key.rpartition(SEPARATOR)
            if separator and name in found:
                found[name].append(state)
        return found

    def _weight(self, name: str) -> str:
        """A 16-bit weight of a frozen parameter is no master copy."""
        is_half = self.reader.dtype(name) in (torch.float16, torch.bfloat16)
        return WEIGHT if is_half and not self._parameters[name].trainable else MASTER

    def states(self, name: str) -> tuple[str, ...]:
        """Return the states that are stored of a parameter."""
        if name not in self._parameters:
            raise CheckpointError(f"{self.folder}: no parameter {name!r}; `stateroom ckpt show {self.folder}` lists those there are")
        return (self._weight(name), *self._states[name])

    def key(self, name: str, state: str) -> str:
        """Return the key of the tensor that holds a state."""
        return name if state in (MASTER, WEIGHT) else state_key(name, state)

    def elements(self, name: str, state: str) -> Elements:
        """Return where the elements of a state lie."""
        if state not in self.states(name):
            raise CheckpointError(f"{self.folder}: state {state!r} of parameter {name} is not there: it has {', '.join(self.states(name))}")
        return self._region(self.key(name, state))

    def _region(self, key: str) -> Region:
        shape = tuple(self.manifest["tensors"][key]["shape"])
        items = tuple(self.reader.stored(key, 0, prod(shape)))
        return Region(self.folder, key, shape, self.reader.dtype(key), items, self.reader.buffers)

    def shape_of(self, name: str, state: str) -> tuple[int, ...]:
        """Return the shape of a state."""
        return tuple(self.manifest["tensors"][self.key(name, state)]["shape"])

    def scalars(self, name: str) -> Mapping[str, Scalar]:
        """Return the single numbers that the optimizer keeps for a parameter."""
        return {state: from_json(value) for state, value in self.manifest["scalars"].get(name, {}).items()}

    def gaps(self) -> Mapping[tuple[str, str], str]:
        """Return nothing: a checkpoint whose parts are missing has no manifest."""
        return {}

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the persistent buffers, read; those that differ by rank are rank 0's."""
        found = {}
        requests = []
        for name in self.manifest["buffers"]:
            whole = torch.empty(self.manifest["tensors"][name]["shape"], dtype=self.reader.dtype(name))
            found[name] = whole
            requests.append(Request(name, 0, whole.view(-1)))
        self.reader.fill(requests)
        for alias, name in self.manifest["aliases"].items():
            if name in found:
                found[alias] = found[name]
        return found

    def groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups."""
        return from_json(self.manifest["groups"])

    def scheduler(self) -> dict[str, Any] | None:
        """Return the learning-rate scheduler's state."""
        return from_json(self.manifest["scheduler"])

    def loss_scaler(self) -> dict[str, Any] | None:
        """Return the loss scaler's state."""
        state = self.scale_state()
        return None if state is None else {**state, "cur_scale": state["scale"]}

    def scale_state(self) -> dict[str, Any] | None:
        """Return the loss scaler's state as the engine's scalers keep it."""
        return from_json(self.manifest["loss_scaler"])

    def counters(self) -> dict[str, int]:
        """Return the counters."""
        return dict(self.manifest["counters"])

    def own(self, rank: int) -> dict[str, Any]:
        """Return what `rank` saved for itself: random number generators, client state, its own buffers.

        Raises:
            CheckpointError: its file is missing or damaged.
        """
        path = self.folder / rank_file(rank)
        return portable.load(read_checked(path, self.manifest["files"][rank_file(rank)]["sha256"]), path)

    def check_small_files(self, rank: int, world: int) -> None:
        """Compare this rank's share of the small files with their hashes: those that it will read, and those nobody would.

        Raises:
            DamagedError: one is missing or not what was written.
        """
        small = [(name, facts["sha256"]) for name, facts in self.manifest["files"].items() if "sha256" in facts]
        for name, sha256 in small[rank::world]:
            read_checked(self.folder / name, sha256)

    def client_state(self) -> dict[str, Any]:
        """Return what the script itself saved on rank 0."""
        return self.own(0)["client_state"]

    def facts(self) -> dict[str, Any]:
        """Return who wrote it."""
        made = self.manifest
        return {
            "path": str(self.folder),
            "writer": "stateroom",
            "version": made["stateroom"],
            "tag": self.folder.name,
            "stage": made["stage"],
            "ranks": {"dp": made["world"]},
            "optimizer": made["optimizer"],
            "files": [data_file(rank) for rank in range(made["world"])],
            "notes": [f"frozen parameters were left out: {', '.join(made['excluded'])}"] if made["excluded"] else [],
        }
