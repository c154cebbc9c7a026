"""Checkpoints and failures: kinds `checkpoint` and `fault_goodput`."""

from __future__ import annotations

import math

from stateroom.ledger.goodput import (
    daly_interval,
    daly_short_interval,
    effective_ratio,
    exact_goodput,
    expected_failures,
    failures_per_1000_node_days,
    first_order_waste,
    mean_time_between_failures,
    mtbf_from_node_rate,
    optimal_goodput,
    optimal_interval,
    survival,
    yearly_failures_per_device,
    young_interval,
    young_overhead,
)
from stateroom.ledger.goodput.storage import checkpoint_bytes, transfer_seconds
from stateroom.ledger.shapes import count_parameters, read_shape
from stateroom.ledger.units import BYTES, SECONDS

from . import throughput
from .case import Case, Unanswered, in_bytes, in_seconds, is_bytes, is_flop, is_seconds, is_share, unit_word

_ENDS = {"_us": 1e-6, "_ms": 1e-3, "_s": 1.0, "_sec": 1.0, "_min": 60.0, "_h": 3600.0, "_hours": 3600.0, "_days": 86400.0, "_d": 86400.0,
         "_years": 365 * 86400.0}  # fmt: skip
_SIZES = {"_kb": 1e3, "_mb": 1e6, "_gb": 1e9, "_tb": 1e12, "_pb": 1e15, "_gib": 2**30, "_tib": 2**40, "_bytes": 1.0}


def time_of(case: Case, *stems: str) -> float | None:
    """Return seconds of the input whose name is one of the stems with a unit behind it."""
    for stem in stems:
        for end, size in _ENDS.items():
            if f"{stem}{end}" in case.inputs:
                return case[f"{stem}{end}"] * size
    return None


def size_of(case: Case, *stems: str) -> float | None:
    """Return bytes of the input whose name is one of the stems with a unit behind it."""
    for stem in stems:
        for end, size in _SIZES.items():
            if f"{stem}{end}" in case.inputs:
                return case[f"{stem}{end}"] * size
    return None


def _out(case: Case, share: float) -> float:
    return 100 * share if is_share(case.unit) else share


def answer_checkpoint(case: Case) -> float:
    ratio = throughput._ratio(case)
    if ratio is not None:
        return ratio
    write, mtbf = time_of(case, "write", "delta", "checkpoint", "save", "blocking"), _mtbf(case)
    restart, interval = time_of(case, "restart", "recovery", "init"), time_of(case, "interval", "tau", "every")
    if write is not None and mtbf is not None:
        return _interval_answer(case, write, mtbf, restart, interval)
    if write is not None and interval is not None:
        return _out(case, write / (interval + write) if case.formula_has("interval+write") else write / interval)
    return _storage_answer(case, write)


def _interval_answer(case: Case, write: float, mtbf: float, restart: float | None, interval: float | None) -> float:
    if is_seconds(case.unit):
        if restart is not None or case.formula_has("argmax", "exact"):
            return optimal_interval(write, mtbf) / in_seconds(case.unit)
        if case.formula_has("d/18M", "/18", "/3+") or ({"daly", "higher"} & case.words and not case.formula_has("sqrt(2dM)-d")):
            return daly_interval(write, mtbf) / in_seconds(case.unit)
        if case.formula_has("sqrt(2dM)-d", "sqrt(2deltaM)-delta"):
            return daly_short_interval(write, mtbf) / in_seconds(case.unit)
        return young_interval(write, mtbf) / in_seconds(case.unit)
    wants_goodput = "goodput" in case.unit.lower() or "goodput" in case.words or "effective" in case.unit.lower() or "ETTR" in case.unit
    if wants_goodput:
        return _out(case, _goodput(case, write, mtbf, restart or 0.0, interval))
    if interval is None and restart is None:
        return _out(case, young_overhead(write, mtbf))
    return _out(case, first_order_waste(interval or young_interval(write, mtbf), write, mtbf, restart or 0.0))


def _goodput(case: Case, write: float, mtbf: float, restart: float, interval: float | None) -> float:
    if (case.formula_has("(1-") and case.says("ETTR")) or "ETTR" in case.unit:
        return effective_ratio(mtbf, write, restart, interval)
    if interval is not None:
        return exact_goodput(interval, write, mtbf, restart)
    if "young" in case.words or "young" in case.unit.lower() or case.says("at young"):
        return exact_goodput(young_interval(write, mtbf), write, mtbf, restart)
    if case.says("first order", "first-order") or case.formula_has("d/tau"):
        return 1 - first_order_waste(young_interval(write, mtbf), write, mtbf, restart)
    return optimal_goodput(write, mtbf, restart)


def _storage_answer(case: Case, write: float | None) -> float:
    i = case.inputs
    size = size_of(case, "checkpoint", "size", "bytes", "total")
    size = case.first("checkpoint_bytes", "bytes", default=size)
    if size is None and ("params" in i or "model" in i):
        params = i.get("params") or count_parameters(read_shape(str(i["model"]))).total
        each = case.first("bytes_per_param", "bytes_per_parameter")
        each = each if each is not None else sum(value for key, value in i.items() if key.endswith("_bytes")) or 14
        size = checkpoint_bytes(params, each)
    if size is None:
        return throughput.answer(case)
    if is_bytes(case.unit):
        rate = "/s" in case.unit
        return size / (write or 1.0 if rate else case.first("ranks", "gpus", default=1)) / in_bytes(case.unit)
    if is_seconds(case.unit):
        speed = size_of(case, "bandwidth", "speed", "write", "storage") or _rate(case)
        if speed is None:
            raise Unanswered("time of a checkpoint without a bandwidth")
        return transfer_seconds(size, speed) / in_seconds(case.unit)
    raise Unanswered("checkpoint")


