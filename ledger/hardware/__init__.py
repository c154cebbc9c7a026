"""What a model runs on: accelerators, links and clusters, each figure with its source; an unknown one is refused, never guessed."""

from .device import Accelerator, Cluster
from .load import known_accelerator, read_cluster, read_hardware

__all__ = ["Accelerator", "Cluster", "known_accelerator", "read_cluster", "read_hardware"]
