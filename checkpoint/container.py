"""The bytes of torch.distributed.checkpoint's files: items as torch.save would make them, and the metadata that names them.

Works around: `dcp.save` of torch 2.13 reached 37 to 63 % of the disk's rate and keeps no checksums. Its reader,
`FileSystemReader`, takes what is written here (seen on 2.13). An item is a zip archive whose members are stored, not
compressed, so the data lies in the file as it is; all lengths but the data's follow from the number of axes, so that any
rank can compute where any other rank's bytes lie.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch

from .boxes import box_at
from .crc import crc32
from .plan import Framing

ALIGN = 64  # of an item in its file, and of the data in an item
ITEM_LIMIT_BYTES = 1 << 30  # larger items would need the 64-bit form of zip
METADATA_FILE = ".metadata"

_FOLDER = "archive/"
_PICKLE, _ORDER, _VERSION, _DATA = (_FOLDER + name for name in ("data.pkl", "byteorder", "version", "data/0"))
_SMALL = ((_ORDER, b"little"), (_VERSION, b"3\n"))
_LOCAL, _CENTRAL, _END, _DESCRIPTOR = (struct.Struct(form) for form in ("<4s5H3I2H", "<4s6H3I5H2I", "<4s4H2IH", "<4s3I"))
_SIZE_LATER = 8  # flag: CRC and size stand behind the data
_DOS_DATE = 33  # 1980-01-01, the first that zip knows
_HEADER_BYTES, _AXIS_BYTES = 448, 20
_AROUND_PICKLE_BYTES = sum(_LOCAL.size + len(name) for name in (_PICKLE, _ORDER, _VERSION, _DATA)) + sum(len(c) for _, c in _SMALL) + 4
TRAILER_BYTES = _DESCRIPTOR.size + _END.size + sum(_CENTRAL.size + len(name) for name in (_PICKLE, _ORDER, _VERSION, _DATA))


def header_bytes(num_axes: int) -> int:
    """Return the bytes of an item before its data."""
    return -(-(_HEADER_BYTES + _AXIS_BYTES * num_axes) // ALIGN) * ALIGN


def item_bytes(num_axes: int, data_bytes: int) -> int:
    """Return the bytes of an item."""
    return header_bytes(num_axes) + data_bytes + TRAILER_BYTES


FRAMING = Framing(header_bytes, TRAILER_BYTES, ALIGN, ITEM_LIMIT_BYTES)


@lru_cache(4096)
def item_frame(sizes: tuple[int, ...], dtype: torch.dtype) -> ItemFrame:
    """Return what goes around the data of a tensor of shape `sizes`."""
    return ItemFrame(pickled(TensorMark(sizes, dtype)), prod(sizes) * dtype.itemsize, header_bytes(len(sizes)))


class ItemFrame:
    """Header and trailer of one item.

    Args:
        structure: the pickle, in which storage 0 is the data.
        data_bytes: length of the data.
        length: bytes in front of the data; default: as few as hold the pickle and let the data begin at an aligned place.
    """

    def __init__(self, structure: bytes, data_bytes: int, length: int | None = None) -> None:
        self._members: list[tuple[str, int, int, int]] = []  # name, CRC, size, offset
        self._data_bytes = data_bytes
        if length is None:
            length = -(-(_AROUND_PICKLE_BYTES + len(structure)) // ALIGN) * ALIGN
        header = bytearray()
        for name, content in ((_PICKLE, structure), *_SMALL):
            self._add(header, name, crc32(content), len(content))
            header += content
        room = length - len(header) - _LOCAL.size - len(_DATA)
        assert room >= 4, f"an item's header of {length} bytes has no room for a pickle of {len(structure)}"
        self._add(header, _DATA, 0, data_bytes, extra=b"FB" + struct.pack("<H", room - 4) + b"Z" * (room - 4))
        self.header = bytes(header)

    def _add(self, header: bytearray, name: str, crc: int, size: int, extra: bytes = b"") -> None:
        self._members.append((name, crc, size, len(header)))
        later = _SIZE_LATER if name == _DATA else 0
        known = (0, 0, 0) if later else (crc, size, size)
        header += _LOCAL.pack(b"PK\3\4", 20, later, 0, 0, _DOS_DATE, *known, len(name), len(extra)) + name.encode() + extra

    def trailer(self, crc: int) -> bytes:
        """Return the bytes behind the data, whose CRC-32 is `crc`."""
        out = bytearray(_DESCRIPTOR.pack(b"PK\7\x08", crc, self._data_bytes, self._data_bytes))
        start = len(self.header) + self._data_bytes + len(out)
        for name, known, size, offset in self._members:
            is_data = name == _DATA
            fields = (20, 20, _SIZE_LATER if is_data else 0, 0, 0, _DOS_DATE, crc if is_data else known, size, size)
            at = len(out)
            out += _CENTRAL.pack(b"PK\1\2", *fields, len(name), 0, 0, 0, 0, 0, offset) + name.encode()
            assert len(out) - at == _CENTRAL.size + len(name)
        directory = len(out) - _DESCRIPTOR.size
        out += _END.pack(b"PK\5\6", 0, 0, len(self._members), len(self._members), directory, start, 0)
        return bytes(out)


class _Storage:
    """Stands for the storage of the tensor in its pickle."""

    def __init__(self, dtype: torch.dtype, numel: int) -> None:
        kind = _storage_class(dtype)
        # torch.load names a storage by its class, key, device and number of elements
        self.id = ("storage", kind, "0", "cpu", numel * (dtype.itemsize if kind is torch.UntypedStorage else 1))


class TensorMark:
    """Pickles as a contiguous tensor of this shape over storage 0."""

    def __init__(self, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
        self.sizes, self.dtype = sizes, dtype

    def __reduce__(self) -> tuple[Any, ...]:
        strides = tuple(prod(self.sizes[axis + 1 :]) for axis in range(len(self.sizes)))
        common: tuple[Any, ...] = (_Storage(self.dtype, prod(self.sizes)), 0, self.sizes, strides, False, OrderedDict())
        if _storage_class(self.dtype) is torch.UntypedStorage:
            return torch._utils._rebuild_tensor_v3, (*common, self.dtype)
        return torch._utils._rebuild_tensor_v2, common


def _storage_class(dtype: torch.dtype) -> type:
    found = torch.storage._dtype_to_storage_type_map().get(dtype)
    return torch.UntypedStorage if found is None else getattr(torch, found)


class WithStorages:
    """What a pickler of structures with a `TensorMark` has beside its base."""

    def persistent_id(self, value: Any) -> Any:
        """Return how torch.load finds the storage."""
        return value.id if isinstance(value, _Storage) else None


class _Pickler(WithStorages, pickle.Pickler):
    """The one for structures of plain things."""


def pickled(value: Any, pickler: Any = _Pickler) -> bytes:
    """Return the pickle that torch.save would write of a structure with one tensor, for which a `TensorMark` stands."""
    file = io.BytesIO()
    pickler(file, protocol=2).dump(value)
    return file.getvalue()


class StoredTensor(NamedTuple):
    """A tensor of the checkpoint and its pieces: (flat start, flat stop, file, byte offset of the data)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Iterable[tuple[int, int, str, int]]


