"""States moved to host memory between two phases of a script, and back, bit for bit: the memory goes, every tensor stays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

import torch

from ...errors import EngineError
from ..optimizer import ShardedOptimizer
from ..parameter import hide, show
from ..unit import Unit


class OffloadStateTypeEnum(str, Enum):
    """Kinds of states that can be moved (DeepSpeed's names)."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


KINDS = tuple(kind.value for kind in OffloadStateTypeEnum)
_GRADIENTS = frozenset(("lp_grads", "contiguous_grad_buffer"))


class Parking:
    """Holds in host memory what was on the device: storages are emptied and filled again, so that all views of them stay.

    What rests in host memory or on a drive already is left where it is; fp32 master weights that are the parameters
    themselves go with the parameters.

    Attributes:
        kinds: what is away.
    """

    def __init__(self, units: Sequence[Unit], optimizer: ShardedOptimizer | None) -> None:
        self._units, self._optimizer = units, optimizer
        self._away: list[tuple[torch.UntypedStorage, torch.Tensor, torch.device]] = []
        self.kinds: frozenset[str] = frozenset()

    def park(self, include: Iterable[object] | None, pinned: bool) -> int:
        """Move kinds of states (None: all) to host memory; return the bytes that the device has got back.

        Raises:
            EngineError: a kind is unknown, a pass is under way, or a context holds parameters.
        """
        wanted = frozenset(KINDS if include is None else [str(getattr(kind, "value", kind)) for kind in include])
        if wanted - set(KINDS):
            raise EngineError(f"offload_states: unknown state(s) {', '.join(sorted(wanted - set(KINDS)))}; known are {', '.join(KINDS)}")
        held = [unit.name for unit in self._units if unit.holds]
        if held and "lp_params" in wanted:
            raise EngineError(f"offload_states: GatheredParameters holds unit {held[0]!r}; leave that context first")
        new = wanted - self.kinds
        moved = sum(self._move(tensor, pinned) for tensor in self._tensors(new))
        if "lp_params" in new:
            for unit in self._units:
                if unit.gathered:
                    hide(unit.slots, unit.nan)
        self.kinds |= wanted
        self._mark()
        return moved

    def bring_back(self) -> None:
        """Give every storage its memory and its bytes again."""
        away, self._away = self._away, []
        for storage, host, device in away:
            storage.resize_(host.numel())
            torch.empty(0, dtype=torch.uint8, device=device).set_(storage).copy_(host)  # type: ignore[call-overload]
        if "lp_params" in self.kinds:
            for unit in self._units:
                if unit.gathered:
                    show(unit.slots)
        self.kinds = frozenset()
        self._mark()

    def _mark(self) -> None:
        for unit in self._units:
            unit.parked = self.kinds

    def _tensors(self, kinds: frozenset[str]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        if "lp_params" in kinds:
            for unit in self._units:
                unit.release()
                found += [unit.full, unit.shard]
        if "hp_params" in kinds:
            found += [unit.master for unit in self._units if unit.master is not None and not unit.master_is_shard]
        if kinds & _GRADIENTS:
            for unit in self._units:
                if unit.gradients is not None:
                    unit.gradients.hide()
                    found += unit.gradients.tensors()
        if "optim_states" in kinds and self._optimizer is not None:
            states = self._optimizer.inner.state.values()
            found += [value for state in states for value in state.values() if isinstance(value, torch.Tensor) and value.dim()]
        return found

    def _move(self, tensor: torch.Tensor, pinned: bool) -> int:
        storage = tensor.untyped_storage()
        elsewhere = tensor.device.type == "cpu" != self._device.type
        # an element that stands for many has no memory of its own; what numpy shares cannot be resized
        if elsewhere or storage.nbytes() < tensor.nbytes or not storage.nbytes() or not storage.resizable():
            return 0
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned and tensor.device.type != "cpu")
        host.copy_(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))  # type: ignore[call-overload]
        storage.resize_(0)
        self._away.append((storage, host, tensor.device))
        return host.numel()

    @property
    def _device(self) -> torch.device:
        return self._units[0].comm.device
