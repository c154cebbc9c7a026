"""FLOPs of one pipeline stage: those of its layers, and of the embedding or the head where they lie there."""

from __future__ import annotations

from ..job import Job
from ..memory.rank import rank_units
from ..shapes.parts import blocks
from .layers import step_flops


def stage_flops(job: Job, stage: int) -> float:
    """Return the FLOPs that a rank's copy of the model executes on a stage in a step, recomputed ones included; tp 1 and cp 1."""
    layout = job.layout
    found = step_flops(job.shape, job.seq, layout.micro_batch * layout.accumulation, attention=job.attention, recompute=layout.recompute)
    repeats = {block.name: block.repeat for block in blocks(job.shape) if block.role == "layer"}
    here = {unit.name: unit.count for unit in rank_units(job, stage)}
    first = {part.name for block in blocks(job.shape) if block.role == "embedding" for part in block.parts}
    total = 0.0
    for term in (*found.model.terms, *found.recompute.terms):
        kind = term.name.partition(": ")[0]
        if kind in repeats:
            total += term.value * here.get(kind, 0) / repeats[kind]
        elif stage == (0 if term.name in first else layout.last_stage):
            total += term.value
    return total
