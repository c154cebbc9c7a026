"""Muon for the matrices of a model and Adam for the rest, as one optimizer.

Not built on torch.optim.Muon, which takes 2-D tensors only, has no Adam half and knows one Newton-Schulz method; for the
`standard` method on a 2-D tensor both make the same update.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import ConfigError, LayoutError
from .adam import adam_update, new_adam_state
from .base import BatchedOptimizer, as_groups, check_hyper_parameters
from .names import check_keywords
from .orthogonal import METHODS, orthogonalize

# Parameters whose names contain one of these are inputs or outputs of the model and get Adam.
NOT_MUON_NAMES = ("embed", "lm_head")
_HALF_DEFAULTS: dict[bool, dict[str, Any]] = {
    True: {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "ns_method": "gram"},
    False: {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0},
}
_COMMON_DEFAULTS = {"adam_w_mode": True, "fp32_optimizer_states": True}
PARAMS = ("lr", "muon_lr", "adam_lr", "momentum", "weight_decay", "betas", "eps", "ns_method", *_COMMON_DEFAULTS)


def check_muon_params(params: Mapping[str, Any]) -> None:
    """Raise ConfigError for unknown names or values in `optimizer.params` of Muon."""
    check_keywords("optimizer.params", params, PARAMS)
    if params.get("ns_method", "gram") not in METHODS:
        raise ConfigError(f"optimizer.params.ns_method: {params['ns_method']!r} is not one of {', '.join(METHODS)}")


def half_settings(params: Mapping[str, Any], use_muon: bool) -> dict[str, Any]:
    """Return the group options of one half: its defaults, under the shared values, under `muon_lr` or `adam_lr`."""
    defaults = _HALF_DEFAULTS[use_muon]
    settings = {key: params.get(key, default) for key, default in defaults.items()}
    own_lr = params.get("muon_lr" if use_muon else "adam_lr")
    return settings if own_lr is None else {**settings, "lr": own_lr}


def uses_muon(name: str, param: Tensor) -> bool:
    """Tell whether a parameter gets Muon: its own `use_muon` if set, else matrices and higher that are no input or output."""
    tag = getattr(param, "use_muon", None)
    if tag is None:
        return param.ndim >= 2 and not any(word in name.lower() for word in NOT_MUON_NAMES)
    if tag and param.ndim < 2:
        raise ConfigError(f"{name}: use_muon is set, but Muon needs a matrix and the parameter has shape {tuple(param.shape)}")
    return bool(tag)


def split_muon_groups(
    named_parameters: Iterable[tuple[str, Tensor]],
    params: Mapping[str, Any],
    groups: Iterable[Any] | None = None,
) -> list[dict[str, Any]]:
    """Split parameters into groups for Muon and for Adam, each with `use_muon` and all its options.

    Args:
        named_parameters: the whole parameters of the model, not shards; those without gradient are left out.
        params: `optimizer.params` of the config.
        groups: parameter groups or parameters of the user; default one group. Options of a group win over the config's.

    Raises ConfigError for unknown options and for parameters of `groups` that are neither named nor tagged.
    """
    check_muon_params(params)
    named = list(named_parameters)
    names = {id(param): name for name, param in named}
    result = []
    for group in as_groups([param for _, param in named] if groups is None else groups):
        halves: dict[bool, list[Tensor]] = {True: [], False: []}
        for param in group["params"]:
            if not param.requires_grad:
                continue
            if id(param) not in names and getattr(param, "use_muon", None) is None:
                raise ConfigError(f"Muon: a parameter of shape {tuple(param.shape)} is not of the model; set its use_muon to True or False")
            halves[uses_muon(names.get(id(param), "parameter"), param)].append(param)
        options = {key: value for key, value in group.items() if key != "params"}
        for use_muon, tensors in halves.items():
            foreign = _HALF_DEFAULTS[not use_muon].keys() - _HALF_DEFAULTS[use_muon].keys()
            own = {key: value for key, value in options.items() if key not in foreign}
            if tensors:
                result.append({**half_settings(params, use_muon), **own, "params": tensors, "use_muon": use_muon})
    return result


class Muon(BatchedOptimizer):
    """Momentum orthogonalized by Newton-Schulz (Jordan et al., 2024) for groups with `use_muon`, Adam for the others.

    A Muon group needs whole matrices at `step`; its state is `momentum_buffer`. An Adam group has `exp_avg`, `exp_avg_sq`
    and `step`, is elementwise and may hold shards. 4-D weights are orthogonalized as (first dim, rest), other leading dims
    are separate matrices; the update is scaled by sqrt(rows / columns) of a matrix where that is above 1.

    Args:
        params: groups, each with `use_muon`; see `split_muon_groups`.
        options: as the config's `optimizer.params`, for what groups leave open.
    """

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        """Raise ConfigError for groups without `use_muon` and for unknown options."""
        check_muon_params(options)
        self._options = options
        super().__init__(as_groups(params), {key: options.get(key, default) for key, default in _COMMON_DEFAULTS.items()})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, filling in what it leaves open."""
        if "use_muon" not in param_group:
            raise ConfigError("Muon: a parameter group lacks use_muon; make the groups with split_muon_groups")
        settings = half_settings(self._options, param_group["use_muon"])
        group = {**settings, **param_group}
        check_hyper_parameters(group["lr"], group.get("betas", (0.0, 0.0)), group["weight_decay"], group.get("eps", 0.0))
        super().add_param_group(group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._options = getattr(self, "_options", {})

    def new_state(self, group: dict[str, Any], param: Tensor) -> dict[str, Any]:
        """Return a zero momentum, or Adam's zero moments."""
        if not group["use_muon"]:
            return new_adam_state(param)
        return {"momentum_buffer": torch.zeros_like(param, memory_format=torch.preserve_format)}

    def update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]) -> None:
        """One step of Muon or Adam in place."""
        if not group["use_muon"]:
            adam_update(group, params, grads, states)
            return
        lr = float(group["lr"])
        for param, grad, state in zip(params, grads, states, strict=True):
            if param.ndim < 2:
                raise LayoutError(f"Muon needs whole matrices, got a tensor of shape {tuple(param.shape)}; a shard must be gathered first")
            direction = muon_direction(grad, state["momentum_buffer"], group["momentum"], group["ns_method"])
            param.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)


def muon_direction(grad: Tensor, momentum_buffer: Tensor, momentum: float, ns_method: str) -> Tensor:
    """Advance `momentum_buffer` in place; return the scaled direction in the shape and dtype of `grad`."""
    momentum_buffer.lerp_(grad, 1 - momentum)
    ahead = grad.lerp(momentum_buffer, momentum)  # Nesterov: as if the next gradient were this one
    matrix = ahead.flatten(1) if ahead.ndim == 4 else ahead
    rows, columns = matrix.shape[-2:]
    scale = math.sqrt(rows / columns) if rows > columns else 1.0
    return orthogonalize(matrix, ns_method).mul_(scale).to(grad.dtype).reshape(grad.shape)
