"""Which of this host's addresses and interfaces the other hosts see."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping


def own_address(env: Mapping[str, str]) -> str:
    """Return an address of this host for others: the one that ssh came in at, else the first that is no loopback's, else that."""
    import psutil  # the launcher itself needs none of it

    words = env.get("SSH_CONNECTION", "").split()
    candidates = [words[2]] if len(words) == 4 else []
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    for name, entries in psutil.net_if_addrs().items():
        if name in up:
            candidates += [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
    return next((address for address in candidates if _is_usable(address)), "127.0.0.1")


def is_loopback(address: str) -> bool:
    """Return whether an address or name means the host itself, to anyone."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address == "localhost"


def interface_towards(address: str) -> str | None:
    """Return the name of the interface that packets to a host leave by, or None when that is the loopback or unknown.

    No packet is sent: connecting a datagram socket only asks the routing table.
    """
    import psutil

    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            source = probe.getsockname()[0].partition("%")[0]
    except OSError:
        return None
    if is_loopback(source):
        return None
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == source for entry in entries):
            return name
    return None


def _is_usable(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return not (parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified)
