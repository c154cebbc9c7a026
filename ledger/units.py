"""Units in and out: every figure inside the ledger is in bytes, seconds, FLOP, FLOP/s or elements, never in a prefix."""

from __future__ import annotations

import re
from collections.abc import Mapping

from .problems import LedgerError

KB, MB, GB, TB, PB = 10**3, 10**6, 10**9, 10**12, 10**15
KIB, MIB, GIB, TIB, PIB = 2**10, 2**20, 2**30, 2**40, 2**50

MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86400
YEAR_S = 365 * DAY_S

BYTES = {
    "B": 1, "bytes": 1, "byte": 1,
    "KB": KB, "kB": KB, "MB": MB, "GB": GB, "TB": TB, "PB": PB,
    "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB, "PiB": PIB,
}  # fmt: skip
SECONDS = {
    "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "microseconds": 1e-6, "ms": 1e-3, "milliseconds": 1e-3,
    "s": 1, "sec": 1, "seconds": 1, "second": 1, "min": MINUTE_S, "minutes": MINUTE_S,
    "h": HOUR_S, "hour": HOUR_S, "hours": HOUR_S, "d": DAY_S, "day": DAY_S, "days": DAY_S, "weeks": 7 * DAY_S, "week": 7 * DAY_S,
    "months": YEAR_S / 12, "month": YEAR_S / 12, "year": YEAR_S, "years": YEAR_S,
}  # fmt: skip
PREFIXES = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18, "Z": 1e21, "Y": 1e24}
DTYPE_BYTES = {
    "fp64": 8.0, "float64": 8.0, "fp32": 4.0, "float32": 4.0, "tf32": 4.0, "float": 4.0,
    "fp16": 2.0, "float16": 2.0, "half": 2.0, "bf16": 2.0, "bfloat16": 2.0,
    "fp8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0, "mxfp8": 1.0, "int8": 1.0, "uint8": 1.0, "fp4": 0.5, "nvfp4": 0.5, "int4": 0.5,
}  # fmt: skip


def dtype_bytes(name: str | float) -> float:
    """Return bytes of one element; a number is taken as bytes already.

    Raises:
        LedgerError: the dtype is not known.
    """
    if isinstance(name, (int, float)):
        return float(name)
    found = DTYPE_BYTES.get(name.lower().removeprefix("torch."))
    if found is None:
        raise LedgerError(f"unknown dtype {name!r}; known: {', '.join(sorted(DTYPE_BYTES))}")
    return found


def parse_bytes(text: str | float) -> float:
    """Return bytes of a text such as "80GB", "79.2 GiB" or a plain number of bytes.

    Raises:
        LedgerError: the text is no size, or its unit is not known.
    """
    return _parse(text, BYTES, "size")


def parse_seconds(text: str | float) -> float:
    """Return seconds of a text such as "3.1h", "90 s" or "2 days".

    Raises:
        LedgerError: the text is no time, or its unit is not known.
    """
    return _parse(text, SECONDS, "time")


def parse_count(text: str | float) -> float:
    """Return a number written with a decimal prefix: "70B", "4M", "15.6T", "4.2e11". B and G both mean 1e9.

    Raises:
        LedgerError: the text is no number, or its suffix is not known.
    """
    return _parse(text, {**PREFIXES, "B": 1e9, "b": 1e9, "m": 1e6, "t": 1e12}, "number")


def _parse(text: str | float, table: Mapping[str, float], what: str) -> float:
    if isinstance(text, (int, float)):
        return float(text)
    match = re.fullmatch(r"\s*([-+]?(?:\d[\d_,]*)?\.?\d+(?:[eE][-+]?\d+)?)\s*([A-Za-zµμ]*)\s*", text)
    if match is None:
        raise LedgerError(f"{text!r} is not a {what}; write a number and a unit of: {', '.join(filter(None, table))}")
    number, unit = float(match[1].replace("_", "").replace(",", "")), match[2]
    if not unit:
        return number
    if unit not in table:
        raise LedgerError(f"unknown unit {unit!r} in {text!r}; known: {', '.join(filter(None, table))}")
    return number * table[unit]


def show_bytes(size: float, *, binary: bool = False) -> str:
    """Return a size with three significant digits and the largest unit that leaves at least 1."""
    step, names = (1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB")) if binary else (1000, ("B", "KB", "MB", "GB", "TB", "PB"))
    return _show(size, step, names)


def show_count(number: float) -> str:
    """Return a number with a decimal prefix."""
    return _show(number, 1000, ("", "K", "M", "G", "T", "P", "E", "Z", "Y")).strip()


def show_seconds(seconds: float) -> str:
    """Return a time in the unit people would use for it."""
    for unit, whole in (("years", YEAR_S), ("days", DAY_S), ("h", HOUR_S), ("min", MINUTE_S)):
        if abs(seconds) >= 2 * whole:
            return f"{seconds / whole:,.3g} {unit}"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0 s"


def _show(number: float, step: int, names: tuple[str, ...]) -> str:
    power = 0
    while abs(number) >= step and power < len(names) - 1:
        number, power = number / step, power + 1
    digits = f"{number:.0f}" if power == 0 and number == int(number) else f"{number:.4g}"
    return f"{digits} {names[power]}"
