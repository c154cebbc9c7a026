"""An accelerator and a cluster of them, as figures that somebody published."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..problems import LedgerError
from ..units import GIB

_HALVES = ("bf16", "fp16")


@dataclass(frozen=True)
class Accelerator:
    """One device as torch sees it. Rates are per second; bandwidths are one direction; None means not published.

    Attributes:
        peak: dtype -> dense FLOP/s (no sparsity).
        usable_bytes: what a process can allocate in all, below what the label says.
        hbm_bytes_s: device memory. host_bytes_s: to host memory, each device at once.
        link_bytes_s: to the other devices of its `link_domain` (NVLink, Infinity Fabric, ICI), all links together.
        link_domain: devices that these links join.
        network_bytes_s: beyond the domain, per device, as its nodes are usually built.
        watts: board power. price_usd_h: what an hour of it is rented for; override it.
    """

    name: str
    vendor: str
    peak: Mapping[str, float]
    usable_bytes: float
    hbm_bytes_s: float
    host_bytes_s: float | None = None
    link_bytes_s: float | None = None
    link_domain: int = 8
    network_bytes_s: float | None = None
    watts: float | None = None
    price_usd_h: float | None = None
    family: str = ""
    source: str = ""
    aliases: tuple[str, ...] = ()

    def peak_flops(self, dtype: str = "bf16") -> float:
        """Return dense peak FLOP/s for `dtype`; bf16 and fp16 stand for each other where only one is published.

        Raises:
            LedgerError: this accelerator has no published peak for it.
        """
        wanted = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "mxfp8": "fp8", "nvfp4": "fp4"}.get(
            dtype, dtype
        )
        for name in (wanted, *(_HALVES if wanted in _HALVES else ())):
            if name in self.peak:
                return self.peak[name]
        raise LedgerError(f"{self.name} has no published dense peak for {dtype!r}; it has {', '.join(self.peak)}")

    def needed(self, what: str) -> float:
        """Return a figure that may be missing.

        Raises:
            LedgerError: it is not published for this device.
        """
        found = getattr(self, what)
        if found is None:
            raise LedgerError(f"{self.name} has no {what} in the table; give it in a hardware file: {{name: {self.name}, {what}: ...}}")
        return float(found)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return {**vars(self), "peak": dict(self.peak), "aliases": list(self.aliases)}


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal accelerators.

    Attributes:
        network_bytes_s: between nodes, one direction, per device.
        domain: devices joined by the fast links; a node, unless a rack is one domain.
        link_latency_s, network_latency_s: fixed cost of one step of a collective.
        storage_bytes_s: of the shared file system, all ranks together; None when not known.
        overhead_bytes: context, communicators and other memory that is no tensor, a device.
    """

    accelerator: Accelerator
    nodes: int
    per_node: int
    network_bytes_s: float
    domain: int
    link_latency_s: float = 5e-6
    network_latency_s: float = 15e-6
    storage_bytes_s: float | None = None
    overhead_bytes: float = 3.0 * GIB
    price_usd_h: float | None = None
    extra: Mapping[str, float] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        """Number of devices in all."""
        return self.nodes * self.per_node

    @property
    def link_bytes_s(self) -> float:
        """Fast links of one device, one direction; the host bus where a device has none."""
        device = self.accelerator
        return device.link_bytes_s if device.link_bytes_s is not None else device.needed("host_bytes_s")

    def price(self) -> float | None:
        """Return USD an hour and device, or None when neither the cluster nor the table says."""
        return self.accelerator.price_usd_h if self.price_usd_h is None else self.price_usd_h

    def __str__(self) -> str:
        return f"{self.devices:,} x {self.accelerator.name} ({self.nodes:,} nodes of {self.per_node})"


def unnamed_cluster(ranks: int) -> Cluster:
    """Return devices without figures, for jobs of which bytes and FLOPs are asked and no times."""
    device = Accelerator("any device", "", {}, math.inf, math.inf, math.inf, math.inf, network_bytes_s=math.inf)
    return Cluster(device, 1, ranks, math.inf, ranks, overhead_bytes=0.0)
