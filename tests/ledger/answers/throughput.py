"""Rates, utilisation, time and money: kinds `mfu` and `cost`, and what other kinds share with them."""

from __future__ import annotations

import math
from typing import Any

from stateroom.ledger.derive import derive

from .case import Case, Unanswered, flop_scale, in_seconds, is_flop, is_seconds, is_share, leading_number, unit_word

# name in a case -> (quantity of the ledger, factor into its unit); names the ledger knows itself are not listed
_NAMES: dict[str, tuple[str, float]] = {
    "peak_tflops": ("peak", 1e12),
    "peak_pflops": ("peak", 1e15),
    "tflops": ("achieved", 1e12),
    "tflops_per_gpu": ("achieved", 1e12),
    "tflops_per_chip": ("achieved", 1e12),
    "tflops_per_device": ("achieved", 1e12),
    "model_tflops": ("achieved", 1e12),
    "hfu_tflops": ("executed", 1e12),
    "hardware_tflops": ("executed", 1e12),
    "aggregate_pflops": ("aggregate", 1e15),
    "total_pflops": ("aggregate", 1e15),
    "params_b": ("params", 1e9),
    "tokens_b": ("tokens", 1e9),
    "tokens_t": ("tokens", 1e12),
    "tokens_per_day": ("tokens_s", 1 / 86400),
    "tokens_per_s_per_device": ("device_tokens_s", 1.0),
    "days": ("run_s", 86400.0),
    "weeks": ("run_s", 7 * 86400.0),
    "seconds": ("run_s", 1.0),
    "iter_ms": ("step_s", 1e-3),
    "step_ms": ("step_s", 1e-3),
    "iteration_s": ("step_s", 1.0),
    "batch_size": ("batch", 1.0),
    "gpu_hours_m": ("device_h", 1e6),
    "gpu_hours_k": ("device_h", 1e3),
    "tpu_hours": ("device_h", 1.0),
    "gpu_days": ("device_h", 24.0),
    "gpu_hours_per_t": ("device_h", 1.0),
    "tco2": ("co2_t", 1.0),
    "tco2e": ("co2_t", 1.0),
    "tco2eq": ("co2_t", 1.0),
    "kg_co2_per_kwh": ("kg_per_kwh", 1.0),
    "mwh": ("energy_kwh", 1e3),
    "kw": ("watts", 1e3),
    "usd_per_gpu_h": ("usd_per_h", 1.0),
    "price": ("usd_per_h", 1.0),
    "usd_per_gpu_hour": ("usd_per_h", 1.0),
    "dollars_per_h": ("usd_per_h", 1.0),
    "budget_usd": ("usd", 1.0),
    "vocab_size": ("vocab", 1.0),
    "h": ("hidden", 1.0),
}
_SHARES = ("mfu", "hfu")
_SWITCHES = ("attention", "causal", "full_square", "recompute", "activation_checkpointing", "factor", "fp8", "dtype", "model", "hardware")


def answer(case: Case) -> float:
    ratio = _ratio(case)
    if ratio is not None:
        return ratio
    if case.formula.strip() == "sum":
        return sum(numbers(case)) / leading_number(case.unit)
    if " per " in case.unit and "token" in case.unit and case.first("tokens", "tokens_t", "tokens_b") is not None:
        return _per_tokens(case)
    if unit_word(case.unit) == "CNY":
        return math.prod(numbers(case))
    want, scale = _wanted(case)
    given = quantities(case)
    if want == "usd_each":
        return given["usd"] / next(value for name, value in case.inputs.items() if "usd" not in name)
    if (
        not {"devices", "gpus", "chips", "nodes", "endpoints", "device_tokens_s", "tokens_per_s_per_gpu", "gpu_hours", "device_h"}
        & given.keys()
    ):
        given["devices"] = 1.0  # a case that names no number of devices speaks of one
    found = derive(want, given, attention=_attention(case), recompute=_recompute(case)).value
    return found / scale


def _per_tokens(case: Case) -> float:
    """Return device-hours or money for so many tokens, such as `H800-h per 1T tokens`."""
    given = quantities(case)
    spent = given.get("gpu_hours", given.get("device_h", given.get("usd")))
    if spent is None:
        raise Unanswered(f"nothing spent in {case.unit!r}")
    return spent / given["tokens"] * leading_number(case.unit.split(" per ", 1)[1].removeprefix("1"))


def quantities(case: Case) -> dict[str, float]:
    """Return the inputs as the ledger's quantities, in its units; shares that are written in percent become 0 to 1."""
    found: dict[str, float] = {}
    for key, value in case.inputs.items():
        if key in _SWITCHES or isinstance(value, (str, bool)) or value is None:
            continue
        name, factor = _NAMES.get(key, (key, 1.0))
        number = float(value) * factor
        found[name] = number / 100 if name in _SHARES and number > 1 else number
    if _executed(case) and "achieved" in found:
        found["executed"] = found.pop("achieved")
    if "passes" not in found and case.formula_has("8TP", "8NT", "8PT", "8ND"):
        found["passes"] = 8.0
    if "passes" not in found and case.formula_has("6TP", "6NT", "6PT", "6ND") and "flops" not in found:
        found["passes"] = 6.0
    return found


