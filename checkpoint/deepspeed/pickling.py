"""torch.save for dictionaries with records of classes that are not here: written back under their own names."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch

from ..container import WithStorages, pickled
from ..pickles import Inert


def record(origin: str, state: dict[str, Any]) -> Inert:
    """Return a record that unpickles, where its class is, as an object with these attributes.

    Args:
        origin: full name of the class, such as "deepspeed.runtime.fp16.loss_scaler.LossScaler".
        state: its attributes.
    """
    kind: type[Inert] = type(origin.rpartition(".")[2], (Inert,), {"origin": origin})
    made = kind.__new__(kind)
    made.state = state
    return made


def save(value: Any, file: BinaryIO) -> None:
    """Write what torch.save would write where all classes could be imported."""
    torch.save(value, file, pickle_module=SimpleNamespace(Pickler=_Pickler, __name__="pickle"))


def structure(value: Any) -> bytes:
    """Return the pickle inside of what `save` would write of a structure with one tensor, for which a `TensorMark` stands."""
    return pickled(value, _StoragePickler)


_PythonPickler: Any = pickle._Pickler  # type: ignore[attr-defined]


class _Pickler(_PythonPickler):  # type: ignore[misc]
    """Writes the name of a record's class without importing it, which the pickler in C insists on (3.10 to 3.13 alike)."""

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if not isinstance(obj, Inert):
            super().save(obj, save_persistent_id)
            return
        known = self.memo.get(id(obj))
        if known is not None:
            self.write(self.get(known[0]))
            return
        module, _, name = obj.origin.rpartition(".")
        self.write(pickle.GLOBAL + f"{module}\n{name}\n".encode())
        self.save(obj.args)
        self.write(pickle.REDUCE if obj.called else pickle.NEWOBJ)
        self.memoize(obj)
        if obj.state:
            self.save(obj.state)
            self.write(pickle.BUILD)


class _StoragePickler(WithStorages, _Pickler):
    """The same for the pickle alone."""
