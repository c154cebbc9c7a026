"""What a host has, and what it lacks, before anything starts."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from ..version import __version__

MOST_CLOCK_OFFSET_S = 5.0


def facts(cwd: str | None, check: tuple[str, str] | None, listener: Listener) -> dict[str, Any]:
    """Return what this host has; `check` is ("file" | "module" | "program", name), looked for from the folder `cwd`."""
    return {
        "python": platform.python_version(),
        "torch": _torch_version(),
        "stateroom": __version__,
        "lacks": [*_lacking(cwd, check), *([listener.problem] if listener.problem else [])],
        "port": listener.port,
        "time_ns": time.time_ns(),
        "pid": os.getpid(),
    }


class Listener:
    """A port that is kept for the rendezvous from the check on, so that nobody else takes it in between."""

    def __init__(self, port: int = 0, only_here: bool = False) -> None:
        self.problem = ""
        self._socket: socket.socket | None = None
        try:
            if only_here:
                self._socket = socket.create_server(("127.0.0.1", port))
            elif socket.has_dualstack_ipv6():
                self._socket = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
            else:
                self._socket = socket.create_server(("", port))
        except OSError as error:
            self.problem = f"port {port} is not free ({error.strerror}); choose another --master_port, or none"

    @property
    def port(self) -> int:
        """Return the port, 0 when there is none."""
        return int(self._socket.getsockname()[1]) if self._socket else 0

    def take(self) -> int:
        """Return the descriptor, which the caller owns from now on.

        Raises:
            OSError: there is no port.
        """
        if self._socket is None:
            raise OSError(self.problem or "the port was given away already")
        held, self._socket = self._socket, None
        return held.detach()

    def close(self) -> None:
        """Give the port up."""
        if self._socket:
            self._socket.close()
            self._socket = None


def _torch_version() -> str | None:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def _lacking(cwd: str | None, check: tuple[str, str] | None) -> list[str]:
    if cwd is not None and not Path(cwd).is_dir():
        return [f"there is no folder {cwd}"]
    if check is None:
        return []
    kind, name = check
    if kind == "file" and not Path(cwd or ".", name).is_file():
        return [f"there is no file {Path(cwd or '.', name)}"]
    if kind == "program" and shutil.which(name) is None and not os.access(Path(cwd or ".", name), os.X_OK):
        return [f"there is no program {name}"]
    # The agent was not started in that folder, as the ranks will be; editable installs have finders of their own.
    package = name.partition(".")[0]
    if kind == "module" and PathFinder.find_spec(package, [cwd or ".", *sys.path]) is None and importlib.util.find_spec(package) is None:
        return [f"there is no module {package}"]
    return []


def problems(hosts: Sequence[tuple[str, Mapping[str, Any] | None]], clock_offsets_s: Mapping[str, float]) -> dict[str, list[str]]:
    """Return per host what keeps it from taking part; hosts without facts (not answered) are left to the caller.

    The first host that has everything is what the others are compared with.
    """
    found: dict[str, list[str]] = {}
    answered = [(name, has) for name, has in hosts if has is not None]
    for name, has in answered:
        found[name] = list(has["lacks"])
        if has["torch"] is None:
            found[name].append("torch is not installed for its Python")
    whole = [(name, has) for name, has in answered if not found[name]]
    reference_name, reference = whole[0] if whole else (None, None)
    for name, has in answered:
        if reference is not None and name != reference_name:
            found[name] += _differences(has, reference, str(reference_name))
        offset = clock_offsets_s.get(name, 0.0)
        if abs(offset) > MOST_CLOCK_OFFSET_S:
            way = "ahead of" if offset > 0 else "behind"
            found[name].append(f"its clock is {abs(offset):.1f} s {way} this one's; set the clocks (NTP)")
    return {name: lines for name, lines in found.items() if lines}


def _differences(has: Mapping[str, Any], reference: Mapping[str, Any], reference_name: str) -> list[str]:
    lines = []
    for package in ("python", "torch", "stateroom"):
        # The third number of Python's version changes nothing that ranks exchange.
        own, other = ((v or "").rsplit(".", 1)[0] if package == "python" else v for v in (has[package], reference[package]))
        if own != other and has[package] is not None:
            lines.append(f"{package} {has[package]}, but {reference_name} has {reference[package]}; install the same on both")
    return lines
