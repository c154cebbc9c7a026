"""What any checkpoint directory gives, whoever wrote it: parameters by name, states by name, elements by interval."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ..errors import CheckpointError
from . import elements
from .elements import Elements

Scalar: TypeAlias = "int | float | bool | torch.Tensor"  # a tensor has no dimension; each comes as the optimizer kept it

MASTER, WEIGHT = "fp32", "param"


@dataclass(frozen=True)
class Parameter:
    """One parameter of a module; names that share its elements are its aliases."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # in which the model computed
    trainable: bool = True
    aliases: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()


class Source(ABC):
    """A checkpoint that was opened but not read.

    States have names: "fp32" is the master copy, "param" the weights in the model's dtype, any other is a state that the
    optimizer keeps for each parameter, under the optimizer's own name. A state has the parameter's shape unless
    `shape_of` says otherwise.
    """

    @property
    @abstractmethod
    def parameters(self) -> Mapping[str, Parameter]:
        """Parameters under the module's qualified names, in the module's order; each tied one once."""

    @abstractmethod
    def states(self, name: str) -> tuple[str, ...]:
        """Return the states that are stored, whole, of a parameter."""

    @abstractmethod
    def elements(self, name: str, state: str) -> Elements:
        """Return where the elements of a state lie; it can be sent to another process.

        Raises:
            CheckpointError: there is no such parameter or state; the message says why, where the files tell.
        """

    @abstractmethod
    def scalars(self, name: str) -> Mapping[str, Scalar]:
        """Return the single numbers that the optimizer keeps for a parameter, such as `step`."""

    @abstractmethod
    def gaps(self) -> Mapping[tuple[str, str], str]:
        """Return (name, state) -> what is wrong, for each state that the files hold in part or in a form that fits no parameter."""

    @abstractmethod
    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the persistent buffers, read."""

    @abstractmethod
    def groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups: options, and under "params" the names of the parameters."""

    @abstractmethod
    def scheduler(self) -> dict[str, Any] | None:
        """Return the learning-rate scheduler's state."""

    @abstractmethod
    def loss_scaler(self) -> dict[str, Any] | None:
        """Return `cur_scale` and what else the loss scaler kept."""

    @abstractmethod
    def counters(self) -> dict[str, int]:
        """Return global_steps, global_samples, skipped_steps and the like."""

    @abstractmethod
    def client_state(self) -> dict[str, Any]:
        """Return what the script itself saved."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return who wrote it: writer, version, path, tag, stage, ranks, and `notes`, a list of what a reader should know."""

    # ---- the same for all

    def shape_of(self, name: str, state: str) -> tuple[int, ...]:
        """Return the shape of a state."""
        return self.parameters[name].shape

    def read(self, name: str, state: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return elements [start, stop) of a state in row-major order: 1-D, on the CPU, in the dtype in which it is stored.

        Raises:
            CheckpointError: there is no such state, or its file cannot be read.
        """
        return elements.read(self.elements(name, state), start, stop)

    def tensor(self, name: str, state: str) -> torch.Tensor:
        """Return a whole state in its shape."""
        return self.read(name, state).view(self.shape_of(name, state))

    def best_weight(self, name: str) -> str:
        """Return the state that holds a parameter's weights most precisely.

        Raises:
            CheckpointError: no file holds them.
        """
        held = self.states(name)
        for state in (MASTER, WEIGHT):
            if state in held:
                return state
        why = self.gaps().get((name, MASTER)) or self.gaps().get((name, WEIGHT)) or "no file has it"
        raise CheckpointError(f"{self.facts()['path']}: the weights of {name} are not there: {why}")

    def scale_state(self) -> dict[str, Any] | None:
        """Return the loss scaler's state as the engine's scalers keep it; None where there is none."""
        saved = self.loss_scaler()
        if saved is None:
            return None
        scale, updates = float(saved["cur_scale"]), int(saved.get("cur_iter", 0))
        return {
            "kind": "dynamic" if "cur_iter" in saved else "static",
            "scale": scale,
            "updates": updates,
            "quiet_since": int(saved.get("last_overflow_iter", -1)) + 1,
            "overflows_left": int(saved.get("cur_hysteresis", 1)),
            "history": [(updates, scale)],
        }

    def names(self) -> dict[str, str]:
        """Return every name of every parameter, aliases too -> the name in `parameters`."""
        found = {name: name for name in self.parameters}
        found.update({alias: name for name, parameter in self.parameters.items() for alias in parameter.aliases})
        return found


@dataclass
class Table(Source):
    """A source whose opener has found everything beforehand."""

    path: Path
    table: dict[str, Parameter] = field(default_factory=dict)
    where: dict[str, dict[str, Elements]] = field(default_factory=dict)
    shapes: dict[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)
    numbers: dict[str, dict[str, Scalar]] = field(default_factory=dict)
    missing: dict[tuple[str, str], str] = field(default_factory=dict)
    stored_buffers: dict[str, Elements] = field(default_factory=dict)
    buffer_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    param_groups: list[dict[str, Any]] = field(default_factory=list)
    scheduler_state: dict[str, Any] | None = None
    scaler_state: dict[str, Any] | None = None
    counts: dict[str, int] = field(default_factory=dict)
    client: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """Parameters under the module's qualified names."""
        return self.table

    def states(self, name: str) -> tuple[str, ...]:
        """Return the states that are stored of a parameter: the master first, the weights last."""
        held = self._of(name)
        between = sorted(state for state in held if state not in (MASTER, WEIGHT))
        return tuple(state for state in (MASTER, *between, WEIGHT) if state in held)

    def elements(self, name: str, state: str) -> Elements:
        """Return where the elements of a state lie."""
        held = self._of(name)
        if state not in held:
            why = self.missing.get((name, state), f"it has {', '.join(self.states(name)) or 'none'}")
            raise CheckpointError(f"{self.path}: state {state!r} of parameter {name} is not there: {why}")
        return held[state]

    def _of(self, name: str) -> dict[str, Elements]:
        if name not in self.table:
            raise CheckpointError(f"{self.path}: no parameter {name!r}; `stateroom ckpt show {self.path}` lists those there are")
        return self.where.get(name, {})

    def shape_of(self, name: str, state: str) -> tuple[int, ...]:
        """Return the shape of a state."""
        return self.shapes.get((name, state), self.table[name].shape)

    def scalars(self, name: str) -> Mapping[str, Scalar]:
        """Return the single numbers that the optimizer keeps for a parameter."""
        return self.numbers.get(name, {})

    def gaps(self) -> Mapping[tuple[str, str], str]:
        """Return what is held in part or in a form that fits no parameter."""
        return self.missing

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the persistent buffers, read."""
        return {name: elements.read(found).view(self.buffer_shapes[name]) for name, found in self.stored_buffers.items()}

    def groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups."""
        return self.param_groups

    def scheduler(self) -> dict[str, Any] | None:
        """Return the learning-rate scheduler's state."""
        return self.scheduler_state

    def loss_scaler(self) -> dict[str, Any] | None:
        """Return the loss scaler's state."""
        return self.scaler_state

    def counters(self) -> dict[str, int]:
        """Return the counters."""
        return self.counts

    def client_state(self) -> dict[str, Any]:
        """Return what the script itself saved."""
        return self.client

    def facts(self) -> dict[str, Any]:
        """Return who wrote it."""
        return {"path": str(self.path), "notes": [], **self.about}
