"""The constants of the step-time model: one set for each family of accelerators, never one for a run.

They are fitted by `python -m stateroom.ledger.step.fit` on published runs; docs/ledger_fit.md has the fit and its residuals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..comm.axes import Rates
from ..hardware.device import Accelerator
from ..problems import LedgerError


@dataclass(frozen=True)
class Constants:
    """Shares of published rates that training reaches.

    Attributes:
        product: of peak FLOP/s, by large matrix products. core: by the attention core.
        memory: of device-memory bandwidth, by norms, activations, losses and the optimizer.
        half: size of a product's side at which it reaches half of its rate.
        link, network: of bandwidths, by collectives.
        overlap: of the compute beside which data-parallel traffic could run, what it does run beside.
        tp_hidden: of tensor-parallel traffic, what runs beside the product that makes or needs it.
        spread: time lost for each doubling of the nodes, as a share: stragglers, jitter, congestion.
        experts: of the rate of a plain product, by the products of routed experts.
    """

    product: float
    core: float
    memory: float = 0.8
    half: float = 128.0
    link: float = 0.75
    network: float = 0.75
    overlap: float = 0.8
    tp_hidden: float = 0.0
    spread: float = 0.005
    experts: float = 0.7

    @property
    def rates(self) -> Rates:
        """What collectives reach."""
        return Rates(self.link, self.network)


FITTED: Mapping[str, Constants] = {
    "ampere": Constants(product=0.75, core=0.55, memory=0.512, half=214.0, spread=0.000702),
    "hopper": Constants(product=0.595, core=0.5, memory=0.4, half=80.6, tp_hidden=0.8, spread=0.00383),
    "tpu": Constants(product=0.812, core=0.5, memory=0.8, half=128.0, spread=0.005),
    "blackwell": Constants(product=0.589, core=0.45, memory=0.8, half=128.0, spread=0.005),
}
# `stateroom ledger calibrate` measures what is reached, not what a data sheet says; what it does not measure is as above
CALIBRATED = Constants(product=1.0, core=0.5, memory=1.0, link=1.0, network=1.0)
# families without published runs in the fit borrow the constants of the nearest one; the account says so
_BORROWED = {"volta": "ampere", "turing": "ampere", "ada": "ampere", "cdna2": "ampere", "cdna3": "hopper", "cdna4": "blackwell",
             "trainium": "tpu", "gaudi": "hopper"}  # fmt: skip


def constants_of(device: Accelerator) -> tuple[Constants, str]:
    """Return the constants of a device's family, and where they are from.

    Raises:
        LedgerError: a device of the user's own without a family.
    """
    if device.family == "calibrated":
        return CALIBRATED, "rates as calibrated"
    if device.family in FITTED:
        return FITTED[device.family], f"fitted on runs on {device.family}"
    borrowed = _BORROWED.get(device.family)
    if borrowed is None:
        known = ", ".join(sorted({*FITTED, *_BORROWED, "calibrated"}))
        raise LedgerError(
            f"no constants for {device.name} (family {device.family!r}); give it a family whose efficiency is like its own: {known}"
        )
    return FITTED[borrowed], f"borrowed from {borrowed}: no published run on {device.family} is in the fit"