def metadata_bytes(tensors: Mapping[str, StoredTensor], aliases: Mapping[str, str]) -> bytes:
    """Return the content of the metadata file: every tensor with its pieces; an alias names the pieces of another."""
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    described: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    names: dict[str, list[str]] = {key: [key] for key in tensors}
    for alias, key in aliases.items():
        names[key].append(alias)
    for key, tensor in tensors.items():
        chunks: list[ChunkStorageMetadata] = []
        for start, stop, file, data_at in tensor.pieces:
            box = box_at(tensor.shape, start, stop - start)
            offsets, sizes = torch.Size(box.offsets), torch.Size(box.sizes)
            lead = header_bytes(len(sizes))
            info = _StorageInfo(file, data_at - lead, item_bytes(len(sizes), (stop - start) * tensor.dtype.itemsize))
            for name in names[key]:
                stored[MetadataIndex(name, offsets, len(chunks))] = info
            chunks.append(ChunkStorageMetadata(offsets, sizes))
        whole = TensorStorageMetadata(TensorProperties(tensor.dtype), torch.Size(tensor.shape), chunks)
        for name in names[key]:
            described[name] = whole
    paths = {name: (name,) for name in described}
    return pickle.dumps(Metadata(described, paths, stored, None, CURRENT_DCP_VERSION), protocol=4)
