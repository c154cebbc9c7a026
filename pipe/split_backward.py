"""A backward in two halves, one for inputs and one for weights, by torch's own functions of private names (seen on torch 2.13).

What they do not do by themselves, and is done here: outputs that are views of something cannot be detached in place, and the
weights' gradients are left on the weights without running the hooks that collect them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def presentable(output: torch.Tensor) -> torch.Tensor:
    """Return an output that can be let go of in place after the first half: a copy where it is a view or needed elsewhere."""
    return output.clone() if output._is_view() or output.grad_fn is None else output


def backward_for_inputs(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor] | None,
    inputs: Sequence[torch.Tensor],
    weights: Sequence[nn.Parameter],
) -> list[Any]:
    """Put gradients on the inputs, and return what `backward_for_weights` needs for the rest.

    Args:
        outputs: what `presentable` returned; detached afterwards. gradients: theirs, or None for a loss.
    """
    from torch.distributed.pipelining._backward import stage_backward_input  # costs seconds: only where it is needed

    cause: BaseException | None = None
    try:
        return stage_backward_input(list(outputs), None if gradients is None else list(gradients), list(inputs), iter(weights))[1]
    except RuntimeError as error:  # torch wraps whatever a layer raises, with all values in the message
        cause = error.__cause__ or error
    raise cause


def backward_for_weights(weights: Sequence[nn.Parameter], groups: list[Any]) -> None:
    """Leave gradients on the weights."""
    from torch.distributed.pipelining._backward import stage_backward_weight

    stage_backward_weight(iter(weights), groups)
