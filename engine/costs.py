"""What the newest steps cost, gathered without a wait that was not there: time by part, tokens, FLOPs, memory peak."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from ..ledger.figures import FlopCount, PeakMemory, StepFigures, count_flops, mean_parts, peak_of_device, predicted_peak
from ..ledger.problems import LedgerError
from ..ledger.shapes.shape import ModelShape
from ..parallel.clock import StepAccount
from .stages import cut_of, whole_shape

if TYPE_CHECKING:
    from .engine import Engine

_NEWEST = 20  # steps that a mean is taken over


class Costs:
    """Keeps the newest steps' accounts and tokens; figures are worked out when they are asked for."""

    def __init__(self, engine: Engine) -> None:
        self._module, self._cut = engine.module, cut_of(engine)
        self._device = engine.device
        self._world = engine.comm.world
        self._config = engine.config
        self._recompute = engine.config.activation_checkpointing.policy
        self._peak = engine.timers.peak
        self._accounts: deque[StepAccount] = deque(maxlen=_NEWEST)
        self._tokens: deque[int] = deque(maxlen=_NEWEST)
        self._seq = 0
        self._shape: ModelShape | None = None
        self._shape_is_known = False
        self._flops: dict[tuple[int, float], FlopCount] = {}
        units = engine.sharded.units
        self._parameters = sum(unit.layout.numel for unit in units)
        narrow = {unit.dtype for unit in units} & {torch.bfloat16, torch.float16}
        self._dtype = "bf16" if torch.bfloat16 in narrow else "fp16" if narrow else "fp32"
        autocast = engine.config.torch_autocast
        if autocast.enabled and not narrow:
            self._dtype = autocast.dtype or "bf16"

    def step(self, account: StepAccount | None, tokens: int, seq: int) -> dict[str, Any]:
        """Take in a step that has ended, and return what a metrics record says of it.

        Args:
            account: the newest step's that can be accounted. tokens: of this step, over all ranks. seq: tokens of a sequence.
        """
        if account is not None:
            self._accounts.append(account)
        if tokens:
            self._tokens.append(tokens)
            self._seq = seq
        record: dict[str, Any] = {"peak_bytes": self._peak.num_bytes, "peak_phase": self._peak.phase}
        if account is not None:
            record |= {"account": account.parts, "account_s": account.seconds, "account_step": account.step, "exposed_s": account.exposed_s}
        if tokens:
            count = self._count(tokens)
            record |= {"flops": count.model, "hardware_flops": count.hardware}
        return record

    def figures(self, hardware: str | None = None) -> StepFigures:
        """Return the figures of the newest steps.

        Args:
            hardware: name or file of the device whose peak MFU is counted against; by default the device that is here.

        Raises:
            LedgerError: `hardware` is not known.
        """
        seconds, parts, exposed = mean_parts(self._accounts)
        tokens = sum(self._tokens) / len(self._tokens) if self._tokens else 0.0
        most, instant = predicted_peak(self._known_shape(), self._config, self._world, self._seq)
        peak, words = peak_of_device(self._device_name(), self._dtype, hardware)
        return StepFigures(
            steps=len(self._accounts),
            seconds=seconds,
            parts=parts,
            exposed_s=exposed,
            tokens=tokens,
            seq=self._seq,
            devices=self._world,
            flops=self._count(tokens) if tokens else None,
            peak_flops=peak,
            denominator=words,
            memory=PeakMemory(self._peak.num_bytes, self._peak.phase, self._peak.before_bytes, self._counted(), most, instant),
        )

    def shape(self) -> dict[str, object] | None:
        """Return the model's sizes as the module says them, or None where it does not."""
        found = self._known_shape()
        return None if found is None else found.to_dict()

    def _count(self, tokens: float) -> FlopCount:
        key = (self._seq, tokens)
        if key not in self._flops:
            self._flops[key] = count_flops(self._known_shape(), self._parameters, self._seq, tokens, self._recompute)
        return self._flops[key]

    def _known_shape(self) -> ModelShape | None:
        if not self._shape_is_known:
            self._shape_is_known = True
            try:
                self._shape = whole_shape(self._module, self._cut)
            except LedgerError:  # no transformer that the ledger can read: 6 N D stands in, and says so
                self._shape = None
        return self._shape

    def _device_name(self) -> str:
        if self._device.type == "cuda":
            return torch.cuda.get_device_name(self._device)
        return "this CPU" if self._device.type == "cpu" else f"this {self._device.type} device"

    def _counted(self) -> str:
        return "resident, libraries and all" if self._device.type == "cpu" else "allocated for tensors"
