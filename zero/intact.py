"""What scripts do to a placed model between steps: values written are followed, what would be trained wrongly is refused."""

from __future__ import annotations

from collections.abc import Sequence

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


def check_trained(module: nn.Module) -> None:
    """Refuse parameters that would stay as they are in silence: put into the module, or unfrozen, after it was placed.

    Raises:
        EngineError: names the first of them.
    """
    with torch._C.DisableTorchFunctionSubclass():  # this looks at flags of many parameters and at no values
        for path, owner in module.named_modules():
            for key, param in owner._parameters.items():
                if param is None:
                    continue
                slot = slot_of(param)
                if (slot is None or not slot.unit.trainable) and param.requires_grad:
                    _refuse_untrained(f"{path}.{key}" if path else key, added=slot is None)


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
