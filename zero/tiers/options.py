"""What a config says about tiers, in the terms of the code that moves the bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .drive import REQUEST_BYTES, REQUESTS

DEVICE, CPU, NVME = "device", "cpu", "nvme"


@dataclass(frozen=True)
class TierOptions:
    """Where states rest, and how they are moved.

    Attributes:
        optimizer, params: device, cpu or nvme. `optimizer` holds for master weights, optimizer states and, where they are
            sharded, gradients.
        optimizer_path, params_path: folders on the drive.
        ratio: share of the trainable elements whose optimizer states leave the device.
        sub_group_numel: elements that are updated together.
        sub_groups: that are in memory at once: one is read and one written while one is updated.
        param_buffers, param_buffer_numel: staging of parameters and gradients on their way to and from the drive.
        max_params_in_host: elements of parameters that stay in host memory all the same.
        pinned: host memory that an accelerator copies from is page-locked.
        request_bytes, requests: of the drive.
        states: names of optimizer states that are as large as the parameter, where known, so that room is made before training.
    """

    optimizer: str = DEVICE
    params: str = DEVICE
    optimizer_path: Path | None = None
    params_path: Path | None = None
    ratio: float = 1.0
    sub_group_numel: int = 8 << 20
    sub_groups: int = 3
    param_buffers: int = 5
    param_buffer_numel: int = 100_000_000
    max_params_in_host: int = 0
    pinned: bool = True
    request_bytes: int = REQUEST_BYTES
    requests: int = REQUESTS
    states: tuple[str, ...] = ()

    @property
    def moves_nothing(self) -> bool:
        """Whether everything rests on the device."""
        return self.optimizer == DEVICE and self.params == DEVICE
