"""MFU and HFU: the denominator is always named, and one is turned into the other by the FLOPs that recomputation adds."""

from __future__ import annotations

from .published import narayanan_flops

# hardware FLOPs / model FLOPs when only the policy is known: forward 2, backward 4, a second forward 2
_HARDWARE_OVER_MODEL = {"none": 1.0, "full": 8 / 6}


def utilisation(flops_per_s: float, peak: float, devices: float = 1) -> float:
    """Return achieved over peak, 0 to 1: MFU for model FLOPs, HFU for executed ones; `peak` is of one device."""
    return flops_per_s / (peak * devices)


def hfu_from_mfu(mfu: float, recompute: str = "full", added: float | None = None) -> float:
    """Return HFU; `added` is the share of model FLOPs that is done again (1/3 for a full second forward)."""
    return mfu * (_HARDWARE_OVER_MODEL[recompute] if added is None else 1 + added)


def mfu_from_hfu(hfu: float, recompute: str = "full", added: float | None = None) -> float:
    """Return MFU from HFU; the reverse of hfu_from_mfu."""
    return hfu / (_HARDWARE_OVER_MODEL[recompute] if added is None else 1 + added)


def model_share_of_hardware(layers: int, hidden: int, seq: int, vocab: int, recompute: str = "full") -> float:
    """Return model over hardware FLOPs of a GPT, by the closed forms (they know the head's and the core's part)."""
    return narayanan_flops(1, layers, hidden, seq, vocab) / narayanan_flops(1, layers, hidden, seq, vocab, recompute)
