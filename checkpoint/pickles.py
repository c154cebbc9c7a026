"""Unpickling without running anything: known builders make inert records, every other name is refused by name."""

from __future__ import annotations

import argparse
import collections
import datetime
import importlib
import pathlib
import pickle
import types
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, BinaryIO, ClassVar

import torch


class RefusedName(Exception):
    """A pickle names a class or function that is not on the list."""


class Inert:
    """What was stored of an object whose class is not loaded: constructor arguments and state, no behaviour.

    Subclasses are made on the fly, one for each class name met; `origin` is that name.
    """

    origin: ClassVar[str] = ""

    def __new__(cls, *args: Any) -> Inert:
        """Keep the arguments."""
        made = super().__new__(cls)
        made.args = args
        made.state = {}
        made.called = False  # type(...)(*args) rather than type(...).__new__: tells how to write it again
        return made

    def __init__(self, *args: Any) -> None:
        self.args: tuple[Any, ...] = args
        self.state: Any
        self.called = True

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return f"<{self.origin} {self.args or ''}{self.state or ''}>"

    def get(self, key: str, default: Any = None) -> Any:
        """Return an attribute that the object had when it was stored."""
        return self.state.get(key, default) if isinstance(self.state, dict) else default


@dataclass
class Storage:
    """Bytes of a file that one or more tensors are views of; `begin` is None until the file tells where they lie."""

    file: str
    nbytes: int
    begin: int | None = None


@dataclass(frozen=True)
class Stored:
    """A tensor that lies in a file and has not been read: shape and strides over elements of a storage."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return _product(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether the elements follow one another in row-major order."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def place(self) -> tuple[str, int | None, int, tuple[int, ...]]:
        """Equal for two names of the same elements."""
        return self.storage.file, self.storage.begin, self.offset * self.dtype.itemsize, self.shape


@dataclass(frozen=True)
class StorageType:
    """The class of a storage, as pickles name it; `dtype` is None for one without a type."""

    dtype: torch.dtype | None


@dataclass(frozen=True)
class TypedStorage:
    """A storage as a pickle refers to it, before a tensor is laid over it."""

    storage: Storage
    dtype: torch.dtype | None


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _tensor(base: TypedStorage, offset: int, shape: Any, stride: Any, *rest: Any, dtype: torch.dtype | None = None) -> Stored:
    dtype = dtype or base.dtype
    if not isinstance(base, TypedStorage) or not isinstance(dtype, torch.dtype):
        raise RefusedName("a tensor over something that is no storage")
    stored = Stored(base.storage, dtype, int(offset), tuple(map(int, shape)), tuple(map(int, stride)))
    if any(size < 0 for size in (offset, *stored.shape, *stored.stride)):
        raise pickle.UnpicklingError("a tensor with a negative size")
    last = offset + sum((size - 1) * step for size, step in zip(stored.shape, stored.stride, strict=True))
    if stored.numel and (last + 1) * dtype.itemsize > base.storage.nbytes:
        raise pickle.UnpicklingError("a tensor that reaches beyond its storage")
    return stored


def _tensor_v3(base: TypedStorage, offset: int, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: torch.dtype, *rest: Any) -> Stored:
    return _tensor(base, offset, shape, stride, dtype=dtype)


def _parameter(data: Stored, *rest: Any) -> Stored:
    return data


def _from_type(build: Callable[..., Any], _type: Any, args: tuple[Any, ...], _state: Any) -> Any:
    if build not in (_tensor, _tensor_v3, _parameter):
        raise RefusedName("a tensor subclass with a builder of its own")
    return build(*args)


def _encode(text: str, encoding: str = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise RefusedName(f"_codecs.encode with {encoding}")
    return text.encode("latin1")


_BUILDERS: dict[str, Any] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.Tensor": types.NoneType,
    "torch.nn.parameter.Parameter": types.NoneType,
    "torch.Size": torch.Size,
    "torch.device": torch.device,
    "torch.storage.UntypedStorage": StorageType(None),
    "torch.UntypedStorage": StorageType(None),
    "collections.OrderedDict": collections.OrderedDict,
    "collections.defaultdict": collections.defaultdict,
    "collections.Counter": collections.Counter,
    "collections.deque": collections.deque,
    "argparse.Namespace": argparse.Namespace,
    "types.SimpleNamespace": types.SimpleNamespace,
    "datetime.datetime": datetime.datetime,
    "datetime.date": datetime.date,
    "datetime.timedelta": datetime.timedelta,
    "pathlib.PosixPath": pathlib.PurePosixPath,
    "pathlib.PurePosixPath": pathlib.PurePosixPath,
    "pathlib.WindowsPath": pathlib.PureWindowsPath,
    "_codecs.encode": _encode,
}
_BUILTINS = (set, frozenset, list, dict, tuple, int, float, complex, bool, str, bytes, bytearray, slice, range)
_BUILDERS.update({f"{module}.{kind.__name__}": kind for module in ("builtins", "__builtin__") for kind in _BUILTINS})

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}


_PythonUnpickler: Any = pickle._Unpickler  # type: ignore[attr-defined]


class RestrictedUnpickler(_PythonUnpickler):  # type: ignore[misc]
    """Builds plain containers, `Stored` tensors and `Inert` records; raises `RefusedName` for any other class or function.

    The pure Python unpickler is used (seen to work on 3.10 to 3.13) because the one in C cannot be told to leave
    classes alone when a pickle sets attributes on them.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(_PythonUnpickler.dispatch)

    def __init__(self, file: BinaryIO, storage_of: Callable[[Any], TypedStorage], inert: Collection[str]) -> None:
        super().__init__(file, encoding="utf-8")
        self._storage_of = storage_of
        self._inert = inert
        self._classes: dict[str, type[Inert]] = {}

    def persistent_load(self, pid: Any) -> TypedStorage:
        """Return the storage that a persistent id stands for."""
        return self._storage_of(pid)

    def find_class(self, module: str, name: str) -> Any:
        """Return the builder, type or inert class for a name.

        Raises:
            RefusedName: the name is not on the list.
        """
        full = f"{module}.{name}"
        if full in _BUILDERS:
            return _BUILDERS[full]
        if full in self._inert:
            return self._classes.setdefault(full, type(name, (Inert,), {"origin": full}))
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return StorageType(_STORAGES[name])
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.startswith("numpy"):
            return _numpy_builder(module, name)
        raise RefusedName(full)

    def _load_build(self) -> None:
        target = self.stack[-2]
        if not isinstance(target, (Inert, *_PLAIN)) and not type(target).__module__.startswith("numpy"):
            raise RefusedName(f"attributes set on {type(target).__name__}")
        _PythonUnpickler.load_build(self)

    dispatch[pickle.BUILD[0]] = _load_build


_PLAIN = (
    collections.OrderedDict,
    collections.defaultdict,
    collections.Counter,
    collections.deque,
    argparse.Namespace,
    types.SimpleNamespace,
    set,
    dict,
    list,
)


def _numpy_builder(module: str, name: str) -> Any:
    """Return one of the few things that arrays and scalars of numpy are pickled with."""
    import numpy as np

    if f"{module}.{name}" in ("numpy.ndarray", "numpy.dtype"):
        return getattr(np, name)
    if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name in ("_reconstruct", "scalar"):
        try:
            multiarray = importlib.import_module("numpy._core.multiarray")
        except ImportError:  # numpy 1 has it under the older name
            multiarray = importlib.import_module("numpy.core.multiarray")
        return getattr(multiarray, name)
    raise RefusedName(f"{module}.{name}")
