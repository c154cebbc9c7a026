"""Which device this process computes on, asked of torch.accelerator and never of a vendor's module."""

from __future__ import annotations

from typing import Any

import torch

from ..environment import accelerator_override, read_launch


def device_type() -> str:
    """Return "cuda", "xpu", … when an accelerator is present and not overridden, else "cpu"."""
    wanted = accelerator_override()
    if wanted == "cpu" or not torch.accelerator.is_available():
        return "cpu"
    return torch.accelerator.current_accelerator().type  # type: ignore[union-attr]


def local_device() -> torch.device:
    """Return this rank's device: the accelerator numbered by the local rank, or the CPU."""
    kind = device_type()
    if kind == "cpu":
        return torch.device("cpu")
    launch = read_launch()
    index = 0 if launch is None else launch.local_rank % torch.accelerator.device_count()
    return torch.device(kind, index)


class Accelerator:
    """DeepSpeed's accelerator names (`get_accelerator()`) over torch.accelerator."""

    def __init__(self) -> None:
        self._type = device_type()

    def device_name(self, index: int | None = None) -> str:
        """Return "cpu", "cuda", or "cuda:1" when an index is given."""
        return self._type if index is None or self._type == "cpu" else f"{self._type}:{index}"

    def current_device_name(self) -> str:
        """Return the name of this rank's device."""
        return str(local_device())

    def current_device(self) -> int | str:
        """Return the device index, or "cpu"."""
        device = local_device()
        return "cpu" if device.index is None else device.index

    def device(self, index: int | None = None) -> torch.device:
        """Return a torch.device of this accelerator's type."""
        return torch.device(self.device_name(index))

    def device_count(self) -> int:
        """Return how many devices this process sees (1 on CPU)."""
        return 1 if self._type == "cpu" else torch.accelerator.device_count()

    def communication_backend_name(self) -> str:
        """Return the process-group backend for this device type."""
        return backend_for(self._type)

    def is_available(self) -> bool:
        """Return True: the CPU is always there."""
        return True

    def is_bf16_supported(self) -> bool:
        """Return whether bf16 arithmetic works on this device."""
        return bool(torch.cuda.is_bf16_supported()) if self._type == "cuda" else True

    def is_fp16_supported(self) -> bool:
        """Return whether fp16 arithmetic works on this device."""
        return True

    def empty_cache(self) -> None:
        """Return cached blocks of the accelerator's allocator to the driver."""
        if self._type != "cpu":
            torch.accelerator.empty_cache()

    def synchronize(self, index: int | None = None) -> None:
        """Wait for all work queued on the device."""
        if self._type != "cpu":
            torch.accelerator.synchronize(index)

    def memory_allocated(self, index: int | None = None) -> int:
        """Return bytes held by tensors on the accelerator (0 on CPU, where torch keeps no count)."""
        return 0 if self._type == "cpu" else int(torch.accelerator.memory_allocated(index))

    def max_memory_allocated(self, index: int | None = None) -> int:
        """Return the highest memory_allocated so far, in bytes (0 on CPU)."""
        return 0 if self._type == "cpu" else int(torch.accelerator.max_memory_allocated(index))

    def set_device(self, index: int) -> None:
        """Make device `index` current."""
        if self._type != "cpu":
            torch.accelerator.set_device_index(index)

    def manual_seed(self, seed: int) -> None:
        """Seed every device's generator."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Return the tensor in page-locked memory where an accelerator can use it."""
        return tensor if self._type == "cpu" else tensor.pin_memory()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"get_accelerator().{name} is not offered here; torch.accelerator covers what this surface leaves out")


def get_accelerator() -> Accelerator:
    """Return DeepSpeed's device surface for the device that this process uses."""
    return Accelerator()


def backend_for(kind: str) -> str:
    """Return the process-group backend that serves a device type ("gloo" for cpu, "nccl" for cuda)."""
    if kind == "cpu":
        return "gloo"
    return torch.distributed.get_default_backend_for_device(kind)
