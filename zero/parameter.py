"""A parameter whose values are elsewhere: what may be asked of it, and what happens when its values are touched."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import EngineError

if TYPE_CHECKING:
    from .unit import Unit

SLOT = "stateroom_slot"  # the attribute by which a parameter knows its place

# What torch calls these through __torch_function__: they ask for shape or bookkeeping, never for values.
_HARMLESS_PROPERTIES = frozenset(
    """shape dtype device requires_grad grad grad_fn grad_dtype is_leaf ndim layout names output_nr _version _backward_hooks
    _post_accumulate_grad_hooks is_sparse is_quantized is_meta is_cuda is_cpu is_xpu is_mps is_nested is_mkldnn is_sparse_csr
    itemsize nbytes retains_grad _base is_ipu is_xla is_vulkan is_maia is_mtia is_hpu""".split()  # noqa: SIM905
)
_HARMLESS_METHODS = frozenset(
    """numel size dim ndimension nelement element_size is_floating_point is_complex requires_grad_ register_hook get_device
    register_post_accumulate_grad_hook is_contiguous retain_grad stride storage_offset __hash__ __len__ has_names is_signed
    is_inference _has_compatible_shallow_copy_type is_same_size _is_view is_conj is_neg""".split()  # noqa: SIM905
)


_CONVERSIONS = frozenset(("to", "half", "float", "double", "bfloat16", "cpu", "cuda", "type"))


class ZeroParamStatus(Enum):
    """Whether a parameter's values are here (DeepSpeed's names)."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class Slot:
    """A parameter's place: its unit and its number there; set as an attribute on the parameter itself."""

    __slots__ = ("absent", "cls", "index", "name", "numel", "offset", "param", "shape", "unit", "version", "view")

    def __init__(self, unit: Unit, index: int, name: str, param: nn.Parameter) -> None:
        self.unit = unit
        self.index = index
        self.name = name
        self.param = param
        self.shape = param.shape
        self.cls = type(param)
        self.view: torch.Tensor | None = None
        self.version = 0  # of the values that the master weights know
        extent = unit.layout.extents[index]
        self.offset, self.numel = extent.offset, extent.numel  # in the unit's flat space
        self.absent: torch.Tensor | None = None  # what the parameter holds while its values are released


def slot_of(param: torch.Tensor) -> Slot | None:
    """Return the parameter's place, or None for a parameter that no engine holds."""
    return getattr(param, SLOT, None)


class Released:
    """Mixed into the class of a parameter while its values are released; each use of the values asks its unit first.

    The tensor behind it is a NaN expanded to the right shape, so that shape, dtype and device are always true and a use
    that slips past Python can be seen.
    """

    ds_status = property(lambda self: ZeroParamStatus.NOT_AVAILABLE)  # goes before what the parameter itself holds

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Answer questions about shape; gather the unit for the rest where that is allowed, else raise."""
        kwargs = kwargs or {}
        if not _is_harmless(func):
            name = getattr(func, "__name__", "")
            if name == "__repr__":
                return describe(args[0])
            if name in _CONVERSIONS and isinstance(args[0], Released) and _converts_nothing(func, args, kwargs):
                return args[0]
            if name == "__set__" and args[0] is args[1]:  # what module.to() does with a parameter that is right already
                return None
            for param in _released_in((args, kwargs)):
                _ask_for(param)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> Any:
        """Gather, together with all ranks, and copy: a copy of released values would be a copy of nothing."""
        slot = slot_of(self)  # type: ignore[arg-type]
        assert slot is not None
        slot.unit.on_copy(slot)
        return copy.deepcopy(self, memo)  # this parameter has its own class and values again

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse or gather before pickling."""
        _ask_for(self)
        return nn.Parameter.__reduce_ex__(self, protocol)  # type: ignore[arg-type]


@cache
def released_class(cls: type) -> type:
    """Return the class that stands for `cls` (nn.Parameter or a subclass) while values are released."""
    return type(f"Released{cls.__name__}", (Released, cls), {})


def hide(slots: Sequence[Slot], nan: torch.Tensor) -> None:
    """Take the values away: the parameters keep shape, dtype and identity."""
    for slot in slots:
        if slot.absent is None:  # expanding costs ten times as much as the rest
            slot.absent = nan.expand(slot.shape)
        param = slot.param
        param.data = slot.absent
        param.__class__ = released_class(slot.cls)


def show(slots: Sequence[Slot]) -> None:
    """Give the values back."""
    for slot in slots:
        param = slot.param
        param.__class__ = slot.cls
        param.data = slot.view  # type: ignore[assignment]


def describe(param: torch.Tensor) -> str:
    """Return what a released parameter is, without its values."""
    slot = slot_of(param)
    with torch._C.DisableTorchFunctionSubclass():
        shape, dtype = tuple(param.shape), param.dtype
    name = slot.name if slot else "?"
    return f"Parameter {name!r} (released: sharded by ZeRO-3, shape {shape}, {dtype})"


def _ask_for(param: Any) -> None:
    """Let the unit gather the parameter, or raise."""
    slot = slot_of(param)
    assert slot is not None
    slot.unit.on_access(slot)


def _is_harmless(func: Callable[..., Any]) -> bool:
    if func is torch.autograd.grad:  # parameters are what it differentiates by; the backward gathers what it needs
        return True
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        owner = getattr(func, "__self__", None)
        return getattr(owner, "__name__", "") in _HARMLESS_PROPERTIES
    return name in _HARMLESS_METHODS


def _converts_nothing(func: Callable[..., Any], args: tuple, kwargs: dict) -> bool:
    """Tell whether a conversion leaves the parameter as it is.

    Raises:
        EngineError: it would not, and the parameter is not in use: half(), to() and their kind come too late.
    """
    slot = slot_of(args[0])
    assert slot is not None
    unit = slot.unit
    with torch._C.DisableTorchFunctionSubclass():
        probe = func(torch.empty(0, dtype=unit.dtype, device=unit.comm.device), *args[1:], **kwargs)
    if isinstance(probe, torch.Tensor) and probe.dtype == unit.dtype and probe.device == unit.comm.device and not kwargs.get("copy"):
        return True
    try:
        _ask_for(args[0])
    except EngineError as error:
        raise EngineError(
            f"{error}. If this came from half(), to() or their kind: the model was placed by initialize(), so its dtype and device are "
            "fixed; convert it before, or set bf16 or fp16 in the config"
        ) from None
    return False


def _released_in(tree: Any) -> list[Released]:
    """Return the released parameters among the arguments of one call."""
    if isinstance(tree, Released):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [found for item in tree for found in _released_in(item)]
    if isinstance(tree, dict):
        return [found for item in tree.values() for found in _released_in(item)]
    return []
