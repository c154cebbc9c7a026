"""Where this process stands in a pipelined model, for helpers under DeepSpeed's names that are handed no engine."""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from typing import Any

import torch.distributed as dist

from .topology import PipelineParallelGrid

# Such helpers take no argument, and threads that a script starts call them too (a context variable would be empty there), so
# what they speak of hangs on the process group of the job, and only as long as the engine that said it lives.
_PLACES: MutableMapping[Any, weakref.WeakMethod[Any]] = weakref.WeakKeyDictionary()


def stand(asked: Any) -> None:
    """Let `asked`, a bound method that returns a grid, answer for this process from now on, instead of an earlier one."""
    _PLACES[dist.group.WORLD] = weakref.WeakMethod(asked)


def leave(asked: Any) -> None:
    """Let `asked` answer no more; without effect where another one does."""
    if dist.is_initialized() and _PLACES.get(dist.group.WORLD) == weakref.WeakMethod(asked):
        del _PLACES[dist.group.WORLD]


def grid_here() -> PipelineParallelGrid | None:
    """Return the grid of the newest pipelined engine of this process, or None where there is none."""
    reference = _PLACES.get(dist.group.WORLD)
    asked = None if reference is None else reference()
    return None if asked is None else asked()
