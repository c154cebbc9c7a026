"""Pipelines: kind `pipeline`."""

from __future__ import annotations

from stateroom.ledger.pipeline import activation_factor, bubble_share, bubble_time, microbatches
from stateroom.ledger.pipeline.formulas import in_flight, schedule_named

from .case import Case, Unanswered, in_seconds, is_seconds, is_share


def answer(case: Case) -> float:
    i = case.inputs
    if case.has("bubble_s", "step_s"):
        return i["bubble_s"] / i["step_s"] * (100 if is_share(case.unit) else 1)
    batch = case.first("gbs", "global_batch", "batch")
    if batch is not None and case.has("micro_batch") and not case.has("pp"):
        return microbatches(int(batch), int(i["micro_batch"]), int(case.first("dp", default=1)))
    stages = case.first("pp", "stages", "p")
    if stages is None:
        raise Unanswered("pipeline without stages")
    schedule = str(i.get("schedule") or "1f1b")
    interleave = int(case.first("vp", "v", "interleave", "chunks", default=1))
    times = _times(case)
    if times is not None:
        forward, backward, weight, both = times
        found = bubble_time(schedule, stages, forward, backward, weight, overlapped=both, interleave=interleave)
        return found / (in_seconds(case.unit) if is_seconds(case.unit) else 1.0)
    unit = case.unit.lower()
    if "parameter" in unit or "weights" in unit:
        return schedule_named(schedule).weights
    count = case.first("microbatches", "m", "num_microbatches")
    if count is None and batch is not None:
        count = microbatches(int(batch), int(i["micro_batch"]), int(case.first("dp", default=1)))
    if "memory" in unit or "activation" in unit or case.has("relative_to"):
        return activation_factor(schedule, stages, interleave)
    if "in flight" in unit or "micro-batches" in unit or "microbatches" in unit:
        return in_flight(schedule, stages, int(count) if count else 10**9, interleave)
    if count is None:
        raise Unanswered("pipeline without micro-batches")
    return _share(case, schedule, stages, float(count), interleave)


def _share(case: Case, schedule: str, stages: int, count: float, interleave: int) -> float:
    definition = str(case.get("definition") or "").lower()
    over = "total" if "total" in definition or "total" in case.unit or case.formula_has("m+p-1") else "ideal"
    found = bubble_share(stages, count, interleave=interleave, schedule=schedule, over=over)
    if "efficiency" in definition or "efficiency" in case.unit or "utili" in case.unit:
        found = 1 - bubble_share(stages, count, interleave=interleave, schedule=schedule, over="total")
    return found * (100 if is_share(case.unit) else 1)


def _times(case: Case) -> tuple[float, float, float, float | None] | None:
    """Return F, B for inputs, W and F&B. Zero-bubble papers give B and W apart; DualPipe's table gives B as the full backward."""
    i = case.inputs
    if case.has("t_f", "t_b", "t_w"):
        return i["t_f"], i["t_b"], i["t_w"], i.get("t_fb")
    if case.has("F", "B"):
        weight = i.get("W", 0.0)
        return i["F"], i["B"] - weight, weight, i.get("FB")
    return None
