"""Files of torch.save, opened lazily: structure without data, then only the elements that are asked for."""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..errors import CheckpointError
from .crc import crc32
from .pickles import RefusedName, RestrictedUnpickler, Storage, StorageType, Stored, TypedStorage

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, then the lengths of name and extra field
_ONE_MIB = 1 << 20
# what a damaged file makes the parsers raise
_BROKEN = (
    zipfile.BadZipFile,
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
    TypeError,
    struct.error,
    OverflowError,
    MemoryError,
    RecursionError,
    NotImplementedError,
    RuntimeError,
)


def load(path: str | os.PathLike[str], inert: Collection[str] = ()) -> Any:
    """Return what torch.save wrote, with a `Stored` for each tensor: no tensor data is read and nothing is executed.

    Args:
        path: a file in the zip format of torch 1.6 and later, or in the older stream format.
        inert: full names of classes whose objects become `Inert` records.

    Raises:
        CheckpointError: the file is missing, damaged, of another byte order, or names a class that is not on the list.
    """
    path = os.fspath(path)
    try:
        with open(path, "rb") as file:
            if file.read(4) == b"PK\x03\x04":
                return _load_zip(file, path, inert)
            return _load_stream(file, path, inert)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist; the checkpoint is incomplete: copy the missing file, or choose another tag"
        ) from None
    except RefusedName as refused:
        raise CheckpointError(
            f"{path} is refused: its pickle names {refused}, which could run code when loaded; nothing was executed. "
            "If it is a harmless record in the client state, name its class to be read as data (--inert MODULE.CLASS)"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except _BROKEN as error:
        text = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{path} is damaged or no file of torch.save ({text}); restore it from a copy, or choose another tag"
        ) from None


def fill(out: torch.Tensor, stored: Stored, start: int) -> None:
    """Write the elements of a stored tensor from `start` on, in row-major order, into `out`: 1-D, contiguous, of its dtype.

    Only these bytes are read when the tensor is contiguous, else the span of the file that holds it.

    Raises:
        CheckpointError: the file has become shorter or unreadable.
    """
    if stored.contiguous:
        _fill(out, stored, stored.offset + start)
    else:
        last = sum((size - 1) * step for size, step in zip(stored.shape, stored.stride, strict=True))
        span = torch.empty(last + 1, dtype=stored.dtype)
        _fill(span, stored, stored.offset)
        out.copy_(span.as_strided(stored.shape, stored.stride).flatten()[start : start + out.numel()])


def read_whole(stored: Stored) -> torch.Tensor:
    """Return a stored tensor in its shape, on the CPU, in its stored dtype."""
    out = torch.empty(stored.numel, dtype=stored.dtype)
    if stored.numel:
        fill(out, stored, 0)
    return out.view(stored.shape)


def materialize(value: Any) -> Any:
    """Return a loaded structure with its stored tensors read; records stay records."""
    if isinstance(value, Stored):
        return read_whole(value)
    if isinstance(value, dict):
        return type(value)((key, materialize(item)) for key, item in value.items()) if type(value) in (dict, OrderedDict) else value
    if type(value) in (list, tuple, set):
        return type(value)(materialize(item) for item in value)
    return value


def damage(path: str | os.PathLike[str]) -> Iterator[tuple[int, int]]:
    """Yield the byte range of each record of a zip file whose checksum is wrong; needs no unpickling.

    Raises:
        CheckpointError: the file is no zip file, or has lost its end.
    """
    try:
        with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
            for info in archive.infolist():
                begin = _begin(file, info)
                if _checksum(file, begin, info.file_size) != info.CRC:
                    yield begin, begin + info.file_size
    except (OSError, zipfile.BadZipFile, struct.error, ValueError) as error:
        raise CheckpointError(f"{os.fspath(path)} is damaged: {error}; restore it from a copy") from None


def _fill(out: torch.Tensor, stored: Stored, first: int) -> None:
    """Read elements into a 1-D tensor, straight into its memory."""
    if not out.numel():
        return
    storage = stored.storage
    assert storage.begin is not None
    array: Any = out.view(torch.uint8).numpy()
    view = memoryview(array)
    try:
        with open(storage.file, "rb", buffering=0) as file:
            file.seek(storage.begin + first * stored.dtype.itemsize)
            done = 0
            while done < len(view):  # one read gives 2 GiB at most
                got = file.readinto(view[done:])
                if not got:
                    raise CheckpointError(f"{storage.file} has lost its end since it was opened; restore it from a copy")
                done += got
    except OSError as error:
        raise CheckpointError(f"{storage.file} cannot be read: {error.strerror or error}") from error


