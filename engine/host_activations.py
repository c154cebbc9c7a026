"""What recomputed units keep for their backward, held in host memory and brought back one unit ahead of its use."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from ..parallel.collectives import DONE, Pending
from ..zero.tiers.copies import copy_ahead, copy_down


@dataclass(eq=False)
class Kept:
    """An input of a recomputed unit on its way to host memory and back."""

    device: torch.device
    host: torch.Tensor
    down: Pending
    back: torch.Tensor | None = None
    up: Pending = DONE


class HostActivations:
    """Hooks on saved tensors. Backward asks for them in the reverse order, so each one that is asked for starts the one before it.

    Parameters, integers and what is in host memory already stay where they are.

    Args:
        moves: tells which tensors go; by default those on an accelerator.
    """

    def __init__(self, moves: Callable[[torch.Tensor], bool] | None = None) -> None:
        self._moves = moves or (lambda tensor: tensor.device.type != "cpu")
        # as they were kept, the last one comes back first; the graph owns them, and a graph may go without a backward
        self._order: list[weakref.ref[Kept]] = []

    def keeping(self) -> AbstractContextManager[None]:
        """A context in which tensors saved for backward go to host memory."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    @property
    def held_bytes(self) -> int:
        """Bytes of host memory in use."""
        return sum(kept.host.nbytes for ref in self._order if (kept := ref()) is not None)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | Kept:
        if isinstance(tensor, nn.Parameter) or not tensor.is_floating_point() or not self._moves(tensor):
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")
        kept = Kept(tensor.device, host, copy_down(host, tensor.detach()))
        self._order = [ref for ref in self._order if ref() is not None] + [weakref.ref(kept)]
        return kept

    def _unpack(self, packed: torch.Tensor | Kept) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        at = next((index for index, ref in enumerate(self._order) if ref() is packed), None)
        self._start(packed)
        if at is not None:
            before = self._order[at - 1]() if at else None
            if before is not None:
                self._start(before)
            del self._order[at:]  # those behind it have been passed by this backward, or belong to a graph that is gone
        packed.up.wait()
        back, packed.back = packed.back, None  # a graph that is kept asks again, and is served anew
        assert back is not None
        return back

    def _start(self, kept: Kept) -> None:
        if kept.back is None:
            kept.down.wait()
            kept.back = torch.empty(kept.host.shape, dtype=kept.host.dtype, device=kept.device)
            kept.up = copy_ahead(kept.back, kept.host)
