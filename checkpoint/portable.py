"""One rank's own values (random number generators, client state) as a file that loads without running code from it."""

from __future__ import annotations

import argparse
import io
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointError

_numpy_core = np.core if np.lib.NumpyVersion(np.__version__) < "2.0.0" else np._core  # type: ignore[attr-defined]
# beside what torch.load(weights_only=True) takes: what scripts put into client_state
ALLOWED: tuple[Any, ...] = (
    argparse.Namespace,
    set,
    frozenset,
    np.ndarray,
    np.dtype,
    _numpy_core.multiarray.scalar,
    _numpy_core.multiarray._reconstruct,
    *(type(np.dtype(code)) for code in "?bhilqBHILQefdg"),
)


def dump(value: Any, what: str) -> bytes:
    """Return `value` as the content of a file that `load` takes.

    Raises:
        CheckpointError: it would not load again; names the first entry of `what` that is to blame, and its type.
    """
    try:
        return _dumped(value)
    except (pickle.PickleError, TypeError, AttributeError, RuntimeError, ValueError, NotImplementedError) as error:
        path, culprit = _first_bad(value, what)
        raise CheckpointError(
            f"{path} is a {type(culprit).__module__}.{type(culprit).__qualname__}, which would not load again without running code "
            "from the file; keep numbers, strings, tensors, numpy arrays, and lists, tuples and dicts of them there"
        ) from error


def load(content: bytes, path: Any) -> Any:
    """Return what `dump` was given.

    Raises:
        CheckpointError: it is damaged, or asks for a class that is not on the list.
    """
    try:
        with torch.serialization.safe_globals(list(ALLOWED)):
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error


def _dumped(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    content = file.getvalue()
    with torch.serialization.safe_globals(list(ALLOWED)):
        torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return content


def _first_bad(value: Any, path: str) -> tuple[str, Any]:
    """Return the path of the innermost value that cannot be stored, and the value."""
    inner: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        inner = [*((f"a key of {path}", key) for key in value), *((f"{path}[{key!r}]", item) for key, item in value.items())]
    elif isinstance(value, (list, tuple)):
        inner = [(f"{path}[{i}]", item) for i, item in enumerate(value)]
    elif isinstance(value, argparse.Namespace):
        inner = [(f"{path}.{key}", item) for key, item in vars(value).items()]
    for name, item in inner:
        try:
            _dumped(item)
        except Exception:
            return _first_bad(item, name)
    return path, value