def _executed(case: Case) -> bool:
    """Achieved FLOP/s that count what is recomputed, where a model's figure is asked for."""
    return case.formula_has("8TP", "8NT") or (_recompute(case) is not None and "mfu" in case.words)


def _attention(case: Case) -> str:
    if case.get("attention") is False:
        return "none"
    return "causal" if case.get("causal") else "full"


def _recompute(case: Case) -> str | None:
    """Return the policy: named, said by a factor (96 or 4 passes over the layers against 72 or 3), or implied by checkpointing."""
    if case.get("recompute"):
        return str(case["recompute"])
    factor = case.get("factor")
    if factor in (4, 96, 8):
        return "full"
    if factor in (3, 72, 6):
        return "none"
    if case.get("activation_checkpointing"):
        return "full"
    return None


def _ratio(case: Case) -> float | None:
    """Two figures of one kind and a unit without a dimension: the larger over the smaller, or how much more it is."""
    values = [value for value in case.inputs.values() if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if len(values) != 2 or len(case.inputs) != 2 or not _alike(list(case.inputs)):
        return None
    large, small = max(values), min(values)
    if unit_word(case.unit) in ("x", "ratio", "times"):
        return large / small
    if is_share(case.unit) and any(word in case.unit for word in ("increase", "faster", "more", "speedup", "gain", "higher")):
        return 100 * (large / small - 1)
    if is_share(case.unit) and any(word in case.unit for word in ("less", "decrease", "reduction", "saved", "lower", "shorter")):
        return 100 * (1 - small / large)
    return None


def _alike(names: list[str]) -> bool:
    """Return whether two names end alike, as `present_s` and `full_recompute_s` do."""
    one, other = (name.rsplit("_", 1)[-1] for name in names)
    return one == other


def _wanted(case: Case) -> tuple[str, float]:
    """Return the quantity that the unit asks for, and how many of the quantity's unit one of the case's is."""
    unit, lower = case.unit, case.unit.lower()
    if is_share(unit):
        return _wanted_share(case), 0.01
    if is_flop(unit):
        return _wanted_flops(case), flop_scale(unit)
    if is_seconds(unit):
        return ("run_s" if not _asks_step(case) else "step_s"), in_seconds(unit)
    plain = (
        ("tok/s", "device_tokens_s" if any(word in lower for word in ("/device", "/gpu", "/chip", "per gpu")) else "tokens_s"),
        ("tokens/s", "device_tokens_s" if any(word in lower for word in ("/device", "/gpu", "/chip", "per gpu")) else "tokens_s"),
        ("samples/s", "samples_s"),
        ("sequences/s", "samples_s"),
        ("sequences", "batch"),
        ("samples", "batch"),
        ("tokens", "step_tokens"),
        ("usd per hour", "cluster_usd_per_h"),
        ("usd/h", "cluster_usd_per_h" if case.has("usd_per_h") else "usd_per_h"),
        ("usd per gpu-hour", "usd_per_h"),
        ("usd per", "usd_each"),
        ("usd", "usd"),
        ("kg/kwh", "kg_per_kwh"),
        ("kg per kwh", "kg_per_kwh"),
        ("kwh", "energy_kwh"),
        ("mwh", "energy_kwh"),
        ("gwh", "energy_kwh"),
        ("w per gpu", "watts"),
        ("w", "watts"),
        ("tco2", "co2_t"),
        ("t co2", "co2_t"),
        ("gpus", "devices"),
        ("x", "ratio"),
    )
    for word, name in plain:
        if word in lower if len(word) > 2 else lower == word:
            scale = {"mwh": 1e3, "gwh": 1e6}.get(word, 1.0) * leading_number(unit)
            return name, scale * (1e6 if unit.startswith(("MUSD", "M$")) else 1.0)
    if (
        lower.split(" ")[0].replace("/", "-").endswith(("-h", "-hours", "-hour"))
        or "gpu-h" in lower
        or "device-h" in lower
        or "hours" in lower
    ):
        return "device_h", leading_number(unit)
    raise Unanswered(f"no quantity in {unit!r}")


def _wanted_share(case: Case) -> str:
    if case.has("hfu") or "hfu_tflops" in case.inputs or "hardware_tflops" in case.inputs:
        return "mfu"
    executed = case.has("hardware_flops_per_token") or _recompute(case) is not None or "hfu" in case.words
    known = quantities(case)
    return "hfu" if executed and not {"achieved"} & known.keys() else "mfu"


def _wanted_flops(case: Case) -> str:
    unit = case.unit
    if "/s" not in unit:
        return "run_flops" if case.has("tokens") or case.has("gpu_hours") else "token_flops" if "token" in unit else "step_flops"
    per_device = any(word in unit.lower() for word in ("/gpu", "/chip", "/device", "per gpu", "per chip"))
    if _recompute(case) is not None or "hardware" in unit:
        return "executed"
    large = unit.strip()[:1] in ("P", "E")  # what no single device does
    if per_device or not (large or case.has("tflops_per_gpu") or case.has("tflops_per_chip")):
        return "achieved"
    return "aggregate"


def _asks_step(case: Case) -> bool:
    return not {"tokens", "gpu_hours", "device_h", "usd", "flops", "hours"} & quantities(case).keys()


def numbers(case: Case) -> list[Any]:
    return [value for value in case.inputs.values() if isinstance(value, (int, float)) and not isinstance(value, bool)]
