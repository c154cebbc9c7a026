"""Who talks to whom: process group, device mesh, and the one door to torch.distributed."""

from .accelerator import backend_for, device_type, get_accelerator, local_device
from .collectives import Collectives, Pending
from .distributed import init_distributed
from .mesh import AXES, axis_sizes, build_mesh

__all__ = [
    "AXES",
    "Collectives",
    "Pending",
    "axis_sizes",
    "backend_for",
    "build_mesh",
    "device_type",
    "get_accelerator",
    "init_distributed",
    "local_device",
]
