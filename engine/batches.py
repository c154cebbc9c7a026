"""How a batch is handed to a module, and where the loss is in what comes back."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from ..errors import EngineError


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Return `tree` with `fn` applied to each tensor in it; containers keep their types, and what holds no tensor stays the same object.

    Looks into dicts and other mappings (tokenizers' batches too), lists, tuples, named tuples, dataclasses and packed sequences.
    """
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if isinstance(tree, PackedSequence):
        return tree._replace(data=fn(tree.data)) if fn(tree.data) is not tree.data else tree
    if isinstance(tree, Mapping):
        return _rebuilt(tree, {key: map_tensors(fn, value) for key, value in tree.items()})
    if isinstance(tree, (list, tuple)):
        items = [map_tensors(fn, value) for value in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _dataclass_rebuilt(fn, tree)
    return tree


def _rebuilt(old: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping like `old` with other values: a shallow copy, so that whatever else it carries comes along."""
    if all(items[key] is old[key] for key in items):
        return old
    if type(old) is dict:
        return items
    new = copy.copy(old)
    if getattr(new, "data", None) is getattr(old, "data", NotImplemented):  # UserDict's shallow copy may share its dict
        new.data = dict(old)  # type: ignore[attr-defined]
    for key, value in items.items():
        new[key] = value  # type: ignore[index]
    return new


def _dataclass_rebuilt(fn: Callable[[torch.Tensor], torch.Tensor], old: Any) -> Any:
    changed = {}
    for field in dataclasses.fields(old):
        value = getattr(old, field.name, None)
        mapped = map_tensors(fn, value)
        if mapped is not value:
            changed[field.name] = mapped
    if not changed:
        return old
    new = copy.copy(old)
    for name, value in changed.items():
        object.__setattr__(new, name, value)  # frozen dataclasses too
    return new


def to_device(tree: Any, device: torch.device) -> Any:
    """Return the batch with every tensor on the device; dtypes stay."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), tree)


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """Return the arguments with every floating-point tensor in `dtype` (fp16.auto_cast)."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree)


def call_with_batch(engine: Any, batch: Any, loss_fn: Any, device: torch.device) -> Any:
    """Run the engine on a batch: a mapping as keywords, a tuple as arguments; with loss_fn the last item is the target."""
    batch = to_device(batch, device)
    if loss_fn is not None:
        if not isinstance(batch, (list, tuple)) or len(batch) < 2:
            raise EngineError(f"with loss_fn a batch is (inputs, labels), got {type(batch).__name__}")
        inputs, labels = batch[0] if len(batch) == 2 else tuple(batch[:-1]), batch[-1]
        outputs = engine(*inputs) if isinstance(inputs, (list, tuple)) else engine(inputs)
        return loss_fn(outputs, labels)
    if isinstance(batch, Mapping):
        return engine(**batch)
    return engine(*batch) if isinstance(batch, (list, tuple)) else engine(batch)


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss in a module's output: the tensor itself, `.loss`, ["loss"], or the first item.

    Raises:
        EngineError: none of these is a scalar tensor.
    """
    found = output
    if not isinstance(output, torch.Tensor):
        found = getattr(output, "loss", None)
        if found is None and isinstance(output, Mapping):
            found = output.get("loss")
        if found is None and isinstance(output, (list, tuple)) and output:
            found = output[0]
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        raise EngineError(f"no scalar loss in the module's output ({type(output).__name__}); return it, or pass loss_fn to initialize")
    return found
