"""How a batch is handed to a module, and where the loss is in what comes back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import EngineError


def to_device(tree: Any, device: torch.device) -> Any:
    """Return the batch with every tensor on the device."""
    if isinstance(tree, torch.Tensor):
        return tree.to(device, non_blocking=True)
    if isinstance(tree, Mapping):
        moved = {key: to_device(value, device) for key, value in tree.items()}
        return moved if type(tree) is dict else type(tree)(moved)  # type: ignore[call-arg]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(to_device(value, device) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(to_device(value, device) for value in tree)
    return tree


def call_with_batch(engine: Any, batch: Any, loss_fn: Any, device: torch.device) -> Any:
    """Run the engine on a batch: a mapping as keywords, a tuple as arguments; with loss_fn the last item is the target."""
    batch = to_device(batch, device)
    if loss_fn is not None:
        if not isinstance(batch, (list, tuple)) or len(batch) < 2:
            raise EngineError(f"with loss_fn a batch is (inputs, labels), got {type(batch).__name__}")
        inputs, labels = batch[0] if len(batch) == 2 else tuple(batch[:-1]), batch[-1]
        outputs = engine(*inputs) if isinstance(inputs, (list, tuple)) else engine(inputs)
        return loss_fn(outputs, labels)
    if isinstance(batch, Mapping):
        return engine(**batch)
    return engine(*batch) if isinstance(batch, (list, tuple)) else engine(batch)


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss in a module's output: the tensor itself, `.loss`, ["loss"], or the first item.

    Raises:
        EngineError: none of these is a scalar tensor.
    """
    found = output
    if not isinstance(output, torch.Tensor):
        found = getattr(output, "loss", None)
        if found is None and isinstance(output, Mapping):
            found = output.get("loss")
        if found is None and isinstance(output, (list, tuple)) and output:
            found = output[0]
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        raise EngineError(f"no scalar loss in the module's output ({type(output).__name__}); return it, or pass loss_fn to initialize")
    return found
