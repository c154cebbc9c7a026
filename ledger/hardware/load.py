"""From words or a file to a cluster: `8xh100`, `128x8 h100`, or hjson with the user's own figures."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ..problems import LedgerError, look_up, nearest
from ..units import dtype_bytes, parse_bytes
from .catalogue import accelerators
from .device import Accelerator, Cluster

_CLUSTER = re.compile(
    r"\s*(?:(?P<nodes>[\d_,]+)\s*[x*]\s*)?(?P<count>[\d_,]+)\s*[x*]?\s+?(?P<name>[A-Za-z].*?)\s*|(?P<short>[\d_,]+)[x*](?P<device>[A-Za-z].*)"
)
_JOINED = re.compile(r"^\s*([\d_,]+[x*][\d_,]+)[x*]?(?=[A-Za-z])")  # 2x8h100, 2x8xh100
_CLUSTER_KEYS = tuple(item.name for item in fields(Cluster) if item.name not in ("accelerator", "extra"))


def known_accelerator(name: str) -> Accelerator:
    """Return an accelerator of the built-in table.

    Raises:
        LedgerError: no such device; the message names the nearest ones.
    """
    return look_up("accelerator", name, accelerators())


def read_hardware(source: str | os.PathLike[str] | Mapping[str, Any]) -> Accelerator:
    """Return the accelerator that `source` names, or that a JSON or hjson file describes.

    A file may start from a known device: {base: h100, hbm_bytes_s: 3.0e12}. Without `base` it must give name, peak,
    usable_bytes and hbm_bytes_s.

    Raises:
        LedgerError: an unknown name or key, or a missing figure.
    """
    if isinstance(source, Mapping):
        return _from_data(source)
    text = os.fspath(source)
    if Path(text).suffix in (".json", ".hjson"):
        return _from_data(_read(Path(text)))
    return known_accelerator(text)


def read_cluster(source: str | os.PathLike[str] | Mapping[str, Any], devices: int | None = None, **changes: Any) -> Cluster:
    """Return the cluster that `source` says: "128x8 h100" (nodes x per node), "1024 h100", "8xh100", a device's name with
    `devices`, or a file with `accelerator` and any of a cluster's figures.

    Raises:
        LedgerError: unknown names, or devices that do not fill nodes.
    """
    if isinstance(source, Mapping):
        return _cluster_from_data(source, devices, changes)
    text = os.fspath(source)
    if Path(text).suffix in (".json", ".hjson"):
        return _cluster_from_data(_read(Path(text)), devices, changes)
    text = _JOINED.sub(r"\1 ", text)
    match = _CLUSTER.fullmatch(text)
    if match is None:
        if devices is None:
            device = known_accelerator(text)  # names the nearest ones when the name is wrong too
            raise LedgerError(f"how many? write for example '8x{device.name}', or '128x8 {device.name}' for 128 nodes of 8")
        return _fill(known_accelerator(text), devices, None, changes)
    if match["short"]:
        return _fill(known_accelerator(match["device"]), _integer(match["short"]), None, changes)
    count = _integer(match["count"])
    if match["nodes"]:
        return _fill(known_accelerator(match["name"]), count * _integer(match["nodes"]), count, changes)
    return _fill(known_accelerator(match["name"]), count, None, changes)


def _integer(text: str) -> int:
    return int(text.replace("_", "").replace(",", ""))


def _fill(device: Accelerator, devices: int, per_node: int | None, changes: Mapping[str, Any]) -> Cluster:
    """A node is 8 devices (a rack-wide domain still has nodes of 4 or 8), or all of them when there are fewer."""
    if devices < 1:
        raise LedgerError(f"a cluster of {devices} devices; it needs at least 1")
    size = per_node or min(devices, 8)
    if devices % size:
        near = sorted({devices // size * size, (devices // size + 1) * size} - {0})
        raise LedgerError(f"{devices} devices do not fill nodes of {size}; nearest: {' or '.join(map(str, near))}")
    network = changes.get("network_bytes_s") or device.network_bytes_s
    if network is None:
        if devices > size:
            device.needed("network_bytes_s")
        network = device.link_bytes_s or device.needed("host_bytes_s")
    domain = max(size, device.link_domain) if device.link_domain > 8 else size
    given = {"nodes": devices // size, "per_node": size, "network_bytes_s": float(network), "domain": min(domain, devices)}
    return Cluster(accelerator=device, **{**given, **changes})


def _cluster_from_data(data: Mapping[str, Any], devices: int | None, changes: Mapping[str, Any]) -> Cluster:
    known = ("accelerator", "devices", *_CLUSTER_KEYS)
    if "accelerator" not in data and ("peak" in data or "base" in data):  # a file of one device, as `ledger calibrate` writes it
        if devices is None:
            raise LedgerError("the file describes one device; say how many there are, with --ranks")
        return _fill(_from_data(data), devices, None, changes)
    for key in data:
        if key not in known:
            raise LedgerError(
                f"unknown key {key!r} of a cluster; nearest: {', '.join(nearest(key, known)) or 'none'}; known: {', '.join(known)}"
            )
    if "accelerator" not in data:
        raise LedgerError("a cluster needs `accelerator`: a name of `stateroom ledger hardware`, or an object with its figures")
    device = read_hardware(data["accelerator"])
    given = {key: _number(key, value) for key, value in data.items() if key in _CLUSTER_KEYS}
    per_node = int(given.pop("per_node", 0)) or None
    nodes = int(given.pop("nodes", 0)) or None
    count = devices or int(data.get("devices") or (nodes or 1) * (per_node or 8))
    return replace(_fill(device, count, per_node, {k: v for k, v in given.items() if k == "network_bytes_s"}), **{**given, **changes})


def _number(key: str, value: Any) -> float:
    number = parse_bytes(value) if key.endswith(("_bytes", "_bytes_s")) else float(value)
    return int(number) if key in ("nodes", "per_node", "domain") else number


def _from_data(data: Mapping[str, Any]) -> Accelerator:
    known = tuple(item.name for item in fields(Accelerator))
    for key in data:
        if key not in (*known, "base"):
            raise LedgerError(
                f"unknown key {key!r} of an accelerator; nearest: {', '.join(nearest(key, known)) or 'none'}; known: {', '.join(known)}"
            )
    given = {key: value for key, value in data.items() if key != "base"}
    for key, value in given.items():
        if key.endswith(("_bytes", "_bytes_s")):
            given[key] = parse_bytes(value)
    if "peak" in given:
        for dtype in given["peak"]:
            dtype_bytes(dtype)
    if "base" in data:
        base = known_accelerator(str(data["base"]))
        peak = {**base.peak, **given.pop("peak", {})}
        return replace(base, **{"name": f"{base.name} (changed)", "aliases": (), **given, "peak": peak})
    missing = [key for key in ("name", "peak", "usable_bytes", "hbm_bytes_s") if key not in given]
    if missing:
        raise LedgerError(f"an accelerator of your own needs {', '.join(missing)}; or start from a known one with base: h100")
    return Accelerator(**{"vendor": "own", "source": "own figures", **given})


def _read(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        raise LedgerError(f"no file {path}")
    text = path.read_text()
    try:
        data = json.loads(text)
    except json.JSONDecodeError:
        import hjson

        try:
            data = hjson.loads(text)
        except hjson.HjsonDecodeError as error:
            raise LedgerError(f"{path} is neither JSON nor hjson: {error}") from None
    if not isinstance(data, Mapping):
        raise LedgerError(f"{path} holds {type(data).__name__}, not an object")
    return data
