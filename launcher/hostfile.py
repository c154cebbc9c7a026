"""Which hosts and slots a job gets: the hostfile, --include and --exclude, --num_nodes and --num_gpus."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .problem import LaunchError

DEFAULT_PATH = Path("/job/hostfile")
MAX_SLOTS = 4096
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\Z", re.ASCII)
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\\-]*\Z", re.ASCII)
_COUNT = re.compile(r"[0-9]{1,9}\Z", re.ASCII)
_EXAMPLE = "a line reads like: worker-1 slots=4"


@dataclass(frozen=True)
class Host:
    """One host: its name or address as others reach it, who logs in there, and the numbers of its slots (one rank each)."""

    name: str
    slots: tuple[int, ...]
    user: str | None = None

    @property
    def login(self) -> str:
        """Return what ssh is told to connect to."""
        return f"{self.user}@{self.name}" if self.user else self.name


def read_hostfile(path: Path) -> list[Host]:
    """Return the hosts of a file in its order.

    Raises:
        LaunchError: the file cannot be read, or a line says anything but one host and its slots; file, line and token are named.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise LaunchError(f"{path}: byte {error.start} is not UTF-8 text; {_EXAMPLE}") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise LaunchError(f"cannot read the hostfile {str(path)!r}: {reason}; leave --hostfile out to run on this host") from None
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, source: str) -> list[Host]:
    """Return the hosts that a hostfile's text lists; `source` names it in messages.

    Raises:
        LaunchError: as for read_hostfile.
    """
    hosts: list[Host] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        where = f"{source}:{number}"
        host = _parse_line(words, where)
        if host.name in line_of:
            raise LaunchError(f"{where}: host {host.name!r} is already on line {line_of[host.name]}; list it once with all its slots")
        line_of[host.name] = number
        hosts.append(host)
    if not hosts:
        raise LaunchError(f"{source}: no host in it; {_EXAMPLE}")
    return hosts


def _parse_line(words: list[str], where: str) -> Host:
    user, name = _parse_host(words[0], where)
    if len(words) == 1:
        raise LaunchError(f"{where}: {words[0]!r} has no slots; write {words[0]} slots=N")
    key, equals, count = words[1].partition("=")
    if key != "slots" or not equals:
        raise LaunchError(f"{where}: {words[1]!r} where slots=N was expected; {_EXAMPLE}")
    if not _COUNT.match(count) or not 1 <= int(count) <= MAX_SLOTS:
        raise LaunchError(f"{where}: {words[1]!r}: slots is a whole number from 1 to {MAX_SLOTS}")
    if len(words) > 2:
        raise LaunchError(f"{where}: {words[2]!r} after the slots is not understood; {_EXAMPLE}")
    return Host(name, tuple(range(int(count))), user)


def _parse_host(word: str, where: str) -> tuple[str | None, str]:
    user, at, name = word.rpartition("@")
    if at and not _USER.match(user):
        raise LaunchError(f"{where}: {word!r}: {user!r} is no user name; write user@host")
    bare = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    if _is_address(bare) or (bare == name and _NAME.match(name) and not _looks_numeric(name)):
        return user or None, bare
    raise LaunchError(f"{where}: {name!r} is neither a host name (letters, digits, '-', '_', '.') nor an IP address")


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _looks_numeric(name: str) -> bool:
    """Digits and dots that are no address are a mistyped address, and never a name."""
    return set(name) <= set("0123456789.")


def select(hosts: Sequence[Host], include: str = "", exclude: str = "") -> list[Host]:
    """Return what is left of the hosts, in their order; an empty text selects nothing away.

    The syntax is `NAME[:SLOT[,SLOT...]]` joined by `@`; a name alone means all its slots.

    Raises:
        LaunchError: both texts are given, a text is malformed, a host or slot does not exist, or nothing is left.
    """
    if include and exclude:
        raise LaunchError("--include and --exclude cannot be combined; give one of them")
    if include:
        wanted = _parse_selection(include, "--include", hosts)
        return [replace(host, slots=wanted[host.name]) for host in hosts if host.name in wanted]
    if exclude:
        unwanted = _parse_selection(exclude, "--exclude", hosts)
        left = [(host, tuple(s for s in host.slots if s not in unwanted.get(host.name, ()))) for host in hosts]
        if not any(slots for _, slots in left):
            raise LaunchError(f"--exclude {exclude!r} leaves no slot on any host")
        return [replace(host, slots=slots) for host, slots in left if slots]
    return list(hosts)


def _parse_selection(text: str, option: str, hosts: Sequence[Host]) -> dict[str, tuple[int, ...]]:
    known = {host.name: host.slots for host in hosts}
    found: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        name, slots = _split_part(part.strip(), option, text, known)
        if name not in known:
            raise LaunchError(f"{option} {text!r}: no host {name!r}; there are {_listed(known)}")
        if name in found:
            raise LaunchError(f"{option} {text!r}: host {name!r} is named twice; list its slots together, as in {name}:0,1")
        found[name] = known[name] if slots is None else _parse_slots(slots, name, option, text, known[name])
    return found


def _split_part(part: str, option: str, text: str, known: dict[str, tuple[int, ...]]) -> tuple[str, str | None]:
    if not part:
        raise LaunchError(f"{option} {text!r}: a host name is missing at an '@'; write host1:0,2@host2")
    if part in known:  # an IPv6 address has colons of its own
        return part, None
    if part.startswith("["):
        name, bracket, rest = part[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise LaunchError(f"{option} {text!r}: {part!r} is not understood; write [address]:0,2")
        return name, rest[1:] if rest else None
    name, colon, slots = part.partition(":")
    return name, slots if colon else None


def _parse_slots(slots: str, name: str, option: str, text: str, known: tuple[int, ...]) -> tuple[int, ...]:
    chosen: list[int] = []
    for word in slots.split(","):
        if not _COUNT.match(word.strip()):
            raise LaunchError(f"{option} {text!r}: {word!r} is no slot number of {name}; write {name}:0,2")
        slot = int(word)
        if slot not in known:
            raise LaunchError(f"{option} {text!r}: {name} has no slot {slot}; its slots are {_listed(known)}")
        if slot in chosen:
            raise LaunchError(f"{option} {text!r}: slot {slot} of {name} is named twice")
        chosen.append(slot)
    return tuple(sorted(chosen))


def first(hosts: Sequence[Host], num_nodes: int | None, num_slots: int | None) -> list[Host]:
    """Return the first `num_nodes` hosts with their first `num_slots` slots each; None keeps all.

    Raises:
        LaunchError: there are fewer hosts or slots than asked for.
    """
    if num_nodes is not None and num_nodes > len(hosts):
        raise LaunchError(f"--num_nodes {num_nodes}: there are only {len(hosts)}: {_listed(host.name for host in hosts)}")
    chosen = list(hosts[:num_nodes])
    if num_slots is None:
        return chosen
    for host in chosen:
        if len(host.slots) < num_slots:
            raise LaunchError(f"--num_gpus {num_slots}: {host.name} has only {len(host.slots)} slots")
    return [replace(host, slots=host.slots[:num_slots]) for host in chosen]


def _listed(items: Iterable[object], most: int = 8) -> str:
    words = [str(item) for item in items]
    return ", ".join(words[:most]) + (f", … ({len(words)} in all)" if len(words) > most else "")
