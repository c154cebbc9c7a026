"""What a dry run has found: the figures of one rank, and of one rank of each pipeline stage, beside the calculator's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..records import TrafficRow
from .beside import Beside
from .classes import RankClass
from .memory import DEVICE, DRIVE, HOST, Instant

INSTANTS = ("between steps", "end of forward", "backward", "optimizer")


@dataclass(frozen=True)
class StageFigures:
    """What one rank of a pipeline stage takes in a step.

    Attributes:
        instants: bytes by state, in the order of INSTANTS. on_drive: bytes of states on a drive.
        classes: the ranks of the stage by what they hold at rest. traffic: the engine's collectives and messages.
        own: the script's own collectives, (name, ranks, calls, payload bytes).
        beside: the calculator's figures.
    """

    stage: int
    rank: int
    instants: tuple[Instant, ...]
    on_drive: Mapping[str, int]
    classes: tuple[RankClass, ...]
    traffic: tuple[TrafficRow, ...]
    own: tuple[tuple[str, int, int, int], ...]
    flops: int
    beside: Beside

    @property
    def peak(self) -> Instant:
        """The instant that is fullest on the device."""
        return max(self.instants, key=lambda instant: instant.total)

    @property
    def host_peak(self) -> int:
        """The most bytes in host memory at any of the instants."""
        return max(instant.host_total for instant in self.instants)

    def rest(self) -> dict[tuple[str, str], int]:
        """Return (tier, state) -> bytes that are there between steps."""
        at = self.instants[0]
        rows = {(DEVICE, state): size for state, size in at.states.items()}
        rows |= {(HOST, state): size for state, size in at.host.items()}
        rows |= {(DRIVE, state): size for state, size in self.on_drive.items()}
        return {key: size for key, size in rows.items() if size}


@dataclass(frozen=True)
class DryRun:
    """The figures of one step, bytes without prefixes: of one rank in full, and of one rank of each pipeline stage.

    Attributes:
        seconds, host_bytes: what the dry run itself took.
    """

    script: str
    rank: int
    world: int
    zero: int
    steps: int
    own: StageFigures
    stages: tuple[StageFigures, ...]
    seconds: float
    host_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> Instant:
        """The fullest instant of the rank that was asked for."""
        return self.own.peak

    @property
    def most_bytes(self) -> int:
        """The peak of the fullest stage."""
        return max(each.peak.total for each in self.stages)

    @property
    def beside(self) -> Beside:
        """The calculator's figures for the rank."""
        return self.own.beside

    @property
    def classes(self) -> tuple[RankClass, ...]:
        """All ranks by what they hold at rest, stage by stage."""
        return tuple(each for stage in self.stages for each in stage.classes)

    @property
    def usable_bytes(self) -> float | None:
        """What a device of the cluster can hold; None when no cluster was named."""
        job = self.beside.job
        limit = None if job is None else job.cluster.accelerator.usable_bytes
        return None if limit is None or limit == float("inf") else limit

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        from .tables import stage_dict

        calculator = self.beside
        return {
            "script": self.script, "rank": self.rank, "world": self.world, "stage": self.zero, "steps": self.steps,
            **stage_dict(self.own, self.usable_bytes),
            "stages": [{"stage": each.stage, "rank": each.rank, **stage_dict(each, self.usable_bytes)} for each in self.stages],
            "rank_classes": [
                {"ranks": each.spans, "count": each.count, "stage": each.stage,
                 "states": [{"tier": tier, "state": state, "bytes": size} for (tier, state), size in each.states.items()]}
                for each in self.classes
            ],
            "calculator": calculator.why or None if calculator.job is None else calculator.job.layout.to_dict(),
            "took": {"seconds": self.seconds, "host_bytes": self.host_bytes},
            "notes": list(self.notes),
        }  # fmt: skip

    def to_json(self) -> str:
        """Return to_dict() as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def lines(self) -> list[str]:
        """Return the report as text."""
        from .tables import report_lines

        return report_lines(self)
