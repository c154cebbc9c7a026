"""The base of the optimizers that are written here: which tensors are updated together, and in which precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

HALF_DTYPES = frozenset((torch.float16, torch.bfloat16))


def check_hyper_parameters(lr: float, betas: tuple[float, float], weight_decay: float, eps: float = 0.0) -> None:
    """Raise ValueError for values that no optimizer here can mean."""
    if lr < 0 or weight_decay < 0 or eps < 0:
        raise ValueError(f"lr, weight_decay and eps must not be negative, got {lr}, {weight_decay} and {eps}")
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas}")


class BatchedOptimizer(torch.optim.Optimizer):
    """An optimizer whose subclass updates a list of tensors of one device and dtype at a time.

    With the group option `fp32_optimizer_states` 16-bit parameters are updated in fp32: their states are fp32, and the
    parameter is rounded once at the end of the step.
    """

    def update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]) -> None:
        """Update `params` and `states` in place; params, grads and floating states share one dtype."""
        raise NotImplementedError

    def new_state(self, group: dict[str, Any], param: Tensor) -> dict[str, Any]:
        """Return the state of a parameter before its first update; `param` has the dtype that the update works in."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; return the closure's loss if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for params in self._batches(group):
                self._update_in_work_dtype(group, params)
        return loss

    def _batches(self, group: dict[str, Any]) -> Iterator[list[Tensor]]:
        """Parameters that are updated together: all of one kind on a device, where launches cost, else one at a time."""
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for param in group["params"]:
            if param.grad is None:
                continue
            if param.grad.is_sparse:
                raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")
            # Converted copies and, on the CPU, temporaries of a whole group would not stay in any cache.
            if param.device.type == "cpu" or _work_dtype(group, param) != param.dtype:
                yield [param]
            else:
                by_kind.setdefault((param.device, param.dtype), []).append(param)
        yield from by_kind.values()

    def _update_in_work_dtype(self, group: dict[str, Any], params: list[Tensor]) -> None:
        dtype = _work_dtype(group, params[0])
        work = [param.detach().to(dtype) for param in params]
        for param, converted in zip(params, work, strict=True):
            if not self.state[param]:
                self.state[param].update(self.new_state(group, converted))
        grads = [param.grad.to(dtype) for param in params if param.grad is not None]
        self.update(group, work, grads, [self.state[param] for param in params])
        if dtype != params[0].dtype:
            for param, converted in zip(params, work, strict=True):
                param.copy_(converted)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # groups saved by another optimizer lack our options
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, but keep fp32 states of 16-bit parameters in fp32."""
        super().load_state_dict(state_dict)
        saved_ids = [index for group in state_dict["param_groups"] for index in group["params"]]
        own = [(group, param) for group in self.param_groups for param in group["params"]]
        for saved_id, (group, param) in zip(saved_ids, own, strict=True):
            dtype = _work_dtype(group, param)
            if dtype == param.dtype:
                continue
            for key, value in state_dict["state"].get(saved_id, {}).items():
                if key != "step" and isinstance(value, Tensor) and value.is_floating_point():
                    self.state[param][key] = value.to(device=param.device, dtype=dtype, copy=True)


def _work_dtype(group: dict[str, Any], param: Tensor) -> torch.dtype:
    return torch.float32 if group["fp32_optimizer_states"] and param.dtype in HALF_DTYPES else param.dtype


def new_step() -> Tensor:
    """Return a step counter in the form torch's optimizers use: a float32 scalar in host memory."""
    return torch.zeros((), dtype=torch.float32)


def as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Return parameter groups from what torch optimizers accept: tensors, (name, tensor) pairs, or groups."""
    items = list(params)
    if items and not isinstance(items[0], dict):
        return [{"params": items}]
    return [{**group, "params": [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])} for group in items]
