"""Which cores a rank may use, and how many threads that makes."""

from __future__ import annotations

import os
from collections.abc import Sequence

from .problem import LaunchError


def parse_cores(text: str) -> tuple[int, ...]:
    """Return the cores of a list such as "0,2-4", in order.

    Raises:
        LaunchError: the text is no such list.
    """
    cores: set[int] = set()
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()) or int(low) > int(high or low):
            raise LaunchError(f"--bind_core_list {text!r}: {part!r} is neither a core nor a range; write 0,2-4")
        if int(high or low) > 65535:
            raise LaunchError(f"--bind_core_list {text!r}: {part!r}: there are no such cores")
        cores.update(range(int(low), int(high or low) + 1))
    return tuple(sorted(cores))


def available_cores() -> tuple[int, ...]:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def share(cores: Sequence[int], local_rank: int, num_ranks: int) -> tuple[int, ...]:
    """Return one rank's part of the cores: neighbours, equally many for each; cores left over stay unused.

    Raises:
        LaunchError: there are fewer cores than ranks.
    """
    each = len(cores) // num_ranks
    if each == 0:
        raise LaunchError(f"{num_ranks} ranks cannot be bound to {len(cores)} cores; start fewer, or name more in --bind_core_list")
    return tuple(cores[local_rank * each : (local_rank + 1) * each])
