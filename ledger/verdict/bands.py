"""Sets a measured MFU against published runs on the same family of accelerators, of like size and scale."""

from __future__ import annotations

from dataclasses import dataclass

from ..flops.layers import training_flops_per_token
from ..hardware.device import Accelerator
from ..shapes.count import active_parameters
from ..step.runs import published_runs

_SIZES = (2.0, 4.0, 10.0)  # how far parameters may differ, by a factor; the narrowest that holds enough runs is used
_SCALES = (4.0, 16.0, 1e9)
_ENOUGH = 3


@dataclass(frozen=True)
class Band:
    """Published runs that are like the measured one. MFU is counted alike for all: causal attention, no recomputation."""

    low: float
    high: float
    runs: tuple[tuple[str, float, str], ...]
    within: str


@dataclass(frozen=True)
class Verdict:
    """Where a measured MFU stands: "below", "within" or "above" the band, or "no band"."""

    mfu: float
    standing: str
    band: Band | None

    def lines(self) -> list[str]:
        """Return the verdict and the runs it rests on, with their sources."""
        if self.band is None:
            return [f"MFU {100 * self.mfu:.1f} %: no published run on such accelerators is in the table"]
        span = f"{100 * self.band.low:.0f} to {100 * self.band.high:.0f} %"
        head = f"MFU {100 * self.mfu:.1f} %: {self.standing} the published band of {span} ({self.band.within})"
        return [head, *(f"  {100 * mfu:.1f} %  {name} ({source})" for name, mfu, source in self.band.runs)]


def verdict(mfu: float, device: Accelerator, params: float, devices: int) -> Verdict:
    """Return where `mfu` (0 to 1) stands for a model of `params` active parameters on `devices` of `device`."""
    rows = []
    for run in published_runs():
        job = run.job()
        if job.cluster.accelerator.family != device.family:
            continue
        peak = job.cluster.accelerator.peak_flops(job.layout.compute)
        counted = run.device_tokens_s * training_flops_per_token(job.shape, run.seq) / peak
        rows.append(
            (active_parameters(job.shape), job.cluster.devices, f"{run.name}, {job.cluster.devices:,} devices", counted, run.source)
        )
    for size, scale in zip(_SIZES, _SCALES, strict=True):
        like = [row for row in rows if _within(row[0], params, size) and _within(row[1], devices, scale)]
        if len(like) >= _ENOUGH:
            shares = [row[3] for row in like]
            text = f"{len(like)} runs on {device.family}, {size:g}x in size" + (f", {scale:g}x in scale" if scale < 1e9 else ", any scale")
            band = Band(min(shares), max(shares), tuple((row[2], row[3], row[4]) for row in sorted(like, key=lambda row: -row[3])), text)
            standing = "below" if mfu < band.low else "above" if mfu > band.high else "within"
            return Verdict(mfu, standing, band)
    return Verdict(mfu, "no band", None)


def _within(one: float, other: float, factor: float) -> bool:
    return one <= other * factor and other <= one * factor
