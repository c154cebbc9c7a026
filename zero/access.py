"""Read and write whole parameters, gradients and optimizer states by name or by parameter, at every stage alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..errors import EngineError
from ..parallel import Collectives
from .parameter import Slot, slot_of
from .unit import Unit

Params = nn.Module | nn.Parameter | Iterable[nn.Parameter] | None


class GatheredParameters:
    """A context in which parameters hold their whole values on every rank; every rank must enter it.

    Args:
        params: a module, a parameter, or parameters (others of the same unit come along).
        modifier_rank: the group rank whose changes are kept and sent to all; None: changes are not kept.
        fwd_module: accepted for DeepSpeed's sake; uses outside a module's forward are followed without it.
        enabled: False makes the context do nothing.
    """

    def __init__(self, params: Params, modifier_rank: int | None = None, fwd_module: nn.Module | None = None, enabled: bool = True) -> None:
        self._units = _units_of(params) if enabled else []
        self._modifier_rank = modifier_rank
        self._was_gathered: list[bool] = []

    def __enter__(self) -> GatheredParameters:
        self._was_gathered = [unit.gathered for unit in self._units]
        for unit in self._units:
            unit.request()
            unit.holds += 1
        for unit in self._units:
            unit.gather()
            if self._modifier_rank is not None:
                unit.expect_write()
        return self

    def __exit__(self, *exc: object) -> None:
        for unit, was_gathered in zip(self._units, self._was_gathered, strict=True):
            unit.holds -= 1
            if self._modifier_rank is not None and exc[0] is None:
                unit.comm.broadcast(unit.full, state="parameters", unit=unit.name, source=self._modifier_rank)
                unit.keep(exactly=False)
            if not was_gathered:
                unit.release()


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Hold every parameter of an engine or model whole until the end of the context, and yield the user's module.

    Inside, forwards run no collective, so that ranks may generate sequences of different lengths under ZeRO-3. Every rank
    must enter and leave; all of the model is in memory meanwhile.
    """
    module = getattr(model, "module", model)
    with GatheredParameters(module):
        yield module


def _units_of(params: Params) -> list[Unit]:
    if params is None:
        return []
    if isinstance(params, nn.Module):
        params = params.parameters()
    elif isinstance(params, torch.Tensor):
        params = [params]  # type: ignore[list-item]
    slots = [slot for slot in map(slot_of, params) if slot is not None]
    return list(dict.fromkeys(slot.unit for slot in slots))


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Note that `module` reads `parameter` of another module; kept gathered from forward to backward from now on.

    Not needed: such a use is found when it happens. Kept for scripts that call it.
    """
    slot = slot_of(parameter)
    if slot is not None:
        slot.unit.pinned = True


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo register_external_parameter."""
    slot = slot_of(parameter)
    if slot is not None:
        slot.unit.pinned = False


