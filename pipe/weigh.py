"""What each layer of a list weighs: parameters, FLOPs, bytes of states and of activations; measured without memory where it can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..errors import ConfigError
from ..ledger.memory.states import StateSizes
from .specs import meta_copy, name_of


@dataclass(frozen=True)
class Weight:
    """One layer: parameters that it adds to a stage, FLOPs of its forward, bytes of states, bytes that its backward needs."""

    parameters: int
    flops: float
    state_bytes: int
    activation_bytes: int


def weigh(
    layers: Sequence[Any], outlines: Sequence[nn.Module | None], sample: Any = None, run: Callable[..., Any] | None = None
) -> list[Weight]:
    """Return the weights of layers.

    Args:
        outlines: their modules on the meta device, or as given; None for functions.
        sample: inputs of the first layer for one micro-batch. With it FLOPs and activations are counted by running the
            layers on the meta device. Without it a layer's FLOPs are taken as proportional to the elements of its matrices,
            embeddings left out, and activations as nothing.
        run: (layer, module, inputs) -> outputs, where a layer is not simply called.

    Raises:
        ConfigError: a layer cannot run on the sample without memory.
    """
    plain = [_from_shapes(module) for module in outlines]
    if sample is None:
        return plain
    inputs, found = _to_meta(sample), []
    for number, (layer, module, known) in enumerate(zip(layers, outlines, plain, strict=True)):
        body = layer if module is None else meta_copy(module)
        try:
            inputs, flops, kept = _counted(layer, body, inputs, run)
        except Exception as error:
            raise ConfigError(
                f"layer {number} ({name_of(layer)}) cannot be weighed on the sample: {type(error).__name__}: {error}. Give a sample that "
                "fits the first layer, or choose partition_method parameters, uniform, type:PATTERN or explicit bounds"
            ) from error
        found.append(Weight(known.parameters, flops, known.state_bytes, kept))
    return found


def _from_shapes(module: nn.Module | None) -> Weight:
    if module is None:
        return Weight(0, 0.0, 0, 0)
    sizes = StateSizes()
    count = sum(param.numel() for param in module.parameters())
    trained = sum(param.numel() for param in module.parameters() if param.requires_grad)
    tables = {id(part.weight) for part in module.modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag))}
    matrices = sum(param.numel() for param in module.parameters() if param.dim() >= 2 and id(param) not in tables)
    return Weight(count, 2.0 * matrices, round(sizes.total * trained + sizes.param * (count - trained)), 0)


def _counted(layer: Any, body: Any, inputs: Any, run: Callable[..., Any] | None) -> tuple[Any, float, int]:
    kept: dict[int, torch.Tensor] = {}  # by memory: several operations may keep one tensor, and views of weights are weights
    own = {param.untyped_storage()._cdata for param in body.parameters()} if isinstance(body, nn.Module) else set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()._cdata
        if memory not in own:
            kept.setdefault(memory, tensor)
        return tensor

    counter = FlopCounterMode(display=False)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), counter:
        outputs = run(layer, body, inputs) if run is not None else body(inputs)
    return outputs, float(counter.get_total_flops()), sum(tensor.nbytes for tensor in kept.values())


def _to_meta(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.detach().to("meta").requires_grad_(tree.is_floating_point())
    if isinstance(tree, dict):
        return {key: _to_meta(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_to_meta(value) for value in tree)
    return tree
