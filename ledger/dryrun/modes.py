"""The two torch modes of a dry run: one answers what asks for values, the other sees every operation.

Works around what torch 2.13 does with fake tensors: they have no data pointer, `numpy()` raises, and Module.to() cannot
swap a parameter that FakeTensorMode's memo still refers to. Uses torch._subclasses.fake_tensor, a private module.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .problems import NoValues

_ITEM = torch.ops.aten._local_scalar_dense.default
_NUMPY = (torch.Tensor.numpy, torch.Tensor.__array__)
_CPU = torch.device("cpu")


def stand_in(dtype: torch.dtype) -> bool | int | float:
    """Return the number that an unknown value is taken to be: 1, so that it may be divided by, its logarithm taken; flags are down."""
    if dtype == torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 1


class Answers(TorchFunctionMode):
    """Answers calls that fake tensors cannot: values as numbers or NumPy arrays, memory addresses, moves to an accelerator."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Answer, or pass the call on with every device replaced by the one there is."""
        kwargs = dict(kwargs or {})
        if func is torch.randperm:  # orders of samples are real: the script takes indices from them
            with unset_fake_temporarily():
                return func(*args, **{**kwargs, "device": _CPU})
        first = args[0] if args else None
        if isinstance(first, FakeTensor):
            if func is torch.Tensor.data_ptr:
                return first.untyped_storage()._cdata + first.storage_offset() * first.element_size()
            if func in _NUMPY:
                return _array(first, kwargs.get("dtype", args[1] if len(args) > 1 else None))
            if func is torch.Tensor.tolist and first.constant is None:
                return _array(first, None).tolist()
            if func is torch.Tensor.__bool__ and first.constant is None and first.numel() == 1:
                return False
            if func is torch.Tensor.__format__ and first.numel() == 1:
                return format(stand_in(first.dtype), args[1])
            if func in (torch.Tensor.cuda, torch.Tensor.pin_memory, torch.Tensor.cpu):
                return first
            if func is torch.Tensor.to:
                args = (first, *(_CPU if _is_device(value) else value for value in args[1:]))
        if kwargs.get("device") is not None and not _is_meta(kwargs["device"]):
            kwargs = {**kwargs, "device": _CPU}
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


def _array(tensor: torch.Tensor, dtype: Any) -> Any:
    import numpy

    like = torch.empty(0, dtype=tensor.dtype).dtype
    name = "float32" if like == torch.bfloat16 else str(like).removeprefix("torch.")
    return numpy.full(tuple(tensor.shape), stand_in(like), dtype=dtype or name)


def _is_device(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type != "meta"
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, str) and not value.startswith("meta"))


def _is_meta(device: Any) -> bool:
    return str(device).startswith("meta")


class Watch(TorchDispatchMode):
    """Sees every operation on fake tensors and hands it on to `after`: (operation, arguments, results)."""

    def __init__(self, fake: FakeTensorMode, after: Callable[[Any, tuple, dict[str, Any], Any], None]) -> None:
        super().__init__()
        self._memo = fake.fake_tensor_converter.meta_converter.tensor_memo
        self._after = after

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run the operation on shapes.

        Raises:
            NoValues: the shape of its result depends on values.
        """
        kwargs = kwargs or {}
        if func is _ITEM:
            return _item(args[0])
        try:
            result = func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            raise NoValues(
                f"{func} gives what depends on values (a mask, a count, a branch), and a dry run has shapes only; "
                "give this part of the script fixed sizes, or leave it out of the dry run"
            ) from error
        self._memo.clear()  # its weak references keep Module.to() from replacing parameters
        self._after(func, args, kwargs, result)
        return result


def _item(tensor: torch.Tensor) -> Any:
    if not isinstance(tensor, FakeTensor):
        with unset_fake_temporarily():
            return tensor.item()
    if tensor.constant is not None:
        with unset_fake_temporarily():
            return tensor.constant.item()
    return stand_in(tensor.dtype)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return the tensors among arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def bytes_of(tree: Any) -> int:
    """Return the bytes that the tensors of a tree stand for."""
    return sum(math.prod(tensor.shape) * tensor.element_size() for tensor in tensors_of(tree))
