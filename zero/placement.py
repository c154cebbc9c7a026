"""Where each state rests: a ZeRO stage is a row of this table, and the code reads it as data."""

from __future__ import annotations

from dataclasses import dataclass, replace

STATES = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class Cell:
    """One placement: whole on every rank or cut over a mesh axis, and the tier that holds the bytes."""

    sharded: bool
    tier: str = "device"
    axis: str = "dp_shard"

    def __str__(self) -> str:
        return f"sharded over {self.axis}" if self.sharded else "replicated"


@dataclass(frozen=True)
class Placement:
    """The cells of one ZeRO stage."""

    stage: int
    parameters: Cell
    gradients: Cell
    optimizer: Cell

    @property
    def reduces_every_pass(self) -> bool:
        """Whether gradients leave for their shard after each backward; else they wait whole for the boundary."""
        return self.gradients.sharded

    def on_tiers(self, parameters: str, optimizer: str) -> Placement:
        """Return the same row with the tiers of a config in its cells; sharded gradients rest with the optimizer's states."""
        return Placement(
            self.stage,
            replace(self.parameters, tier=parameters),
            replace(self.gradients, tier=optimizer if self.gradients.sharded else self.gradients.tier),
            replace(self.optimizer, tier=optimizer),
        )


def _row(stage: int, parameters: bool, gradients: bool, optimizer: bool) -> Placement:
    return Placement(stage, Cell(parameters), Cell(gradients), Cell(optimizer))


STAGES: tuple[Placement, ...] = (
    _row(0, False, False, False),
    _row(1, False, False, True),
    _row(2, False, True, True),
    _row(3, True, True, True),
)
