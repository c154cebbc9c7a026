"""What steps that ran have cost: their time as parts that sum to it, FLOPs, MFU and HFU with the denominator named, the memory peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from .account import account
from .flops.layers import step_flops
from .hardware.catalogue import accelerators
from .hardware.device import Accelerator, unnamed_cluster
from .hardware.load import read_hardware
from .job import Job
from .memory.life import fullest, tensors_of
from .plan.config import layout_of
from .problems import LedgerError, plain
from .shapes.shape import ModelShape
from .units import show_bytes, show_count

if TYPE_CHECKING:
    from ..config_schemas.root import Config

_NO_PEAK = (
    "no peak is published for {0}; measure it (`stateroom ledger calibrate > here.hjson`) and name the file: engine.ledger(hardware=...)"
)


@dataclass(frozen=True)
class FlopCount:
    """FLOPs of one step of the whole job; `how` says by which count."""

    model: float
    hardware: float
    how: str


@dataclass(frozen=True)
class PeakMemory:
    """The most memory of this rank so far.

    Attributes:
        phase: in which it was reached. before_bytes: what was held when the engine was built.
        what: what is counted: allocated tensors of an accelerator, or the resident set of the process.
        predicted_bytes: of tensors, by the calculator for fused norms and losses; None where the sizes are not known.
        predicted_phase: the instant at which it has the most.
    """

    num_bytes: int
    phase: str
    before_bytes: int
    what: str
    predicted_bytes: float | None = None
    predicted_phase: str = ""


@dataclass(frozen=True)
class StepFigures:
    """Means over the `steps` newest steps that are accounted.

    Attributes:
        seconds: of one step. parts: its time by part, in seconds; they sum to `seconds`.
        tokens: of one step over all ranks; 0 when the inputs are no token numbers. seq: tokens of a sequence.
        flops: of one step over all ranks; None without tokens.
        peak_flops: dense peak of one device for the compute dtype, FLOP/s; None when it is not known. denominator: in words.
    """

    steps: int
    seconds: float
    parts: Mapping[str, float]
    exposed_s: float
    tokens: float
    seq: int
    devices: int
    flops: FlopCount | None
    peak_flops: float | None
    denominator: str
    memory: PeakMemory
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs over what the devices could do at peak in the same time, 0 to 1."""
        return self._utilisation(None if self.flops is None else self.flops.model)

    @property
    def hfu(self) -> float | None:
        """The same for the FLOPs that are executed, recomputed ones included."""
        return self._utilisation(None if self.flops is None else self.flops.hardware)

    def _utilisation(self, flops: float | None) -> float | None:
        if flops is None or not self.peak_flops or not self.seconds:
            return None
        return flops / (self.seconds * self.devices * self.peak_flops)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {**asdict(self), "parts": dict(self.parts), "notes": list(self.notes), "mfu": self.mfu, "hfu": self.hfu}

    def lines(self) -> list[str]:
        """Return the figures as text."""
        lines = []
        if self.steps:
            title = f"time of a step, mean of the {self.steps} newest that are accounted"
            parts = sorted(self.parts.items(), key=lambda item: -item[1])
            lines += account(title, "s", [(name, seconds, "") for name, seconds in parts]).lines()
            lines.append(f"  exposed communication: {100 * self.exposed_s / self.seconds:.1f} % of the step")
        if self.flops is not None:
            rate = f", {self.tokens / self.seconds:,.0f} tokens/s" if self.seconds else ""
            lines.append(f"  {show_count(self.flops.model)}FLOP a step ({self.flops.how}); {self.tokens:,.0f} tokens of {self.seq:,}{rate}")
        if self.mfu is not None and self.hfu is not None:
            lines.append(f"  MFU {100 * self.mfu:.2f} %, HFU {100 * self.hfu:.2f} % of {self.denominator}")
        else:
            lines.append(f"  MFU: {self.denominator}" if self.flops is not None else "  MFU: the inputs are no token numbers")
        memory = self.memory
        grown = memory.num_bytes - memory.before_bytes
        reached = f"{show_bytes(memory.num_bytes)} {memory.what}, reached in {memory.phase}"
        lines.append(f"  peak of memory: {reached}; {show_bytes(grown)} more than when the engine was built")
        if memory.predicted_bytes is not None:
            lines.append(f"  predicted: {show_bytes(memory.predicted_bytes)} of tensors, most in {memory.predicted_phase} (the calculator)")
        return [*lines, *(f"- {note}" for note in self.notes)]


def count_flops(shape: ModelShape | None, parameters: int, seq: int, tokens: float, recompute: str) -> FlopCount:
    """Return the FLOPs of a step of `tokens` tokens in sequences of `seq`.

    Args:
        shape: the model's sizes; None: 6 N D (arXiv:2001.08361), which leaves attention out and counts embeddings as products.
        parameters: of the whole model, for 6 N D.
        recompute: policy of activation recomputation; it adds to the executed FLOPs only.
    """
    if shape is None:
        model = 6.0 * parameters * tokens
        again = 2.0 * parameters * tokens if recompute == "full" else 0.0
        return FlopCount(model, model + again, "6 N D: the module's sizes are not known, so attention is not counted")
    found = step_flops(shape, seq, 1, attention="causal", recompute=recompute)
    many = tokens / seq
    return FlopCount(found.model.total * many, found.hardware * many, "matrix products and causal attention, from the module's sizes")


def peak_of_device(device_name: str, dtype: str, hardware: str | None = None) -> tuple[float | None, str]:
    """Return the dense peak FLOP/s of a device for `dtype`, and the denominator in words, or None and why there is none.

    Args:
        device_name: what torch calls the device, such as "NVIDIA H100 80GB HBM3".
        hardware: a name of the table or a hardware file that is used instead.

    Raises:
        LedgerError: `hardware` is not known.
    """
    device = read_hardware(hardware) if hardware is not None else _named(device_name)
    if device is None:
        return None, _NO_PEAK.format(device_name)
    try:
        peak = device.peak_flops(dtype)
    except LedgerError as error:
        return None, str(error)
    return peak, f"{peak / 1e12:,.4g} TFLOP/s {dtype}, dense, of {device.name}"


def _named(device_name: str) -> Accelerator | None:
    """Return the table's device that torch's name contains in the most letters."""
    whole = plain(device_name)
    found = [(len(plain(name)), device) for name, device in accelerators().items() if len(plain(name)) > 2 and plain(name) in whole]
    return max(found, key=lambda item: item[0])[1] if found else None


def mean_parts(accounts: Sequence[Any]) -> tuple[float, dict[str, float], float]:
    """Return the mean seconds of step accounts, of each part, and of exposed communication."""
    if not accounts:
        return 0.0, {}, 0.0
    count = len(accounts)
    names = dict.fromkeys(name for each in accounts for name in each.parts)
    parts = {name: sum(each.parts.get(name, 0.0) for each in accounts) / count for name in names}
    return sum(each.seconds for each in accounts) / count, parts, sum(each.exposed_s for each in accounts) / count


def predicted_peak(shape: ModelShape | None, config: Config, ranks: int, seq: int) -> tuple[float | None, str]:
    """Return the most bytes of tensors on a rank and the instant, by the calculator; (None, "") where sizes are not known."""
    if shape is None or not seq:
        return None, ""
    try:
        layout = layout_of(config, ranks, shape)
        name, at = fullest(Job(shape, unnamed_cluster(ranks), layout, seq)).peak
    except LedgerError:  # degrees that do not fit this shape
        return None, ""
    return tensors_of(at), name
