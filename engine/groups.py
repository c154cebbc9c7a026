"""Parameter groups and the optimizer over them: from the user's instance, a factory, or the config."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from ..zero.model import Precision
from .optimizers import REFUSED, Muon, build_optimizer, is_elementwise, split_muon_groups

_STATES_BY_OPTION = frozenset(("adam", "adamw", "lion"))  # config types that take fp32_optimizer_states
OptimizerLike = torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None


class Prepared:
    """An optimizer over the real parameters, before its tensors are exchanged for shards.

    Attributes:
        inner: the torch optimizer.
        group_of: id(parameter) -> index of its group.
        whole: it must see whole parameters.
    """

    def __init__(self, inner: torch.optim.Optimizer, groups: list[list[nn.Parameter]], whole: bool) -> None:
        self.inner = inner
        self.whole = whole
        self.group_of = {id(param): index for index, group in enumerate(groups) for param in group}


def prepare(
    module: nn.Module,
    optimizer: OptimizerLike,
    model_parameters: Any,
    section: Any,
    precision: Precision,
    *,
    fp32_states: bool = True,
) -> Prepared | None:
    """Return the optimizer that the script passed, or the one that the config names; None when there is neither.

    Raises:
        ConfigError: a parameter of the optimizer is not the model's, is in two groups, or the class is refused.
    """
    names = {id(param): name for name, param in module.named_parameters()}
    if isinstance(optimizer, torch.optim.Optimizer):
        _refuse(type(optimizer).__name__)
        return _existing(optimizer, names)
    groups = _groups(module, model_parameters, names)
    if callable(optimizer):
        plain = len(groups) == 1 and set(groups[0]) == {"params"} and groups[0]["params"]
        made = optimizer([*groups[0]["params"]] if plain else groups)
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(f"optimizer(params) returned {type(made).__name__}, not a torch.optim.Optimizer")
        _refuse(type(made).__name__)
        return _existing(made, names)
    if optimizer is not None:
        raise ConfigError(f"optimizer= takes a torch.optim.Optimizer or a callable(params), got {type(optimizer).__name__}")
    if section is None or section.type is None:
        return None
    return _from_config(groups, [(names[id(p)], p) for p in module.parameters() if p.requires_grad], section, precision, fp32_states)


def _from_config(
    groups: list[dict[str, Any]], named: list[tuple[str, nn.Parameter]], section: Any, precision: Precision, fp32_states: bool
) -> Prepared:
    params = dict(section.params)
    groups = _spare_from_decay(groups, {id(p): name for name, p in named}, section.no_decay)
    if section.type.lower() == "muon":
        groups = split_muon_groups(named, params, groups)
    # parameters that are frozen now belong to their group too: they are trained when they are unfrozen
    everyone = [list(group["params"]) for group in groups]
    groups = [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in groups]
    if not fp32_states and section.type.lower() in _STATES_BY_OPTION:
        params.setdefault("fp32_optimizer_states", False)
    stand_ins = [{**group, "params": [_stand_in(p, precision) for p in group["params"]]} for group in groups]
    inner = build_optimizer(section.type, params, stand_ins)
    return Prepared(inner, everyone, not is_elementwise(inner) or isinstance(inner, Muon))


def _stand_in(param: nn.Parameter, precision: Precision) -> nn.Parameter:
    """Return an empty parameter of the kind that the optimizer will update: it looks at dtype and device only."""
    device = torch.device("cpu") if param.is_meta else param.device
    dtype = precision.compute or param.dtype
    if dtype in (torch.float16, torch.bfloat16) and precision.master is not None:
        dtype = precision.master
    return nn.Parameter(torch.empty(0, dtype=dtype, device=device))


def _existing(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> Prepared:
    seen: set[int] = set()
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in names:
                raise ConfigError(
                    f"the optimizer's group {index} holds a parameter of shape {tuple(param.shape)} that is not the model's; build the "
                    "optimizer from model.parameters() of the model that is passed to initialize"
                )
            if id(param) in seen:
                raise ConfigError(f"parameter {names[id(param)]!r} is in two groups of the optimizer")
            seen.add(id(param))
    return Prepared(optimizer, [list(group["params"]) for group in optimizer.param_groups], not is_elementwise(optimizer))


def _groups(module: nn.Module, model_parameters: Any, names: dict[int, str]) -> list[dict[str, Any]]:
    if model_parameters is None:
        given: list[Any] = [param for param in module.parameters() if param.requires_grad]
    elif isinstance(model_parameters, torch.Tensor):
        given = [model_parameters]
    else:
        given = list(model_parameters)
    if not given or not isinstance(given[0], dict):
        given = [{"params": given}]
    groups, seen = [], set()
    for index, group in enumerate(given):
        if not isinstance(group, dict) or "params" not in group:
            raise ConfigError(f"model_parameters[{index}] must be a dict with 'params', as the first one is")
        params = [_named(item) for item in _as_list(group["params"])]
        for param in params:
            if id(param) not in names:
                raise ConfigError(
                    f"model_parameters group {index} holds a tensor of shape {tuple(param.shape)} that is not a parameter of the model"
                )
            if id(param) in seen:
                raise ConfigError(f"parameter {names[id(param)]!r} is in model_parameters twice")
            seen.add(id(param))
        groups.append({**group, "params": params})
    return groups


def _as_list(params: Any) -> Iterable[Any]:
    return [params] if isinstance(params, torch.Tensor) else params


def _named(item: Any) -> nn.Parameter:
    return item[1] if isinstance(item, tuple) else item


def _spare_from_decay(groups: list[dict[str, Any]], names: dict[int, str], patterns: list[str]) -> list[dict[str, Any]]:
    """Split groups so that parameters whose names match `optimizer.no_decay` get no weight decay."""
    if not patterns:
        return groups
    result = []
    for group in groups:
        spared = [p for p in group["params"] if any(fnmatch.fnmatch(names[id(p)], pattern) for pattern in patterns)]
        chosen = {id(p) for p in spared}
        rest = [p for p in group["params"] if id(p) not in chosen]
        result += [{**group, "params": rest}] if rest else []
        result += [{**group, "params": spared, "weight_decay": 0.0}] if spared else []
    return result


def _refuse(name: str) -> None:
    if name in REFUSED:
        raise ConfigError(f"optimizer {name} cannot be sharded: {REFUSED[name]}")
