"""Failure rates: of a device, a node, a thousand node-days, a job. Failures are taken to be independent and Poisson."""

from __future__ import annotations

import math

from ..units import DAY_S, HOUR_S, YEAR_S


def mean_time_between_failures(device_mtbf: float, devices: float) -> float:
    """Return a job's mean time between failures when each device fails on its own: device_mtbf / devices (any unit)."""
    return device_mtbf / devices


def mtbf_from_node_rate(devices: float, per_1000_node_days: float, per_node: int = 8) -> float:
    """Return seconds between failures of a job, from failures per 1,000 node-days."""
    return DAY_S / (devices / per_node * per_1000_node_days / 1000)


def failures_per_1000_node_days(failures: float, seconds: float, devices: float, per_node: int = 8) -> float:
    """Return failures per 1,000 node-days."""
    return failures / (devices / per_node * seconds / DAY_S) * 1000


def yearly_failures_per_device(failures: float, seconds: float, devices: float) -> float:
    """Return failures a device and year (365 days)."""
    return failures / (devices * seconds / YEAR_S)


def expected_failures(device_mtbf_s: float, devices: float, seconds: float = DAY_S) -> float:
    """Return how many failures to expect in a time."""
    return seconds / mean_time_between_failures(device_mtbf_s, devices)


def survival(mtbf_s: float, seconds: float = HOUR_S) -> float:
    """Return the probability that a job runs for `seconds` without a failure: e^(-t / mtbf)."""
    return math.exp(-seconds / mtbf_s)
