"""What a bug report needs to know of a machine and an installation, as sections of name and value."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from ..environment import read_launch, reportable
from ..version import __version__

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "pydantic",
    "hjson",
    "safetensors",
    "rich",
    "psutil",
    "py-cpuinfo",
    "tokenizers",
    "transformers",
    "accelerate",
    "peft",
    "diffusers",
    "deepspeed",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "sve", "bf16", "i8mm")
PROBE_BYTES = 32 * 2**20
Section = dict[str, Any]


def collect() -> dict[str, Section]:
    """Return the whole report; what cannot be found out is said to be so, and never ends the report."""
    return {
        "stateroom": {"version": __version__, "python": platform.python_version(), "platform": platform.platform()},
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "processor": processor(),
        "accelerator": accelerator(),
        "compiled": compiled(),
        "disk": disks([Path.cwd(), Path(tempfile.gettempdir()), Path("/dev/shm")]),
        "network": network(),
        "communication": communication(),
        "variables": dict(reportable()),
    }


def processor() -> Section:
    """Return the CPU's name, what it can do, and the memory beside it."""
    import cpuinfo
    import psutil
    import torch

    info = cpuinfo.get_cpu_info()
    memory = psutil.virtual_memory()
    able = [flag for flag in CPU_FLAGS if flag in info.get("flags", ())]
    return {
        "name": info.get("brand_raw", platform.machine()),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "capabilities": " ".join(able) or "none of those looked for",
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "memory": f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB free",
        "memory limit": _memory_limit() or "none",
    }


def _memory_limit() -> str | None:
    """Return the control group's limit, which ends a process before the machine's memory does."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdecimal() and int(text) < 2**60:
            return f"{int(text) / 2**30:.1f} GiB"
    return None


def accelerator() -> Section:
    """Return what torch sees of accelerators."""
    import torch

    from .accelerator import device_type, local_device

    if device_type() == "cpu":
        return {"device": "cpu", "count": "none"}
    rows: Section = {"device": str(local_device()), "count": torch.accelerator.device_count()}
    if device_type() == "cuda":
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            rows[f"{index}"] = f"{found.name}, {found.total_memory / 2**30:.1f} GiB, compute {found.major}.{found.minor}"
        rows["toolkit"] = torch.version.cuda or torch.version.hip or "unknown"
    return rows


def compiled() -> Section:
    """Return which compiled parts there are: libraries inside torch, and what building more would need."""
    import torch

    backends = {"mkl": torch.backends.mkl, "mkldnn": torch.backends.mkldnn, "openmp": torch.backends.openmp, "cudnn": torch.backends.cudnn}
    fused = [name for name in ("Adam", "AdamW", "SGD", "Adagrad") if "fused" in getattr(torch.optim, name).__init__.__code__.co_varnames]
    return {
        "inside torch": ", ".join(name for name, backend in backends.items() if backend.is_available()) or "none",
        "fused optimizers": ", ".join(fused) or "none",
        "triton": _version("triton") or "not installed",
        "compiler": next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), "not found"),
        "ninja": shutil.which("ninja") or "not found",
        "nvcc": shutil.which("nvcc") or "not found",
    }


def disks(folders: list[Path]) -> Section:
    """Return for each folder what it lies on: kind, room, and how fast a small file was written there just now."""
    return {str(folder): describe_disk(folder) for folder in dict.fromkeys(folders) if folder.is_dir()}


def describe_disk(folder: Path) -> str:
    """Return one folder's disk in a sentence."""
    usage = shutil.disk_usage(folder)
    return f"{disk_class(folder)}, {usage.free / 2**30:.0f} of {usage.total / 2**30:.0f} GiB free, {write_speed(folder)}"


def disk_class(folder: Path) -> str:
    """Return memory, network, nvme, ssd, rotating or unknown, with the file system's name."""
    import psutil

    mounts = [part for part in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(part.mountpoint)]
    if not mounts:
        return "unknown"
    kind = max(mounts, key=lambda part: len(part.mountpoint)).fstype
    if kind in ("tmpfs", "ramfs"):
        return f"memory ({kind})"
    if kind.startswith(("nfs", "lustre", "gpfs", "beegfs", "cifs", "smb", "ceph", "fuse.", "9p", "wekafs")):
        return f"network or user space ({kind})"
    number = os.stat(folder).st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not device.exists():
        return f"unknown ({kind})"
    device = device.resolve()
    queue = next((base / "queue" / "rotational" for base in (device, device.parent) if (base / "queue").is_dir()), None)
    if "nvme" in device.name:
        return f"nvme ({kind})"
    if device.name.startswith(("vd", "xvd")):
        return f"virtual disk ({kind})"  # whether it turns, the machine beneath does not tell
    turns = queue is not None and queue.read_text().strip() == "1"
    return f"{'rotating' if turns else 'ssd'} ({kind})"


def write_speed(folder: Path) -> str:
    """Return how fast PROBE_BYTES were written and flushed to a temporary file in a folder."""
    block = os.urandom(2**20)  # zeros would only measure a file system that compresses
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            begin = time.perf_counter()
            for _ in range(PROBE_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            took_s = time.perf_counter() - begin
    except OSError as error:
        return f"not writable ({error.strerror})"
    return f"writes {PROBE_BYTES / 2**20 / took_s:.0f} MiB/s ({PROBE_BYTES // 2**20} MiB, flushed)"


def network() -> Section:
    """Return the host's name and each interface that is up, with its addresses and speed."""
    import psutil

    rows: Section = {"host": socket.gethostname()}
    states = psutil.net_if_stats()
    for name, entries in psutil.net_if_addrs().items():
        state = states.get(name)
        if state is None or not state.isup:
            continue
        addresses = [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        speed = f", {state.speed} Mbit/s" if state.speed else ""
        rows[name] = f"{', '.join(addresses) or 'no address'}{speed}, mtu {state.mtu}"
    return rows


def communication() -> Section:
    """Return what ranks can talk over, and who started this process."""
    import torch
    import torch.distributed as dist

    from .accelerator import backend_for, device_type

    try:
        launch = read_launch()
        launcher = "none" if launch is None else f"{launch.source}: rank {launch.rank} of {launch.world_size}"
    except ValueError as error:
        launcher = f"unreadable: {error}"
    rows: Section = {"backend": backend_for(device_type())}
    rows["available"] = ", ".join(name for name in ("gloo", "nccl", "mpi", "ucc", "xccl") if dist.is_backend_available(name))
    if device_type() == "cuda" and dist.is_nccl_available():
        rows["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    rows["launcher"] = launcher
    return rows


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
