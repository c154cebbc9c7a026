"""`stateroom env`: what this machine and installation are, for bug reports."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
from typing import Any

PACKAGES = ("torch", "numpy", "pydantic", "hjson", "safetensors", "rich", "psutil", "tokenizers", "transformers", "accelerate", "deepspeed")


def main(argv: list[str]) -> int:
    """Print the report and return 0."""
    parser = argparse.ArgumentParser(
        prog="stateroom env",
        description="Report versions, devices, backends and what a launcher left in the environment.",
        epilog="example: stateroom env --json > env.json",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    report = collect()
    if args.json:
        print(json.dumps(report, indent=2))
        return 0
    for section, rows in report.items():
        print(section)
        for name, value in rows.items():
            print(f"  {name:<18} {value}")
    return 0


def collect() -> dict[str, dict[str, Any]]:
    """Return the report as sections of name and value."""
    import psutil
    import torch
    import torch.distributed as dist

    from ..environment import read_launch
    from ..version import __version__
    from .accelerator import backend_for, device_type, local_device

    kind = device_type()
    launch = read_launch()
    devices = torch.accelerator.device_count() if kind != "cpu" else 0
    return {
        "stateroom": {"version": __version__, "python": platform.python_version(), "platform": platform.platform()},
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
            "accelerators": devices or "none",
            "device": str(local_device()),
            "threads": torch.get_num_threads(),
        },
        "communication": {
            "backend": backend_for(kind),
            "available": ", ".join(name for name in ("gloo", "nccl", "mpi", "ucc", "xccl") if dist.is_backend_available(name)),
            "launcher": "none" if launch is None else f"{launch.source}: rank {launch.rank} of {launch.world_size}",
        },
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    import cpuinfo

    return str(cpuinfo.get_cpu_info().get("brand_raw", platform.machine()))
