"""From a name, a file, or plain data to a shape."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..problems import LedgerError, look_up, nearest
from .catalogue import Entry, catalogue
from .hf import shape_from_config
from .shape import Latent, Mixture, ModelShape, Vision

if TYPE_CHECKING:
    from torch import nn

_INNER: dict[str, type] = {"mixture": Mixture, "latent": Latent, "vision": Vision}


def known_model(name: str) -> Entry:
    """Return the entry of the built-in table.

    Raises:
        LedgerError: no such model; the message names the nearest ones.
    """
    return look_up("model", name, catalogue())


def read_shape(source: str | os.PathLike[str] | Mapping[str, Any] | nn.Module, **changes: Any) -> ModelShape:
    """Return the shape that `source` names: a model of the table, a config.json or hjson file or its folder, plain data, or a
    module (on the meta device, say).

    Args:
        changes: fields of the shape to set differently.

    Raises:
        LedgerError: an unknown name, a file that cannot be read, or sizes that do not fit each other.
    """
    if not isinstance(source, (str, os.PathLike, Mapping)):  # a module, which only a process with torch can hand over
        from .module import read_module

        return read_module(source, **changes).shape
    if isinstance(source, Mapping):
        shape = _from_data(source, None)
    else:
        text = os.fspath(source)
        path = Path(text)
        shape = _from_file(path) if path.exists() or path.suffix in (".json", ".hjson") else known_model(text).shape
    if not changes:
        return shape
    _refuse_unknown(changes)
    return ModelShape(**{**{item.name: getattr(shape, item.name) for item in fields(shape)}, **changes})


def _from_file(path: Path) -> ModelShape:
    if path.is_dir():
        path = path / "config.json"
    if not path.exists():
        raise LedgerError(f"no file {path}; give a model's config.json, an hjson file, or a name of `stateroom ledger models`")
    text = path.read_text()
    try:
        data = json.loads(text)
    except json.JSONDecodeError:
        data = _hjson(text, path)
    if not isinstance(data, Mapping):
        raise LedgerError(f"{path} holds {type(data).__name__}, not an object with sizes")
    return _from_data(data, path.parent.name if path.name == "config.json" else path.stem)


def _hjson(text: str, path: Path) -> Any:
    import hjson

    try:
        return hjson.loads(text)
    except hjson.HjsonDecodeError as error:
        raise LedgerError(f"{path} is neither JSON nor hjson: {error}") from None


def _from_data(data: Mapping[str, Any], name: str | None) -> ModelShape:
    if "model_type" in data or "hidden" not in data:
        return shape_from_config(data, name)
    _refuse_unknown(data)
    given = dict(data)
    for key, kind in _INNER.items():
        if isinstance(given.get(key), Mapping):
            try:
                given[key] = kind(**given[key])
            except TypeError as error:
                raise LedgerError(f"{key} cannot be read: {error}; it has the keys {', '.join(f.name for f in fields(kind))}") from None
    given.setdefault("name", name or "model")
    try:
        return ModelShape(**given)
    except TypeError as error:
        raise LedgerError(f"the model's sizes cannot be read: {error}") from None


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    known = [item.name for item in fields(ModelShape)]
    for key in given:
        if key not in known:
            near = nearest(key, known)
            raise LedgerError(f"unknown size {key!r}; nearest: {', '.join(near) or 'none'}; known: {', '.join(known)}")
