"""What Slurm says about an allocation, read from its environment variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .problem import LaunchError

_MOST_HOSTS = 100_000


@dataclass(frozen=True)
class Allocation:
    """The hosts of an allocation or step, in Slurm's order; ranks is per host (0: not said), node_id None outside of a step."""

    job_id: int
    hosts: tuple[str, ...]
    ranks: tuple[int, ...]
    node_id: int | None

    @property
    def port(self) -> int:
        """Return a port for the rendezvous that two jobs on one host do not share, below the range of passing connections."""
        return 20000 + self.job_id % 12000


def allocation(env: Mapping[str, str]) -> Allocation | None:
    """Return the allocation that this process is in, or None.

    Raises:
        LaunchError: a variable of Slurm cannot be read; it is named.
    """
    if not env.get("SLURM_JOB_ID", "").isdecimal():
        return None
    in_step = env.get("SLURM_STEP_ID", "").isdecimal() and env.get("SLURM_NODEID", "").isdecimal()
    name = next((n for n in (("SLURM_STEP_NODELIST",) if in_step else ()) + ("SLURM_JOB_NODELIST", "SLURM_NODELIST") if env.get(n)), None)
    if name is None:
        raise LaunchError(
            "SLURM_JOB_ID is set but SLURM_JOB_NODELIST is not; run inside an allocation (salloc, sbatch), or unset SLURM_JOB_ID"
        )
    hosts = expand(env[name], name)
    return Allocation(int(env["SLURM_JOB_ID"]), hosts, _ranks(env, len(hosts)), int(env["SLURM_NODEID"]) if in_step else None)


def expand(text: str, name: str = "the list of hosts") -> tuple[str, ...]:
    """Return the hosts of a list such as `gpu[01-03,7],login`, in its order.

    Raises:
        LaunchError: the list is malformed; `name` says where it stood.
    """
    found: list[str] = []
    for part in _split(text, name):
        names = [""]
        for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", part):
            endings = [literal] if literal else _numbers(ranges, text, name)
            names = [head + ending for head in names for ending in endings]
            if len(names) > _MOST_HOSTS:
                raise LaunchError(f"{name}={text!r} names more than {_MOST_HOSTS} hosts")
        found.extend(names)
    return tuple(found)


def _split(text: str, name: str) -> list[str]:
    """Cut at the commas that stand outside of brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += {"[": 1, "]": -1}.get(char, 0)
        if depth not in (0, 1):
            raise LaunchError(f"{name}={text!r}: brackets do not match")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    if depth or not all(parts):
        raise LaunchError(f"{name}={text!r} is no list of hosts; it reads like gpu[01-03,7],login")
    return parts


def _numbers(ranges: str, text: str, name: str) -> list[str]:
    found: list[str] = []
    for piece in ranges.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", piece)
        if not match or int(match[2] or match[1]) < int(match[1]) or int(match[2] or match[1]) - int(match[1]) > _MOST_HOSTS:
            raise LaunchError(f"{name}={text!r}: {piece!r} is neither a number nor a range")
        width = len(match[1])
        found.extend(f"{number:0{width}d}" for number in range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


def _ranks(env: Mapping[str, str], num_hosts: int) -> tuple[int, ...]:
    """Return ranks per host: accelerators where some were granted, else tasks."""
    for name in ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"):
        count = env.get(name, "").rpartition(":")[2]  # "a100:4" or "4"
        if count.isdecimal() and int(count):
            return (int(count),) * num_hosts
    text = env.get("SLURM_TASKS_PER_NODE") or env.get("SLURM_NTASKS_PER_NODE") or ""
    ranks: list[int] = []
    for piece in text.split(",") if text else []:
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", piece)
        if not match:
            raise LaunchError(f"SLURM_TASKS_PER_NODE={text!r}: {piece!r} does not read like 4 or 4(x2)")
        ranks.extend([int(match[1])] * int(match[2] or 1))
    if len(ranks) == 1:
        ranks *= num_hosts
    return tuple(ranks) if len(ranks) == num_hosts else (0,) * num_hosts
