"""Parameters that are to be trained from now on: frozen ones that were unfrozen, and ones put into the model after it was placed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..errors import EngineError
from .parameter import slot_of
from .unit import Unit

if TYPE_CHECKING:
    from .model import ShardedModel

_NOT_THE_MODELS = "a parameter of shape {} that is not the model's; put it into the model first"


class Growth:
    """Makes units trainable in a running job; every rank must do it at the same point, outside forward and backward.

    A frozen unit is laid out anew as a trainable one, in its place. Parameters that no unit holds become units of the
    root site: gathered while the model runs.
    """

    def __init__(self, model: ShardedModel) -> None:
        self._model = model

    def thaw_unfrozen(self) -> list[Unit]:
        """Make those frozen units trainable in which a parameter of an optimizer group requires grad now; return the new ones."""
        model = self._model
        with torch._C.DisableTorchFunctionSubclass():  # this looks at flags of many parameters and at no values
            frozen = [
                unit
                for unit in model.units
                if not unit.trainable and any(slot.param.requires_grad and id(slot.param) in model.group_of for slot in unit.slots)
            ]
        return [self._thaw(unit) for unit in frozen]

    def admit(self, params: Sequence[nn.Parameter], group: int) -> list[Unit]:
        """Book `params` to optimizer group `group`; return the units that hold them and are trainable.

        Raises:
            EngineError: one of them is in a group already, or is not the model's.
        """
        model = self._model
        names = {id(param): name for name, param in model.module.named_parameters()}
        for param in params:
            if id(param) not in names:
                raise EngineError(f"add_param_group holds {_NOT_THE_MODELS.format(tuple(param.shape))}")
            if id(param) in model.group_of:
                raise EngineError(f"parameter {names[id(param)]!r} is in optimizer group {model.group_of[id(param)]} already")
        model.group_of.update((id(param), group) for param in params)
        new = [(names[id(param)], param) for param in params if slot_of(param) is None]
        self._place(new)
        thawed = self.thaw_unfrozen()
        held = [slot.unit for slot in map(slot_of, params) if slot is not None and slot.unit.trainable]
        return list(dict.fromkeys([*thawed, *held]))

    def _thaw(self, old: Unit) -> Unit:
        model = self._model
        new = model.make_unit(old.name, [(slot.name, slot.param) for slot in old.slots], old.dtype, trainable=True, index=old.index)
        new.pinned = old.pinned
        model.units[old.index] = new
        for _, units in model.sites:
            units[:] = [new if unit is old else unit for unit in units]
        model.gathering.replace(old, new)
        old.discard()
        self._start(new)
        return new

    def _place(self, named: list[tuple[str, nn.Parameter]]) -> None:
        model = self._model
        for name, param in named:
            if param.device != model.comm.device:
                raise EngineError(f"parameter {name!r} is on {param.device}, this rank computes on {model.comm.device}; move it there")
        for (trainable, dtype), params in model.kinds_of(named).items():
            unit = model.make_unit(f"added {params[0][0]}", params, dtype, trainable=trainable, index=len(model.units))
            model.units.append(unit)
            model.sites[0][1].append(unit)
            model.gathering.add_to_root(unit)
            if trainable:
                self._start(unit)

    def _start(self, unit: Unit) -> None:
        self._model.give_gradients(unit)
        self._model.give_master(unit)
        self._model.backward.add(unit)
