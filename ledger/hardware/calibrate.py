"""Measures the machine it runs on: the one module of the calculator, beside the reader of modules, that imports torch."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from ..problems import LedgerError
from ..units import show_bytes


def measure(device: str | None = None, seconds: float = 1.0) -> dict[str, Any]:
    """Return rates and sizes of this machine's accelerator (or of its CPU), in FLOP/s, bytes and bytes a second.

    Args:
        device: type of device; by default the accelerator that is here, else cpu.
        seconds: how long each measurement may take.

    Raises:
        LedgerError: there is no such device here.
    """
    import torch

    if device is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = "cpu" if accelerator is None else accelerator.type
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise LedgerError(f"no device {device!r} here: {error}") from None
    return {
        "device": device,
        "name": _name(device),
        "products": _products(device, seconds),
        "memory_bytes_s": _copy(device, device, seconds),
        "host_bytes_s": None if device == "cpu" else _copy("cpu", device, seconds),
        "link_bytes_s": _loopback(seconds) if device == "cpu" else None,
        **_memory(device),
    }


def text(found: dict[str, Any]) -> str:
    """Return what was measured as an hjson hardware file; measured rates are what was reached, not a data sheet's peak."""
    name = "".join(letter if letter.isalnum() else "-" for letter in found["name"].lower()).strip("-")
    peaks = ", ".join(f"{dtype}: {rate:.4g}" for dtype, rate in found["products"].items())
    lines = [
        "# Measured by `stateroom ledger calibrate`. Products are what large ones reached; put the data sheet's dense peak here for MFU.",
        "{",
        f"  name: {name}",
        f"  peak: {{{peaks}}}",
        f"  usable_bytes: {found['usable_bytes']:.0f}  # {show_bytes(found['usable_bytes'], binary=True)}",
        f"  hbm_bytes_s: {found['memory_bytes_s']:.4g}",
    ]
    for key in ("host_bytes_s", "link_bytes_s"):
        if found[key] is not None:
            lines.append(f"  {key}: {found[key]:.4g}")
    lines += ["  # rates were reached, so products and memory are taken to reach them", "  family: calibrated"]
    lines.append("}")
    lines.append(f"# memory that is no tensor: {show_bytes(found['overhead_bytes'], binary=True)}; give it as --overhead")
    return "\n".join(lines)


def _name(device: str) -> str:
    import platform

    import torch

    return torch.cuda.get_device_name() if device == "cuda" else f"{device} {platform.machine()}"


def _wait(device: str) -> None:
    import torch

    if device != "cpu":
        torch.accelerator.synchronize()


def _rate(device: str, work: Callable[[], object], amount: float, seconds: float) -> float:
    """Return amount a second of the fastest of several runs; the first one warms up."""
    work()
    _wait(device)
    best, until = 0.0, time.perf_counter() + seconds
    while best == 0.0 or time.perf_counter() < until:
        began = time.perf_counter()
        work()
        _wait(device)
        best = max(best, amount / (time.perf_counter() - began))
    return best


def _products(device: str, seconds: float) -> dict[str, float]:
    import torch

    side = 8192 if device != "cpu" else 1024
    found = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        found[name] = _rate(device, lambda left=left, right=right: left @ right, 2.0 * side**3, seconds)  # type: ignore[misc]
    return found


def _copy(source: str, target: str, seconds: float) -> float:
    """Return bytes a second: read and written on one device, moved between two."""
    import torch

    count = 2**28 if target != "cpu" else 2**24
    block = torch.empty(count, dtype=torch.float32, device=source)
    if source == "cpu" and target != "cpu":
        block = block.pin_memory()
    other = torch.empty(count, dtype=torch.float32, device=target)
    both = 2 if source == target else 1
    return _rate(target, lambda: other.copy_(block, non_blocking=True), both * 4.0 * count, seconds)


def _loopback(seconds: float) -> float:
    """Return bytes a second that one thread sends to another through the loopback address, which is how ranks on a CPU talk."""
    block = bytearray(2**22)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:

            def once() -> None:
                thread = threading.Thread(target=sender.sendall, args=(block,))
                thread.start()
                left, room = len(block), bytearray(len(block))
                while left:
                    left -= receiver.recv_into(room, left)
                thread.join()

            return _rate("cpu", once, float(len(block)), seconds)


def _memory(device: str) -> dict[str, float]:
    """Return what a process can allocate, and what is taken although no tensor holds it."""
    import psutil
    import torch

    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        torch.cuda.empty_cache()
        return {"usable_bytes": float(total), "overhead_bytes": float(total - free - torch.cuda.memory_reserved())}
    return {"usable_bytes": float(psutil.virtual_memory().total), "overhead_bytes": float(psutil.Process().memory_info().rss)}
