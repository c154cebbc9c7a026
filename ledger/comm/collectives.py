"""The primitives: what a rank sends of a buffer of size S, and how long that takes on a link.

Size S is the whole buffer: the input of an all-reduce or reduce-scatter, the output of an all-gather (as in nccl-tests).
"""

from __future__ import annotations

from ..problems import look_up

# kind -> (times (n - 1) / n that each rank sends, steps of a ring)
KINDS: dict[str, tuple[float, float]] = {
    "all_reduce": (2.0, 2.0),
    "all_gather": (1.0, 1.0),
    "reduce_scatter": (1.0, 1.0),
    "all_to_all": (1.0, 1.0),
    "gather": (1.0, 1.0),
    "scatter": (1.0, 1.0),
}
_WHOLE = {"broadcast": 1.0, "reduce": 1.0, "send": 1.0, "receive": 1.0, "send_recv": 1.0, "permute": 1.0}
_NAMES = {name: name for name in (*KINDS, *_WHOLE)}


def moved_share(kind: str, ranks: int) -> float:
    """Return what a rank sends, as a share of S, by a ring: 2 (n - 1)/n for an all-reduce, (n - 1)/n for its two halves.

    Raises:
        LedgerError: no such collective.
    """
    ring = KINDS.get(kind)
    if ring is not None:
        return ring[0] * (ranks - 1) / ranks
    name = look_up("collective", kind, _NAMES)
    return moved_share(name, ranks) if name in KINDS else (_WHOLE[name] if ranks > 1 else 0.0)


def bus_factor(kind: str, ranks: int, *, in_network: bool = False) -> float:
    """Return bus bandwidth over algorithm bandwidth as nccl-tests prints it; with reduction in the switch (n - 1)/(n + 1)."""
    return (ranks - 1) / (ranks + 1) if in_network else moved_share(kind, ranks)


def collective_seconds(kind: str, size: float, ranks: int, bytes_s: float, latency_s: float = 0.0) -> float:
    """Return the time of one collective of `size` bytes over links of `bytes_s` one direction, `latency_s` each ring step."""
    if ranks <= 1:
        return 0.0
    steps = KINDS[kind][1] * (ranks - 1) if kind in KINDS else 1.0
    return moved_share(kind, ranks) * size / bytes_s + steps * latency_s
