"""Fits the constants of the step-time model on published runs, and writes the page with the residuals.

`python -m stateroom.ledger.step.fit` prints docs/ledger_fit.md; `--refit` searches the constants anew and prints them too.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .constants import FITTED, Constants
from .runs import Run, published_runs
from .time import StepTime, step_time

# what is searched for each family; the rest keeps its default, since too few runs tell it apart
SEARCHED: dict[str, tuple[str, ...]] = {
    "ampere": ("product", "memory", "half", "spread"),
    "hopper": ("product", "memory", "half", "spread", "tp_hidden"),
    "tpu": ("product",),
    "blackwell": ("product",),
}
_LIMITS = {"product": (0.4, 0.95), "memory": (0.4, 0.95), "half": (16.0, 600.0), "spread": (0.0, 0.03), "tp_hidden": (0.05, 0.8)}


@dataclass(frozen=True)
class Residual:
    """A run beside its prediction."""

    run: Run
    predicted: StepTime

    @property
    def error(self) -> float:
        """Predicted over measured tokens a second, less 1; MFU has the same relative error."""
        return self.predicted.tokens_s / self.predicted.devices / self.run.device_tokens_s - 1

    @property
    def measured_mfu(self) -> float:
        """MFU of the measurement, by the ledger's own count of FLOPs."""
        return self.predicted.mfu / (1 + self.error)


def residuals(constants: dict[str, Constants] | None = None) -> list[Residual]:
    """Return every published run beside its prediction with one set of constants for each family."""
    found = []
    for run in published_runs():
        job = run.job()
        known = (constants or FITTED)[job.cluster.accelerator.family]
        found.append(Residual(run, step_time(job, known)))
    return found


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the values lie, by the nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def fit(family: str, start: Constants | None = None) -> Constants:
    """Return the constants with the least mean squared log error over the family's runs of the fit.

    Coordinates are searched in turn with a shrinking step: the model is monotone in each, so no gradient is needed.
    """
    jobs = [(run, run.job()) for run in published_runs() if run.fitted]
    jobs = [(run, job) for run, job in jobs if job.cluster.accelerator.family == family]

    def loss(known: Constants) -> float:
        errors = [math.log(step_time(job, known).tokens_s / job.cluster.devices / run.device_tokens_s) for run, job in jobs]
        return sum(error**2 for error in errors) / len(errors)

    return _descend(loss, start or FITTED[family], SEARCHED[family])


def _descend(loss: Callable[[Constants], float], start: Constants, names: Sequence[str]) -> Constants:
    best, least, step = start, loss(start), 0.25
    while step > 0.003:
        moved = False
        for name in names:
            low, high = _LIMITS[name]
            for factor in (1 + step, 1 / (1 + step)):
                value = min(high, max(low, max(getattr(best, name), 1e-4) * factor))
                trial = replace(best, **{name: value})
                found = loss(trial)
                if found < least - 1e-9:
                    best, least, moved = trial, found, True
        if not moved:
            step /= 2
    return replace(best, **{name: float(f"{getattr(best, name):.3g}") for name in names})


def page(found: Sequence[Residual]) -> str:
    """Return docs/ledger_fit.md."""
    from .fit_page import text

    return text(found, FITTED, SEARCHED)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the page, or with --refit the constants that a new search finds."""
    parser = argparse.ArgumentParser(prog="python -m stateroom.ledger.step.fit", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--refit", action="store_true", help="search the constants anew and print them for constants.py")
    args = parser.parse_args(argv)
    if args.refit:
        for family in SEARCHED:
            print(f'    "{family}": {fit(family)},')
        return 0
    print(page(residuals()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
