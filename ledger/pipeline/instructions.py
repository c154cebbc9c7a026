"""The instructions of a schedule, stage by stage: what runs, for which micro-batch and chunk, in which order."""

from __future__ import annotations

from dataclasses import dataclass

from ..problems import LedgerError
from .formulas import schedule_named


@dataclass(frozen=True)
class Instruction:
    """One piece of work: F forward, B backward, or its two halves: I backward for inputs, W backward for weights."""

    kind: str
    microbatch: int
    chunk: int = 0


def virtual_stage(stage: int, chunk: int, stages: int, *, vee: bool) -> int:
    """Return which part of the model, counted from its input, a stage's chunk is.

    Chunks go round the stages (the last stage's is followed by the first stage's next one), or, for a `vee`, down the
    stages and up again, so that the first stage holds the first part and the last.
    """
    return chunk * stages + (stages - 1 - stage if vee and chunk % 2 else stage)


def home_of(virtual: int, stages: int, *, vee: bool) -> tuple[int, int]:
    """Return (stage, chunk) of a part of the model: the inverse of `virtual_stage`."""
    chunk, at = divmod(virtual, stages)
    return (stages - 1 - at if vee and chunk % 2 else at), chunk


def instructions(schedule: str, stages: int, microbatches: int, interleave: int = 1) -> list[list[Instruction]]:
    """Return the list of every stage for gpipe, 1f1b, interleaved 1f1b (interleave > 1) and zb-h1.

    Raises:
        LedgerError: a schedule without instructions here, or micro-batches that interleaving cannot share out.
    """
    name = schedule_named(schedule).name
    if interleave > 1:
        if name != "1f1b":
            raise LedgerError(f"only 1f1b is interleaved here, not {name}")
        if microbatches > stages and microbatches % stages:
            near = sorted({microbatches // stages * stages, (microbatches // stages + 1) * stages} - {0})
            raise LedgerError(f"{microbatches} micro-batches do not divide by {stages} stages; nearest: {' or '.join(map(str, near))}")
        return [_interleaved(stage, stages, microbatches, interleave) for stage in range(stages)]
    if name == "gpipe":
        return [_gpipe(microbatches) for _ in range(stages)]
    if name == "1f1b":
        return [_one_f_one_b(stage, stages, microbatches) for stage in range(stages)]
    if name == "zb-h1":
        return [_zero_bubble(stage, stages, microbatches) for stage in range(stages)]
    raise LedgerError(f"no instructions for {name} here, only its closed form; simulated are gpipe, 1f1b and zb-h1")


def _gpipe(count: int) -> list[Instruction]:
    return [Instruction("F", m) for m in range(count)] + [Instruction("B", m) for m in range(count)]


def _one_f_one_b(stage: int, stages: int, count: int) -> list[Instruction]:
    warm = min(stages - 1 - stage, count)
    made = [Instruction("F", m) for m in range(warm)]
    for m in range(warm, count):
        made += [Instruction("F", m), Instruction("B", m - warm)]
    return made + [Instruction("B", m) for m in range(count - warm, count)]


def _zero_bubble(stage: int, stages: int, count: int) -> list[Instruction]:
    """1F1B whose weight gradients wait: each W runs once as many I as the stage's number are ahead of it, the rest at the end."""
    made: list[Instruction] = []
    written = 0
    done = 0
    for each in _one_f_one_b(stage, stages, count):
        if each.kind == "F":
            made.append(each)
            continue
        made.append(Instruction("I", each.microbatch))
        done += 1
        if done - written > stage:
            made.append(Instruction("W", written))
            written += 1
    return made + [Instruction("W", m) for m in range(written, count)]


def _interleaved(stage: int, stages: int, count: int, chunks: int) -> list[Instruction]:
    """Groups of `stages` micro-batches pass the chunks in turn; the warm-up is long enough for every chunk of the later stages."""
    total, size = count * chunks, min(stages, count)

    def forward(index: int) -> Instruction:
        group, inside = divmod(index, size * chunks)
        return Instruction("F", group * size + inside % size, inside // size)

    def backward(index: int) -> Instruction:
        group, inside = divmod(index, size * chunks)
        return Instruction("B", group * size + inside % size, chunks - 1 - inside // size)

    warm = min((stages - 1 - stage) * 2 + (chunks - 1) * size, total)
    made = [forward(index) for index in range(warm)]
    for index in range(warm, total):
        made += [forward(index), backward(index - warm)]
    return made + [backward(index) for index in range(total - warm, total)]
