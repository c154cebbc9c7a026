"""Small DeepSpeed functions that Hugging Face's libraries call and that nothing else in this package needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..environment import inherited, read_launch
from ..errors import RankError
from ..parallel import init_distributed as _init_distributed
from ..zero.parameter import slot_of

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"  # the file into which accelerate writes variables for other hosts


def init_distributed(dist_backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """stateroom.init_distributed(), the way accelerate calls it.

    Raises:
        RankError: accelerate (seen with 1.15) found no accelerator and names no backend. It would go on as if it were
            alone, and every rank would train on all of the data.
    """
    launch = read_launch()
    alone = dist_backend is None and not torch.accelerator.is_available() and inherited().get("ACCELERATE_USE_DEEPSPEED") == "true"
    if alone and launch is not None and launch.world_size > 1:
        raise RankError(
            f"{launch.world_size} ranks were started on hosts without an accelerator, but accelerate would count one of each: give "
            'TrainingArguments use_cpu=True, or Accelerator kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")], or start an '
            "unchanged script with `python -m stateroom.hf accelerate launch`"
        )
    _init_distributed(dist_backend, *args, **kwargs)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return `item` with every tensor in it (in dicts, lists and tuples) copied to `device`, without the buffer behind it.

    A view of a flat buffer would otherwise be saved with the whole buffer.
    """
    if isinstance(item, torch.Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, dict):
        return type(item)((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    return item


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], target_fp_dtype: Any = None, *_: Any, **__: Any) -> Callable[..., Any]:
    """Return `fn` itself: zero.Init here leaves torch's constructors alone, so there is nothing to wrap or to exempt."""
    return fn


def is_zero_param(parameter: Any) -> bool:
    """Return whether a parameter is sharded over ranks."""
    slot = slot_of(parameter) if isinstance(parameter, torch.Tensor) else None
    return slot is not None and slot.unit.sharded