# ---- whole states


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return the master weight of `param`, whole and in fp32; every rank must call it. None for a parameter without engine."""
    slot = slot_of(param)
    if slot is None:
        return None
    unit = slot.unit
    if unit.master is None:
        with GatheredParameters(param):
            return param.detach().to(torch.float32, copy=True)
    with unit.at_hand():
        return _assemble(slot, unit.master, unit.master_interval).float()


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the master weight (and with it the parameter) to `value` [param.shape]; every rank must call it.

    Raises:
        EngineError: no engine trains this parameter, or the shape differs.
    """
    slot = _trained_slot(param)
    slot.unit.expect_write()
    with slot.unit.at_hand(write=True):
        _write(slot, value, slot.unit.master, slot.unit.master_interval)
    slot.unit.publish().wait()


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the gradient averaged over ranks and micro-batches so far, unscaled, whole; None when none was reduced."""
    slot = slot_of(param)
    if slot is None or slot.unit.gradients is None or not slot.unit.gradients.reduced:
        return None
    gradients = slot.unit.gradients
    scale = 1.0 if slot.unit.optimizer is None else slot.unit.optimizer.scale.scale
    with slot.unit.at_hand():
        return _assemble(slot, gradients.owned, gradients.interval).float() / scale  # type: ignore[arg-type]


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the reduced gradient by `value` [param.shape], between backward and step; every rank must call it."""
    slot = _trained_slot(param)
    gradients = slot.unit.gradients
    if gradients is None or not gradients.reduced:
        raise EngineError(f"parameter {slot.name!r} has no reduced gradient to replace: call this between backward() and step()")
    scale = 1.0 if slot.unit.optimizer is None else slot.unit.optimizer.scale.scale
    with slot.unit.at_hand(write=True):
        _write(slot, value * scale, gradients.owned, gradients.interval)
    gradients.touched[slot.index] = 1


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return one optimizer state (such as "exp_avg") of `param`, whole; scalars as they are; None where there is none yet."""
    slot = _trained_slot(param)
    with slot.unit.at_hand():
        return _full_state(slot, optim_state_key)


def _full_state(slot: Slot, key: str) -> torch.Tensor | None:
    pieces = _state_pieces(slot, key)
    known = slot.unit.comm.gather_objects([(p.dtype, p.numel()) if p.dim() else p.item() for _, _, p in pieces])
    known_here = [item for rank in known for item in rank]
    if not known_here:
        return None
    scalars = [item for item in known_here if not isinstance(item, tuple)]
    if scalars:
        return torch.tensor(float(scalars[0]))
    low, high = slot.unit.master_interval
    flat = torch.zeros(high - low, dtype=known_here[0][0], device=slot.unit.comm.device)
    for start, stop, piece in pieces:
        flat[start - low : stop - low] = piece.reshape(-1)
    return _assemble(slot, flat, slot.unit.master_interval).float()


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set one optimizer state of `param` to `value` [param.shape]; every rank must call it."""
    slot = _trained_slot(param)
    slot.unit.expect_write()
    with slot.unit.at_hand(write=True):
        for start, stop, piece in _state_pieces(slot, optim_state_key):
            base = slot.offset
            part = value.reshape(-1)[start - base : stop - base].to(piece.device, piece.dtype)
            piece.copy_(part.view(piece.shape) if piece.dim() else value.reshape(()))


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part of the master weight, flat."""
    slot = slot_of(param)
    if slot is None or slot.unit.master is None:
        return None
    with slot.unit.at_hand():
        return _local(slot, slot.unit.master, slot.unit.master_interval)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part of the reduced gradient, flat, unscaled."""
    slot = slot_of(param)
    if slot is None or slot.unit.gradients is None or not slot.unit.gradients.reduced:
        return None
    scale = 1.0 if slot.unit.optimizer is None else slot.unit.optimizer.scale.scale
    with slot.unit.at_hand():
        return _local(slot, slot.unit.gradients.owned, slot.unit.gradients.interval) / scale  # type: ignore[arg-type]


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return this rank's part of one optimizer state, flat; None where this rank has none."""
    slot = _trained_slot(param)
    with slot.unit.at_hand():
        pieces = _state_pieces(slot, optim_state_key)
        return torch.cat([piece.reshape(-1) for _, _, piece in pieces]) if pieces else None


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's part of the master weight; every rank must call it, each with its own part."""
    slot = _trained_slot(param)
    slot.unit.expect_write()
    with slot.unit.at_hand(write=True):
        _local(slot, slot.unit.master, slot.unit.master_interval).copy_(value.reshape(-1))  # type: ignore[arg-type]
    slot.unit.publish().wait()


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's part of the reduced gradient."""
    slot = _trained_slot(param)
    if slot.unit.gradients is None or not slot.unit.gradients.reduced:
        raise EngineError(f"parameter {slot.name!r} has no reduced gradient to replace: call this between backward() and step()")
    scale = 1.0 if slot.unit.optimizer is None else slot.unit.optimizer.scale.scale
    with slot.unit.at_hand(write=True):
        _local(slot, slot.unit.gradients.owned, slot.unit.gradients.interval).copy_(value.reshape(-1) * scale)  # type: ignore[arg-type]


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set this rank's part of one optimizer state."""
    at, slot = 0, _trained_slot(param)
    slot.unit.expect_write()
    with slot.unit.at_hand(write=True):
        for _, _, piece in _state_pieces(slot, optim_state_key):
            piece.copy_(value.reshape(-1)[at : at + piece.numel()].view(piece.shape))
            at += piece.numel()


