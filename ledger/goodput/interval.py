"""How often to save, and what is left of the time: Young, Daly, and the exact expectation under a Poisson process.

All times are in seconds. `write` is how long a checkpoint stops training, `mtbf` the job's mean time between interruptions,
`restart` from the interruption to the first step of the new run.
"""

from __future__ import annotations

import math

from ..account import Account, account
from ..problems import LedgerError


def young_interval(write: float, mtbf: float) -> float:
    """Return sqrt(2 write mtbf): compute time between two checkpoints (Young 1974)."""
    return math.sqrt(2 * write * mtbf)


def young_overhead(write: float, mtbf: float) -> float:
    """Return the share of time that writing and lost work take at Young's interval, restarts left out: sqrt(2 write / mtbf)."""
    return math.sqrt(2 * write / mtbf)


def daly_short_interval(write: float, mtbf: float) -> float:
    """Return sqrt(2 write mtbf) - write: Daly's first-order form; it is the mean time itself once write > mtbf / 2."""
    return young_interval(write, mtbf) - write if write < mtbf / 2 else mtbf


def daly_interval(write: float, mtbf: float) -> float:
    """Return Daly's higher-order interval (2006), with a = write / 2 mtbf: sqrt(2 write mtbf) (1 + sqrt(a)/3 + a/9) - write.

    From write = 2 mtbf on it is the mean time itself.
    """
    if write >= 2 * mtbf:
        return mtbf
    part = write / (2 * mtbf)
    return young_interval(write, mtbf) * (1 + math.sqrt(part) / 3 + part / 9) - write


def first_order_waste(interval: float, write: float, mtbf: float, restart: float = 0.0) -> float:
    """Return the share of time lost, to first order: write / interval + (interval / 2 + restart) / mtbf."""
    return write / interval + (interval / 2 + restart) / mtbf


def exact_goodput(interval: float, write: float, mtbf: float, restart: float = 0.0) -> float:
    """Return compute over elapsed time when every segment of interval + write is retried until it completes.

    A failure during a restart restarts it: E[segment] = mtbf e^(restart/mtbf) (e^((interval + write)/mtbf) - 1).
    """
    exponent = (interval + write) / mtbf
    if exponent > 700:
        return 0.0
    return interval / (mtbf * math.exp(restart / mtbf) * math.expm1(exponent))


def optimal_interval(write: float, mtbf: float) -> float:
    """Return the interval of the best exact goodput. It does not depend on the restart, which only scales the goodput."""
    low, high = write * 1e-6 + 1e-9, 20 * (mtbf + write)
    golden = (math.sqrt(5) - 1) / 2
    left, right = high - golden * (high - low), low + golden * (high - low)
    for _ in range(200):
        if exact_goodput(left, write, mtbf) < exact_goodput(right, write, mtbf):
            low, left, right = left, right, left + golden * (high - left)
        else:
            high, right, left = right, left, right - golden * (right - low)
    return (low + high) / 2


def optimal_goodput(write: float, mtbf: float, restart: float = 0.0) -> float:
    """Return the exact goodput at the optimal interval."""
    return exact_goodput(optimal_interval(write, mtbf), write, mtbf, restart)


def effective_ratio(mtbf: float, write: float, restart: float, interval: float | None = None) -> float:
    """Return the effective training time ratio of Kokolis et al. 2024 (arXiv:2410.21680).

    (1 - (restart + interval/2) / mtbf) / (1 + write / interval), at Young's interval unless one is given.
    """
    between = young_interval(write, mtbf) if interval is None else interval
    return (1 - (restart + between / 2) / mtbf) / (1 + write / between)


def goodput_account(interval: float, write: float, mtbf: float, restart: float) -> Account:
    """Return where the time goes, as shares of it that add up to 1, and which term is worth shortening first.

    Raises:
        LedgerError: a time that is not positive.
    """
    if min(interval, mtbf) <= 0 or min(write, restart) < 0:
        raise LedgerError("interval and mtbf must be above 0, write and restart not below it")
    good = exact_goodput(interval, write, mtbf, restart)
    writing = good * write / interval
    without_restart = exact_goodput(interval, write, mtbf)
    restarting = 1 - good / without_restart if without_restart else 1.0
    lost = max(0.0, 1 - good - writing - restarting)
    gains = {
        "checkpoint write": exact_goodput(interval, write / 2, mtbf, restart) - good,
        "restart": exact_goodput(interval, write, mtbf, restart / 2) - good,
        "failure rate": exact_goodput(interval, write, 2 * mtbf, restart) - good,
        "interval (to its optimum)": optimal_goodput(write, mtbf, restart) - good,
    }
    first = max(gains, key=lambda name: gains[name])
    halved = ", ".join(f"{name} +{100 * gain:.2f} points" for name, gain in sorted(gains.items(), key=lambda item: -item[1]))
    return account(
        "effective training time",
        "of the time",
        [
            ("training", good, "steps that are kept"),
            ("writing checkpoints", writing, f"{write:.3g} s every {interval:.4g} s of compute"),
            ("lost work", lost, "steps since the last checkpoint, done again"),
            ("restarts", restarting, f"{restart:.3g} s after each interruption"),
        ],
        mean_time_between_interruptions=f"{mtbf / 3600:.3g} h",
        halving_each_gains=halved,
        shorten_first=first,
    )