def _rate(case: Case) -> float | None:
    for key, value in case.inputs.items():
        for unit, size in BYTES.items():
            if key.lower().endswith((f"_{unit.lower()}_s", f"_{unit.lower()}ps", f"_{unit.lower()}_per_s")):
                return value * size
    return case.first("bandwidth", "bytes_per_s")


def _mtbf(case: Case) -> float | None:
    found = time_of(case, "mtbf", "mttf", "job_mtbf")
    devices = case.first("gpus", "n_gpus", "devices", "chips", "nodes")
    if found is not None:
        return found
    each = time_of(case, "gpu_mtbf", "device_mtbf", "node_mtbf", "gpu_mttf")
    if each is not None and devices:
        return mean_time_between_failures(each, devices)
    rate = case.first("rf_per_1000_node_days", "failures_per_1000_node_days")
    if rate is not None and devices:
        return mtbf_from_node_rate(devices, rate, case.get("gpus_per_node", 8))
    failures, span = case.first("unexpected", "failures", "interruptions"), time_of(case, "duration") or _span(case)
    return span / failures if failures and span else None


def _span(case: Case) -> float | None:
    for key in ("days", "hours", "weeks", "months"):
        if key in case.inputs:
            return case[key] * SECONDS[key]
    return None


def answer_faults(case: Case) -> float:
    i = case.inputs
    for ask in (_counts, _rates, _times, _energy):
        found = ask(case)
        if found is not None:
            return found
    if case.has("write_s") or time_of(case, "write") is not None:
        return answer_checkpoint(case)
    if is_flop(case.unit) or case.has("gpu_hours") or case.has("tokens"):
        return throughput.answer(case)
    raise Unanswered(f"faults with {', '.join(i)}")


def _counts(case: Case) -> float | None:
    i = case.inputs
    if case.has("total", "unexpected") and not is_share(case.unit) and unit_word(case.unit) not in ("x", "h"):
        return i["total"] - i["unexpected"]
    part = case.first("count", "planned", "unexpected", "part", "events")
    if case.has("total") and part is not None and is_share(case.unit):
        return 100 * part / i["total"]
    if case.has("replayed_pct") and len(i) == 2 and not case.has("goodput_pct"):
        return math.prod(i.values()) / 100
    if case.has("goodput_pct"):
        lost = 100 - i["goodput_pct"]
        return lost if "lost" in case.unit else lost / 100
    if case.has("lost_h", "total_h"):
        return _out(case, i["lost_h"] / i["total_h"])
    if case.has("wasted_gpu_h"):
        return _out(case, i["wasted_gpu_h"] / (i["gpus"] * (_span(case) or 0) / 3600))
    lost, total = time_of(case, "lost", "downtime", "wasted"), time_of(case, "total", "run", "elapsed") or _span(case)
    if lost is not None and total is not None:
        share = lost / total
        return _out(case, 1 - share if any(word in case.unit for word in ("available", "uptime", "goodput", "effective")) else share)
    return None


def _rates(case: Case) -> float | None:
    i = case.inputs
    failures = case.first("unexpected", "failures", "interruptions", "total", "count")
    devices = case.first("gpus", "chips", "devices")
    span = _span(case)
    if failures is not None and span and devices:
        if "node" in case.unit and "day" in case.unit:
            return failures_per_1000_node_days(failures, span, devices, i.get("gpus_per_node", 8))
        if is_share(case.unit):
            return 100 * yearly_failures_per_device(failures, span, devices)
        if is_seconds(case.unit):
            return span / failures * devices / in_seconds(case.unit)
    if failures is not None and span and is_seconds(case.unit):
        return span / failures / in_seconds(case.unit)
    if failures is not None and span and "per day" in case.unit:
        return failures / (span / 86400)
    return None


def _times(case: Case) -> float | None:
    mtbf = _mtbf(case)
    if mtbf is None and case.first("mttf_days", "mtbf_days") is not None:
        mtbf = case.first("mttf_days", "mtbf_days") * 86400
    if mtbf is None or time_of(case, "write") is not None:
        return None
    devices = case.first("gpus", "chips", "devices")
    if case.has("effective"):
        return (1 - case["effective"]) * mtbf / in_seconds(case.unit)
    if "probab" in case.unit or "survive" in case.words:
        return survival(mtbf, time_of(case, "run", "duration") or case.get("hours", 1) * 3600)
    if "per day" in case.unit or "/day" in case.unit:
        return expected_failures(mtbf, 1)
    target = case.first("target_gpus", "new_gpus", "to_gpus", "at_gpus")
    if is_seconds(case.unit):
        if target:
            return mtbf * devices / target / in_seconds(case.unit)
        whole_job = time_of(case, "gpu_mtbf", "device_mtbf", "node_mtbf", "gpu_mttf") is not None or case.has("rf_per_1000_node_days")
        if whole_job or not devices:
            return mtbf / in_seconds(case.unit)
        each = case.has("mttf_days") or case.has("gpu_mttf_days")
        scaled = mean_time_between_failures(mtbf, devices) if each else mtbf * devices
        return scaled / in_seconds(case.unit)
    return None


def _energy(case: Case) -> float | None:
    return throughput.answer(case) if case.has("kwh") or case.has("watts") else None
