"""A schedule by name: which instructions each stage runs, in which order, and where each part of the model lives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import ConfigError
from ..ledger.pipeline import Instruction, Simulation, held, home_of, instructions, simulate, virtual_stage
from ..ledger.problems import LedgerError


class Kind(NamedTuple):
    """What a schedule needs: chunks on each stage (0: as many as asked for, at least 2), their shape, and whether backward is split."""

    chunks: int
    vee: bool = False
    split: bool = False


KINDS = {
    "gpipe": Kind(1),
    "1f1b": Kind(1),
    "interleaved-1f1b": Kind(0),
    "zero-bubble": Kind(1, split=True),
    "zbv": Kind(2, vee=True, split=True),
    "dualpipev": Kind(2, vee=True, split=True),
    "inference": Kind(1),
}


@dataclass(frozen=True)
class Schedule:
    """The instructions of every stage.

    Attributes:
        rows: of each stage, what it runs, in order.
        vee: chunks go down the stages and up again.
    """

    name: str
    chunks: int
    micro_batches: int
    vee: bool
    rows: tuple[tuple[Instruction, ...], ...]

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.rows)

    @property
    def parts(self) -> int:
        """Number of pieces that the model is cut into: stages times chunks."""
        return self.stages * self.chunks

    def part(self, stage: int, chunk: int) -> int:
        """Return which part of the model a stage's chunk is."""
        return virtual_stage(stage, chunk, self.stages, vee=self.vee)

    def home(self, part: int) -> int:
        """Return the stage that holds a part."""
        return home_of(part, self.stages, vee=self.vee)[0]

    def chunk(self, part: int) -> int:
        """Return which of its stage's chunks a part is."""
        return part // self.stages

    def activations(self) -> tuple[int, ...]:
        """Return of each stage the most micro-batches whose activations (of one chunk) it holds at once; none without a backward."""
        return tuple(held(row) if any(each.kind != "F" for each in row) else 0 for row in self.rows)

    def run(
        self,
        forward: float = 1.0,
        backward: float = 1.0,
        weight: float = 1.0,
        transfer: float = 0.0,
        *,
        cost_of: Callable[[int, Instruction], float] | None = None,
    ) -> Simulation:
        """Simulate it; the costs are of one chunk, or `cost_of` (stage, instruction) gives what was measured."""
        return simulate(self.rows, forward, backward, weight, transfer, vee=self.vee, cost_of=cost_of)


def chunks_of(name: str, asked: int = 1) -> int:
    """Return how many chunks of layers each stage holds under a schedule.

    Raises:
        ConfigError: no such schedule, or it does not take the number that was asked for.
    """
    kind = _kind(name)
    if kind.chunks == 0:
        return max(asked, 2)
    if asked not in (1, kind.chunks):
        raise ConfigError(
            f"pipeline.chunks {asked}: the schedule {name} has {kind.chunks} chunk(s) a stage; only interleaved-1f1b takes a number"
        )
    return kind.chunks


def schedule(name: str, stages: int, micro_batches: int, chunks: int = 1, *, forward_only: bool = False) -> Schedule:
    """Return the instruction lists of a schedule.

    Args:
        chunks: chunks of layers on each stage, for interleaved-1f1b.
        forward_only: no backward, on the parts as this schedule places them: for evaluation.

    Raises:
        ConfigError: no such schedule, or micro-batches that it cannot share out.
    """
    if stages < 1 or micro_batches < 1:
        raise ConfigError(f"a schedule needs at least one stage and one micro-batch, got {stages} and {micro_batches}")
    vee, number = _kind(name).vee, chunks_of(name, chunks)
    rows: Sequence[Sequence[Instruction]]
    if forward_only or name == "inference":
        rows = _forward_only(stages, micro_batches, number, vee)
    else:
        try:
            rows = _with_backward(name, stages, micro_batches, number)
        except LedgerError as error:
            raise ConfigError(f"the schedule {name}: {error}") from None
    return Schedule(name, number, micro_batches, vee, tuple(tuple(_whole_on_first(row, stage)) for stage, row in enumerate(rows)))


def _kind(name: str) -> Kind:
    if name not in KINDS:
        raise ConfigError(f"there is no schedule {name!r}; known: {', '.join(KINDS)}")
    return KINDS[name]


def _with_backward(name: str, stages: int, micro_batches: int, chunks: int) -> Sequence[Sequence[Instruction]]:
    if name in ("zbv", "dualpipev"):
        if name == "dualpipev" and micro_batches < 2 * stages:
            raise ConfigError(f"dualpipev needs at least 2 micro-batches a stage: {2 * stages} for {stages} stages, got {micro_batches}")
        from .torch_schedules import vee_rows

        return vee_rows(name, stages, micro_batches)
    plain = {"gpipe": "gpipe", "zero-bubble": "zb-h1"}.get(name, "1f1b")
    return instructions(plain, stages, micro_batches, chunks)


def _whole_on_first(row: Sequence[Instruction], stage: int) -> Iterator[Instruction]:
    """Let the first part of the model run its backward whole: it has no input gradient that anybody waits for."""
    for each in row:
        if stage == 0 and each.chunk == 0 and each.kind in ("I", "W"):
            if each.kind == "I":
                yield Instruction("B", each.microbatch)
        else:
            yield each


def _forward_only(stages: int, micro_batches: int, chunks: int, vee: bool) -> list[list[Instruction]]:
    """Let every stage run, one after another, what is ready and nearest to the end of the model."""
    rows: list[list[Instruction]] = [[] for _ in range(stages)]
    parts = stages * chunks
    ready = {(0, m) for m in range(micro_batches)}
    while ready:
        following = set()
        for stage in range(stages):
            mine = [(part, m) for part, m in ready if home_of(part, stages, vee=vee)[0] == stage]
            if not mine:
                continue
            part, m = min(mine, key=lambda each: (-each[0], each[1]))
            rows[stage].append(Instruction("F", m, part // stages))
            ready.discard((part, m))
            if part + 1 < parts:
                following.add((part + 1, m))
        ready |= following
    return rows
