"""What scripts do to a placed model between steps: values written are followed, what would be trained wrongly is refused."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..errors import EngineError
from .parameter import Slot, slot_of
from .unit import Unit


def follow_writes(units: Sequence[Unit]) -> None:
    """Take over what the script wrote into whole parameters since the last update, in place or as a new `.data`.

    Under mixed precision the master weights follow. A write through `param.data.copy_()` and its kind leaves no mark
    in torch: with fp32 parameters it is the master's own memory, with 16-bit ones the next update undoes it.

    Raises:
        EngineError: a parameter has another dtype or device than at initialize().
    """
    for unit in units:
        if unit.sharded:
            continue
        for slot in unit.slots:
            param, view = slot.param, slot.view
            if param.data_ptr() != view.data_ptr() and slot.numel:  # type: ignore[union-attr]
                check_kind(unit, slot)
                unit.expect_write()
                with torch.no_grad():
                    view.copy_(param.detach())  # type: ignore[union-attr]
                param.data = view  # type: ignore[assignment]
                unit.master_follows(slot)
            elif param._version != slot.version:
                unit.master_follows(slot)


def check_kind(unit: Unit, slot: Slot) -> None:
    """Refuse a parameter whose dtype, device or shape was changed after it was placed.

    Raises:
        EngineError: says what changed and what to do instead.
    """
    param = slot.param
    if param.dtype != unit.dtype or param.device != unit.comm.device or param.shape != slot.shape:
        raise EngineError(
            f"parameter {slot.name!r} was {unit.dtype} {tuple(slot.shape)} on {unit.comm.device} when initialize() placed it and is "
            f"{param.dtype} {tuple(param.shape)} on {param.device} now: half(), to() and their kind go before initialize(); "
            "for mixed precision set bf16 or fp16 in the config"
        )


def check_kinds(units: Sequence[Unit]) -> None:
    """Look at the first parameter of each unit: half() and its kind change all of them."""
    with torch._C.DisableTorchFunctionSubclass():
        for unit in units:
            if unit.slots:
                check_kind(unit, unit.slots[0])


class Trained:
    """Refuses parameters that would stay as they are in silence: put into the module, or unfrozen, after it was placed.

    The module tree is walked when something in it is new. Else what it holds is compared object by object with what that walk
    found, without a line of Python for each, and the flags of those parameters are read that nobody trains.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._places: list[Any] = []  # the dicts of children and parameters of each module
        self._held: list[Any] = []  # what was in them
        self._idle: list[torch.Tensor] = []  # parameters among it that nobody trains

    def check(self) -> None:
        """Look at the module as it is now.

        Raises:
            EngineError: names the first parameter that would not be trained.
        """
        with torch._C.DisableTorchFunctionSubclass():  # this looks at flags of many parameters and at no values
            if not self._is_as_walked():
                self._walk()
            if any(map(_REQUIRES_GRAD, self._idle)):
                self._walk()  # a thawed one has a place in another unit now
                self._refuse()

    def _is_as_walked(self) -> bool:
        places, held = self._places, self._held
        return bool(places) and sum(map(len, places)) == len(held) and all(map(operator.is_, _contents(places), held))

    def _walk(self) -> None:
        self._places = [place for owner in self._module.modules() for place in (owner._modules, owner._parameters)]
        self._held = list(_contents(self._places))
        params = (param for param in self._held if isinstance(param, torch.Tensor))
        self._idle = [param for param in params if not _is_trained(param)]

    def _refuse(self) -> None:
        for path, owner in self._module.named_modules():
            for key, param in owner._parameters.items():
                if param is not None and param.requires_grad and not _is_trained(param):
                    _refuse_untrained(f"{path}.{key}" if path else key, added=slot_of(param) is None)


_REQUIRES_GRAD: Callable[[Any], bool] = operator.attrgetter("requires_grad")
_VALUES: Callable[[Any], Iterable[Any]] = operator.methodcaller("values")


def _contents(places: Sequence[Any]) -> Iterable[Any]:
    return chain.from_iterable(map(_VALUES, places))


def _is_trained(param: torch.Tensor) -> bool:
    slot = slot_of(param)
    return slot is not None and slot.unit.trainable


def _refuse_untrained(name: str, added: bool) -> None:
    if added:
        raise EngineError(
            f"parameter {name!r} was put into the model after initialize(), so no optimizer trains it; call "
            "engine.optimizer.add_param_group({'params': [it]}), or to change values only, do so inside zero.GatheredParameters"
        )
    raise EngineError(
        f"parameter {name!r} was frozen when initialize() was called and requires grad now, but it is in no group of the optimizer; "
        "call engine.optimizer.add_param_group({'params': [it]}), or pass model_parameters=model.parameters() to initialize"
    )
