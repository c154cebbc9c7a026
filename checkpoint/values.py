"""Plain Python values as JSON and back with their types: what schedulers, loss scales and parameter groups consist of."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointError

_MARK = "$"  # starts the one key of a dict that stands for something JSON lacks
_LARGEST = 1 << 16  # elements of a tensor or array that may lie in a JSON file
_SEQUENCES: dict[str, tuple[Any, Callable[[list], Any]]] = {
    "tuple": (tuple, tuple),
    "set": (set, set),
    "frozenset": (frozenset, frozenset),
    "deque": (deque, deque),
    "size": (torch.Size, torch.Size),
}
_MAPPINGS: dict[str, tuple[Any, Callable[[list], Any]]] = {
    "dict": (dict, dict),
    "counter": (Counter, lambda pairs: Counter(dict(pairs))),
    "ordered": (OrderedDict, OrderedDict),
    "defaultdict": (defaultdict, dict),
}


def to_json(value: Any, where: str) -> Any:
    """Return `value` as what the json module writes, so that `from_json` gives back the same values and types.

    Raises:
        CheckpointError: something in it cannot be stored; `where` and the path to it are named.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_MARK + "float": repr(value)}
    if type(value) is list:
        return [to_json(item, f"{where}[{i}]") for i, item in enumerate(value)]
    for name, (kind, _) in _SEQUENCES.items():
        if type(value) is kind:
            return {_MARK + name: [to_json(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if type(value) is dict and all(isinstance(key, str) and not key.startswith(_MARK) for key in value):
        return {key: to_json(item, f"{where}.{key}") for key, item in value.items()}
    for name, (kind, _) in _MAPPINGS.items():
        if type(value) is kind:
            return {_MARK + name: [[to_json(k, f"key of {where}"), to_json(v, f"{where}[{k!r}]")] for k, v in value.items()]}
    return _array(value, where)


def _array(value: Any, where: str) -> Any:
    if isinstance(value, torch.dtype):
        return {_MARK + "dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Tensor) and value.numel() <= _LARGEST and not value.is_sparse:
        dtype = str(value.dtype).removeprefix("torch.")
        # doubles hold every value of the floating dtypes
        exact = value.detach().cpu().double() if value.is_floating_point() else value.detach().cpu()
        return {_MARK + "tensor": [dtype, to_json(exact.tolist(), where)]}
    if isinstance(value, (np.ndarray, np.generic)) and value.size <= _LARGEST and value.dtype.kind in "biuf":
        return {_MARK + "numpy": [value.dtype.str, isinstance(value, np.ndarray), to_json(value.tolist(), where)]}
    raise CheckpointError(
        f"{where} holds a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot store; "
        "keep numbers, strings, small tensors, and lists, tuples and dicts of them there"
    )


def from_json(value: Any) -> Any:
    """Return the value that `to_json` was given."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith(_MARK):
        return {key: from_json(item) for key, item in value.items()}
    ((mark, content),) = value.items()
    name = mark.removeprefix(_MARK)
    if name == "float":
        return float(content)
    if name == "dtype":
        return getattr(torch, content)
    if name == "tensor":
        return torch.tensor(from_json(content[1]), dtype=getattr(torch, content[0]))
    if name == "numpy":
        array = np.array(from_json(content[2]), dtype=content[0])
        return array if content[1] else array[()]
    if name in _SEQUENCES:
        return _SEQUENCES[name][1]([from_json(item) for item in content])
    if name in _MAPPINGS:
        return _MAPPINGS[name][1]([(from_json(key), from_json(item)) for key, item in content])
    raise CheckpointError(f"a checkpoint holds a value of kind {name!r}, which this version does not know; update stateroom to read it")
