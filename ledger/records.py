"""Plain records that the engine hands to the ledger, and the rows that come back. No tensors here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..zero.layout import Layout
from ..zero.placement import Placement

if TYPE_CHECKING:
    from .report import Ledger
    from .shapes.shape import ModelShape


@dataclass(frozen=True)
class UnitRecord:
    """What arithmetic needs to know of a unit. Item sizes are bytes per element.

    Attributes:
        master_itemsize: None when the optimizer updates the parameter's own bytes.
        is_root: gathered once per micro-batch, for forward and backward together.
    """

    name: str
    layout: Layout
    trainable: bool
    is_root: bool
    param_itemsize: int
    grad_itemsize: int
    wire_itemsize: int
    master_itemsize: int | None


@dataclass(frozen=True)
class OptimizerRecord:
    """One parameter group: its optimizer by name, options that add states, and the sizes of this rank's tensors in it."""

    name: str
    options: tuple[tuple[str, object], ...]
    run_numels: tuple[int, ...]
    itemsize: int


@dataclass(frozen=True)
class LedgerRow:
    """One state on this rank: where it rests and its bytes at rest, predicted and measured."""

    state: str
    dtype: str
    placement: str
    tier: str
    predicted_bytes: int | None
    measured_bytes: int
    note: str = ""


DATA_AXIS, PIPELINE_AXIS = "dp", "pp"


@dataclass(frozen=True)
class TrafficRow:
    """One kind of collective for one state in one step over one mesh axis: payload bytes (the full buffer), predicted and counted."""

    kind: str
    state: str
    predicted_calls: int
    counted_calls: int
    predicted_bytes: int
    counted_bytes: int
    sent_bytes: int
    axis: str = DATA_AXIS


@dataclass(frozen=True)
class Place:
    """Where a rank stands in a model that is cut into stages.

    Attributes:
        chain: global ranks of this rank's copy of the model, by stage. copies: those that hold this stage and share its states.
        layers: of each part of the model, in its order; () where nobody knows.
    """

    stage: int
    stages: int
    chain: tuple[int, ...]
    copies: tuple[int, ...]
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class RunningJob:
    """What an engine shows of itself while it runs; the functions give the figures of the moment.

    Attributes:
        place: among pipeline stages; shape: gives the sizes of the whole model.
        config: the loaded config. on_host: ranks compute on CPUs. placement: the stage's row of the table of placements.
        units: one record per unit. groups: for each unit the optimizer group of each of its parameters, None outside all.
        whole: whether the optimizer takes whole parameters, so that units are cut between them.
        optimizer: one record per parameter group, for this rank.
        tensors: the tensors of each state that hold device memory now. in_host: those of states that rest in host memory, and of
            the buffers in front of a drive. on_drive: bytes of each state on a drive.
        tiers: for each unit the tier of each of its states.
        ledger: the account, with the traffic of the last step.
        batch: sequences and tokens a sequence of the last input of token numbers; zeros when there was none.
    """

    rank: int
    world: int
    config: Any
    on_host: bool
    place: Place
    shape: Callable[[], ModelShape]
    placement: Placement
    whole: bool
    steps: Callable[[], int]
    units: Callable[[], list[UnitRecord]]
    groups: Callable[[], list[list[int | None]]]
    optimizer: Callable[[], list[OptimizerRecord]]
    tensors: Callable[[], dict[str, list[Any]]]
    in_host: Callable[[], dict[str, list[Any]]]
    on_drive: Callable[[], dict[str, int]]
    tiers: Callable[[], list[dict[str, str]]]
    ledger: Callable[[], Ledger]
    batch: Callable[[], tuple[int, int]]


@dataclass(frozen=True)
class MoveRow:
    """What one step moved between a drive and memory for one state, predicted and counted, and what that cost.

    `seconds` are the counted bytes at the rate measured over the whole run in this direction; 0 where nothing was measured.
    """

    direction: str
    state: str
    predicted_bytes: int
    counted_bytes: int
    seconds: float
