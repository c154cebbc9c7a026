"""Accelerators by name: dense peaks, memory and links from vendors' data sheets."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from ..units import GIB
from .device import Accelerator

_T, _G = 1e12, 1e9
_NV = "NVIDIA data sheet"
_AMD = "AMD Instinct data sheet"
_TPU = "cloud.google.com/tpu/docs system architecture; jax-ml/scaling-book"


def _nvidia(
    name: str, half: float, usable_gib: float, hbm: float, *, fp8: float | None = None, fp4: float | None = None, tf32: float | None = None,
    fp32: float, link: float | None, host: float, net: float | None, watts: float, price: float | None = None, family: str,
    domain: int = 8, aliases: tuple[str, ...] = (), bf16: bool = True, source: str = _NV,
) -> Accelerator:  # fmt: skip
    """Peaks in TFLOP/s, memory in GiB, bandwidths in GB/s one direction."""
    rates = {"bf16": half if bf16 else None, "fp16": half, "fp8": fp8, "fp4": fp4, "tf32": tf32, "fp32": fp32}
    return Accelerator(
        name, "nvidia", {dtype: rate * _T for dtype, rate in rates.items() if rate is not None}, usable_gib * GIB, hbm * _G,
        host_bytes_s=host * _G, link_bytes_s=None if link is None else link * _G, link_domain=domain,
        network_bytes_s=None if net is None else net * _G, watts=watts, price_usd_h=price, family=family, source=source, aliases=aliases,
    )  # fmt: skip


_VOLTA = (
    _nvidia("v100-sxm-32gb", 125, 31.7, 900, fp32=15.7, link=150, host=12, net=12.5, watts=300, price=3.06, family="volta", bf16=False,
            aliases=("v100", "v100-32gb")),
    _nvidia("v100-sxm-16gb", 125, 15.8, 900, fp32=15.7, link=150, host=12, net=12.5, watts=300, family="volta", bf16=False,
            aliases=("v100-16gb",)),
    _nvidia("t4", 65, 14.6, 320, fp32=8.1, link=None, host=12, net=None, watts=70, family="turing", bf16=False),
)  # fmt: skip
_AMPERE = (
    _nvidia("a100-sxm-80gb", 312, 79.2, 2039, tf32=156, fp32=19.5, link=300, host=25, net=25, watts=400, price=1.5, family="ampere",
            aliases=("a100", "a100-80gb", "a100-sxm4-80gb")),
    _nvidia("a100-sxm-40gb", 312, 39.4, 1555, tf32=156, fp32=19.5, link=300, host=25, net=25, watts=400, price=1.2, family="ampere",
            aliases=("a100-40gb", "a100-sxm4-40gb")),
    _nvidia("a100-pcie-80gb", 312, 79.2, 1935, tf32=156, fp32=19.5, link=None, host=25, net=25, watts=300, family="ampere"),
    _nvidia("a100-pcie-40gb", 312, 39.4, 1555, tf32=156, fp32=19.5, link=None, host=25, net=25, watts=250, family="ampere"),
    _nvidia("a800-sxm-80gb", 312, 79.2, 2039, tf32=156, fp32=19.5, link=200, host=25, net=25, watts=400, family="ampere",
            aliases=("a800",)),
    _nvidia("a10", 125, 22.0, 600, tf32=62.5, fp32=31.2, link=None, host=25, net=None, watts=150, family="ampere"),
    _nvidia("a40", 149.7, 44.4, 696, tf32=74.8, fp32=37.4, link=56, host=25, net=None, watts=300, family="ampere", domain=2),
    _nvidia("rtx-a6000", 154.8, 47.5, 768, tf32=77.4, fp32=38.7, link=56, host=25, net=None, watts=300, family="ampere", domain=2,
            aliases=("a6000",)),
    _nvidia("rtx-3090", 71, 23.6, 936, tf32=35.6, fp32=35.6, link=None, host=25, net=None, watts=350, family="ampere", aliases=("3090",)),
)  # fmt: skip
_ADA = (
    _nvidia("l40s", 362, 44.4, 864, fp8=733, tf32=183, fp32=91.6, link=None, host=25, net=None, watts=350, price=1.86, family="ada"),
    _nvidia("l4", 121, 22.0, 300, fp8=242.5, tf32=60, fp32=30.3, link=None, host=25, net=None, watts=72, family="ada"),
    _nvidia("rtx-4090", 165.2, 23.6, 1008, fp8=330.3, tf32=82.6, fp32=82.6, link=None, host=25, net=None, watts=450, family="ada",
            aliases=("4090",)),
)  # fmt: skip
_HOPPER = (
    _nvidia("h100-sxm", 989, 79.2, 3350, fp8=1979, tf32=494.7, fp32=66.9, link=450, host=55, net=50, watts=700, price=2.5, family="hopper",
            aliases=("h100", "h100-80gb", "h100-sxm5", "h100-sxm-80gb")),
    _nvidia("h100-pcie", 756, 79.1, 2000, fp8=1513, tf32=378, fp32=51.2, link=None, host=55, net=50, watts=350, family="hopper"),
    _nvidia("h100-nvl", 835, 93.0, 3938, fp8=1671, tf32=417, fp32=60, link=300, host=55, net=50, watts=400, family="hopper", domain=2),
    _nvidia("h200-sxm", 989, 139.8, 4800, fp8=1979, tf32=494.7, fp32=66.9, link=450, host=55, net=50, watts=700, price=3.0, family="hopper",
            aliases=("h200",)),
    _nvidia("h800-sxm", 989, 79.2, 3350, fp8=1979, tf32=494.7, fp32=66.9, link=200, host=55, net=50, watts=700, price=2.0, family="hopper",
            aliases=("h800",), source="NVIDIA data sheet; arXiv:2505.09343; price arXiv:2412.19437"),
    _nvidia("h20", 148, 95.6, 4000, fp8=296, tf32=74, fp32=44, link=450, host=55, net=50, watts=400, family="hopper"),
    _nvidia("gh200", 989, 94.5, 4000, fp8=1979, tf32=494.7, fp32=66.9, link=450, host=450, net=50, watts=900, family="hopper"),
)  # fmt: skip
_BLACKWELL = (
    _nvidia("b200", 2250, 178.4, 8000, fp8=4500, fp4=9000, tf32=1125, fp32=75, link=900, host=55, net=50, watts=1000, price=4.5,
            family="blackwell"),
    _nvidia("gb200", 2500, 184.0, 8000, fp8=5000, fp4=10000, tf32=1250, fp32=80, link=900, host=225, net=50, watts=1200, family="blackwell",
            domain=72),
    _nvidia("b300", 2250, 267.0, 8000, fp8=4500, fp4=13500, tf32=1125, fp32=75, link=900, host=55, net=100, watts=1100, family="blackwell"),
    _nvidia("gb300", 2500, 275.0, 8000, fp8=5000, fp4=15000, tf32=1250, fp32=80, link=900, host=225, net=100, watts=1400,
            family="blackwell",
            domain=72),
    _nvidia("rtx-5090", 209.5, 31.4, 1792, fp8=419, tf32=104.8, fp32=104.8, link=None, host=55, net=None, watts=575, family="blackwell",
            aliases=("5090",)),
)  # fmt: skip


def _other(
    name: str, vendor: str, peak: Mapping[str, float], gib: float, hbm: float, source: str, family: str, *, link: float | None,
        host: float | None,
    net: float | None, domain: int, watts: float | None = None, price: float | None = None, aliases: tuple[str, ...] = (),
) -> Accelerator:  # fmt: skip
    """Peaks in TFLOP/s, memory in GiB, bandwidths in GB/s one direction."""
    return Accelerator(
        name, vendor, {dtype: rate * _T for dtype, rate in peak.items()}, gib * GIB, hbm * _G,
        host_bytes_s=None if host is None else host * _G, link_bytes_s=None if link is None else link * _G, link_domain=domain,
        network_bytes_s=None if net is None else net * _G, watts=watts, price_usd_h=price, family=family, source=source, aliases=aliases,
    )  # fmt: skip


_REST = (
    _other("mi250x", "amd", {"bf16": 383, "fp16": 383, "fp32": 95.7}, 128, 3277, _AMD, "cdna2", link=250, host=32, net=25, domain=8,
           watts=560),
    _other("mi250x-gcd", "amd", {"bf16": 191.5, "fp16": 191.5, "fp32": 47.9}, 64, 1638, _AMD, "cdna2", link=125, host=16, net=12.5,
           domain=8, watts=280),
    _other("mi300x", "amd", {"bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9, "fp32": 163.4}, 191.9, 5300, _AMD, "cdna3", link=448,
           host=55, net=50,
           domain=8, watts=750),
    _other("mi325x", "amd", {"bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9, "fp32": 163.4}, 255.9, 6000, _AMD, "cdna3", link=448,
           host=55, net=50,
           domain=8, watts=1000),
    _other("mi355x", "amd", {"bf16": 2516.6, "fp16": 2516.6, "fp8": 5033, "fp4": 10066, "fp32": 157.3}, 287.9, 8000, _AMD, "cdna4",
           link=537.6,
           host=55, net=50, domain=8, watts=1400),
    _other("tpu-v2", "google", {"bf16": 46}, 16, 700, _TPU, "tpu", link=62.5, host=None, net=None, domain=256),
    _other("tpu-v3", "google", {"bf16": 123}, 32, 900, _TPU, "tpu", link=112, host=16, net=3.1, domain=1024, price=2.0),
    _other("tpu-v4", "google", {"bf16": 275, "int8": 275}, 32, 1228, _TPU, "tpu", link=268, host=16, net=6.25, domain=4096, price=3.22),
    _other("tpu-v5e", "google", {"bf16": 197, "int8": 394}, 16, 819, _TPU, "tpu", link=180, host=16, net=6.25, domain=256, price=1.2,
           aliases=("tpu-v5-lite",)),
    _other("tpu-v5p", "google", {"bf16": 459, "int8": 918}, 95, 2765, _TPU, "tpu", link=540, host=16, net=6.25, domain=8960, price=4.2),
    _other("tpu-v6e", "google", {"bf16": 918, "int8": 1836}, 32, 1640, _TPU, "tpu", link=360, host=16, net=12.5, domain=256, price=2.7,
           aliases=("trillium", "tpu-v6")),
    _other("tpu-v7", "google", {"bf16": 2307, "fp8": 4614}, 192, 7370, _TPU, "tpu", link=600, host=None, net=None, domain=9216,
           aliases=("ironwood",)),
    _other("trainium1", "aws", {"bf16": 190, "fp16": 190, "fp8": 190, "fp32": 47.5}, 32, 820, "AWS Neuron documentation", "trainium",
           link=192, host=16,
           net=12.5, domain=16, price=1.34, aliases=("trn1",)),
    _other("trainium2", "aws", {"bf16": 667, "fp16": 667, "fp8": 1299, "fp32": 181}, 96, 2900, "AWS Neuron documentation", "trainium",
           link=640, host=32,
           net=25, domain=16, aliases=("trn2",)),
    _other("gaudi2", "intel", {"bf16": 432, "fp8": 865}, 94.6, 2450, "Intel Gaudi 2 white paper", "gaudi", link=262.5, host=25,
           net=37.5, domain=8,
           watts=600),
    _other("gaudi3", "intel", {"bf16": 1835, "fp8": 1835}, 126, 3700, "Intel Gaudi 3 white paper", "gaudi", link=525, host=55, net=75,
           domain=8,
           watts=900),
)  # fmt: skip

ACCELERATORS: tuple[Accelerator, ...] = (*_VOLTA, *_AMPERE, *_ADA, *_HOPPER, *_BLACKWELL, *_REST)


@lru_cache(maxsize=1)
def accelerators() -> Mapping[str, Accelerator]:
    """Return name -> accelerator; aliases are names of their own."""
    found: dict[str, Accelerator] = {}
    for device in ACCELERATORS:
        for name in (device.name, *device.aliases):
            assert name not in found, name
            found[name] = device
    return found
