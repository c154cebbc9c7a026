"""Instruction lists of torch's own V-shaped schedules, which exist in torch as methods of private names (seen on torch 2.13).

torch makes a list only inside a schedule object over live stages and process groups. The method that makes it reads four
numbers of that object and nothing else, so it is given an object that has these four.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules

from ..errors import ConfigError
from ..ledger.pipeline import Instruction

_CLASSES = {"zbv": "ScheduleZBVZeroBubble", "dualpipev": "ScheduleDualPipeV"}
_KINDS = {"F": "F", "B": "B", "I": "I", "W": "W"}


def vee_rows(name: str, stages: int, micro_batches: int) -> list[list[Instruction]]:
    """Return the instructions of every stage for "zbv" or "dualpipev".

    A forward and a backward that torch would overlap are two instructions, one after the other.

    Raises:
        ConfigError: this torch has no such schedule.
    """
    kind = getattr(schedules, _CLASSES[name], None)
    make = getattr(kind, "_calculate_single_rank_operations", None)
    if make is None:
        raise ConfigError(f"the schedule {name} is torch's, and this torch does not have it (2.13 does); use 1f1b or zero-bubble")
    numbers = SimpleNamespace(pp_group_size=stages, _n_microbatches=micro_batches, _num_stages=2 * stages, num_stages=2 * stages)
    return [[made for action in make(numbers, stage) for made in _translated(action, stages)] for stage in range(stages)]


def _translated(action: Any, stages: int) -> list[Instruction]:
    if action is None:
        return []
    if action.sub_actions:
        return [made for part in action.sub_actions for made in _translated(part, stages)]
    return [Instruction(_KINDS[action.computation_type.value], action.microbatch_index, action.stage_index // stages)]
