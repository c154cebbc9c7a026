"""Finds out that the main thread stands in a collective of torch.distributed that the script itself called."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch.distributed as dist

# calls that return only when every rank of the group has made them; a broadcast's source, for one, does not wait
_EVERYONE = frozenset(
    (
        "barrier",
        "monitored_barrier",
        "all_reduce",
        "all_gather",
        "all_gather_single",
        "all_gather_into_tensor",
        "all_gather_object",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
        "all_to_all",
        "all_to_all_single",
    )
)
_TORCH = str(Path(dist.__file__).parent)
_OWN = str(Path(__file__).parent.parent)


@dataclass(frozen=True)
class Elsewhere:
    """A call in which the main thread stands: its name, the script's line, the global ranks of its group, and which call it is."""

    call: str
    where: str
    ranks: tuple[int, ...]
    key: tuple[int, int]


def standing_call() -> Elsewhere | None:
    """Return the collective in which the main thread stands right now, or None when it stands in none."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    call: FrameType | None = None
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        if frame.f_code.co_name in _EVERYONE:
            call = frame
        frame = frame.f_back
    if call is None:
        return None
    while frame is not None and frame.f_code.co_filename.startswith(_OWN) and frame.f_back is not None:
        frame = frame.f_back  # stateroom.comm passes the script's calls on
    where = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "?"
    try:
        ranks = tuple(dist.get_process_group_ranks(call.f_locals.get("group") or dist.group.WORLD))
    except (ValueError, RuntimeError, TypeError):  # the group is being destroyed, or is of a kind of its own
        return None
    return Elsewhere(call.f_code.co_name, where, ranks, (id(call), call.f_lasti))
