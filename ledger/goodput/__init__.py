"""What failures cost: checkpoint intervals, effective training time, failure rates, device-hours and money."""

from .failures import (
    expected_failures,
    failures_per_1000_node_days,
    mean_time_between_failures,
    mtbf_from_node_rate,
    survival,
    yearly_failures_per_device,
)
from .interval import (
    daly_interval,
    daly_short_interval,
    effective_ratio,
    exact_goodput,
    first_order_waste,
    goodput_account,
    optimal_goodput,
    optimal_interval,
    young_interval,
    young_overhead,
)

__all__ = [
    "daly_interval",
    "daly_short_interval",
    "effective_ratio",
    "exact_goodput",
    "expected_failures",
    "failures_per_1000_node_days",
    "first_order_waste",
    "goodput_account",
    "mean_time_between_failures",
    "mtbf_from_node_rate",
    "optimal_goodput",
    "optimal_interval",
    "survival",
    "yearly_failures_per_device",
    "young_interval",
    "young_overhead",
]