def state_on_first_rank(module: nn.Module, comm: Collectives, exclude_frozen: bool = False) -> dict[str, torch.Tensor]:
    """Return the whole weights and buffers of `module` by name in host memory of the first rank, and nothing on the others.

    One unit is gathered at a time, so the other ranks never hold more than that. Names that share a parameter share the
    tensor. Every rank must call it.
    """
    named = {key: value for key, value in module.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}
    if exclude_frozen:
        named = {key: value for key, value in named.items() if value.requires_grad or not isinstance(value, nn.Parameter)}
    params = {id(value): value for value in named.values()}
    copies: dict[int, torch.Tensor] = {}
    for unit in _units_of(params.values()):  # type: ignore[arg-type]
        members = [slot.param for slot in unit.slots if id(slot.param) in params]
        with GatheredParameters(members):
            if comm.rank == 0:
                copies |= {id(param): param.detach().to("cpu", copy=True) for param in members}
    if comm.rank:
        return {}
    return {key: copies[id(value)] if id(value) in copies else value.detach().to("cpu", copy=True) for key, value in named.items()}


# ---- plumbing


def _trained_slot(param: nn.Parameter) -> Slot:
    slot = slot_of(param)
    if slot is None or slot.unit.master is None:
        name = "this tensor" if slot is None else repr(slot.name)
        raise EngineError(f"{name} is not a parameter that an engine trains; pass one of engine.module.parameters() that requires grad")
    return slot


def _overlap(slot: Slot, interval: tuple[int, int]) -> tuple[int, int]:
    """Return the elements of `slot` inside `interval`, as offsets in the unit's flat space (empty: start == stop)."""
    start = min(max(slot.offset, interval[0]), interval[1])
    return start, max(start, min(slot.offset + slot.numel, interval[1]))


def _local(slot: Slot, owned: torch.Tensor, interval: tuple[int, int]) -> torch.Tensor:
    start, stop = _overlap(slot, interval)
    return owned[start - interval[0] : stop - interval[0]]


def _assemble(slot: Slot, owned: torch.Tensor, interval: tuple[int, int]) -> torch.Tensor:
    """Return the whole of one parameter's state from the intervals that ranks own."""
    mine = _local(slot, owned, interval)
    if interval == (0, slot.unit.layout.padded):
        return mine.clone().view(slot.shape)
    comm, layout = slot.unit.comm, slot.unit.layout
    mine = mine.to(comm.device)
    bounds = [min(max(bound - slot.offset, 0), slot.numel) for bound in layout.bounds]
    whole = torch.empty(slot.numel, dtype=owned.dtype, device=comm.device)
    whole[bounds[comm.rank] : bounds[comm.rank + 1]] = mine
    comm.all_gather(whole, bounds, state="reading", unit=slot.name).wait()
    return whole.view(slot.shape)


def _write(slot: Slot, value: torch.Tensor, owned: torch.Tensor | None, interval: tuple[int, int]) -> None:
    if tuple(value.shape) != tuple(slot.shape):
        raise EngineError(f"parameter {slot.name!r} has shape {tuple(slot.shape)}, the given value {tuple(value.shape)}")
    start, stop = _overlap(slot, interval)
    if stop > start:
        with torch.no_grad():
            part = value.reshape(-1)[start - slot.offset : stop - slot.offset]
            owned[start - interval[0] : stop - interval[0]].copy_(part)  # type: ignore[index]


def _state_pieces(slot: Slot, key: str) -> list[tuple[int, int, torch.Tensor]]:
    """Return this rank's pieces of one optimizer state: (start, stop, tensor) in the unit's flat space; scalars whole."""
    optimizer = slot.unit.optimizer
    found = []
    for run in optimizer.runs if optimizer is not None else ():
        if run.unit is not slot.unit or slot.index not in run.slots:
            continue
        value = optimizer.inner.state.get(run.tensor, {}).get(key)
        if value is None:
            continue
        value = torch.as_tensor(value)
        start, stop = max(slot.offset, run.start), min(slot.offset + slot.numel, run.stop)
        if value.numel() == run.stop - run.start and value.dim():
            found.append((start, stop, value.reshape(-1)[start - run.start : stop - run.start]))
        else:
            found.append((start, stop, value))
    return found