# ---- the zip format


def _load_zip(file: BinaryIO, path: str, inert: Collection[str]) -> Any:
    archive = zipfile.ZipFile(file)
    records = {info.filename: info for info in archive.infolist()}
    main = next((name for name in records if name.endswith("/data.pkl") or name == "data.pkl"), None)
    if main is None:
        raise ValueError("a zip file without data.pkl")
    prefix = main[: -len("data.pkl")]
    if any(info.compress_type != zipfile.ZIP_STORED for info in records.values()):
        raise ValueError("compressed records")
    order = records.get(prefix + "byteorder")
    if order is not None and archive.read(order).decode() != sys.byteorder:
        raise CheckpointError(f"{path} was written on a machine of another byte order; convert it there")
    storages: dict[str, Storage] = {}

    def storage_of(pid: Any) -> TypedStorage:
        kind, storage_type, key, _location, _numel = pid
        if kind != "storage" or not isinstance(storage_type, StorageType):
            raise pickle.UnpicklingError("an unknown kind of reference")
        if key not in storages:
            info = records[f"{prefix}data/{key}"]
            storages[key] = Storage(path, info.file_size, _begin(file, info))
        return TypedStorage(storages[key], storage_type.dtype)

    # zipfile compares the checksum: a flipped byte in the structure is never interpreted
    return RestrictedUnpickler(io.BytesIO(archive.read(main)), storage_of, inert).load()


def _begin(file: BinaryIO, info: zipfile.ZipInfo) -> int:
    """Return where a record's bytes start; its local header may be longer than the directory says (torch aligns data)."""
    at = file.tell()
    file.seek(info.header_offset)
    signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    file.seek(at)
    if signature != b"PK\x03\x04":
        raise zipfile.BadZipFile(f"no record at byte {info.header_offset}")
    begin = info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
    if begin + info.file_size > os.fstat(file.fileno()).st_size:
        raise zipfile.BadZipFile(f"record {info.filename} reaches beyond the end of the file")
    return int(begin)


def _checksum(file: BinaryIO, begin: int, size: int) -> int:
    file.seek(begin)
    value = 0
    while size:
        block = file.read(min(size, _ONE_MIB))
        if not block:
            return -1
        value = crc32(block, value)
        size -= len(block)
    return value


# ---- the stream format of torch 1.5 and earlier


def _load_stream(file: BinaryIO, path: str, inert: Collection[str]) -> Any:
    file.seek(0)
    storages: dict[str, Storage] = {}
    items: dict[str, int] = {}

    def storage_of(pid: Any) -> TypedStorage:
        kind, storage_type, key, _location, numel, view = pid
        if kind != "storage" or not isinstance(storage_type, StorageType) or view is not None:
            raise pickle.UnpicklingError("an unknown kind of reference")
        item = 1 if storage_type.dtype is None else storage_type.dtype.itemsize
        items[key] = item
        return TypedStorage(storages.setdefault(key, Storage(path, numel * item)), storage_type.dtype)

    if RestrictedUnpickler(file, storage_of, inert).load() != _LEGACY_MAGIC:
        raise ValueError("no magic number")
    RestrictedUnpickler(file, storage_of, inert).load()  # the protocol's version
    system = RestrictedUnpickler(file, storage_of, inert).load()
    if system.get("little_endian", True) != (sys.byteorder == "little"):
        raise CheckpointError(f"{path} was written on a machine of another byte order; convert it there")
    value = RestrictedUnpickler(file, storage_of, inert).load()
    at = None
    for key in RestrictedUnpickler(file, storage_of, inert).load():
        at = file.tell() if at is None else at
        file.seek(at)
        (count,) = struct.unpack("<q", file.read(8))
        storages[key].begin = at + 8
        at += 8 + count * items[key]
    if at is not None and at > Path(path).stat().st_size:
        raise EOFError("the file has lost its end")
    if any(storage.begin is None for storage in storages.values()):
        raise ValueError("a tensor without data")
    return value
