"""Build the optimizer that a config names, and tell which optimizers may be given shards of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import ConfigError
from .optim.adam import SwitchedAdam
from .optim.base import HALF_DTYPES, as_groups
from .optim.deepspeed_names import DeepSpeedCPUAdagrad, DeepSpeedCPUAdam, DeepSpeedCPULion, FusedAdam, FusedLion
from .optim.fused import can_fuse
from .optim.lamb import Lamb
from .optim.lion import Lion
from .optim.muon import PARAMS as MUON_PARAMS
from .optim.muon import Muon, check_muon_params, split_muon_groups
from .optim.names import check_keywords, keywords_of, suggestion

__all__ = ["ELEMENTWISE", "REFUSED", "Lamb", "Lion", "Muon", "SwitchedAdam", "build_optimizer", "is_elementwise", "split_muon_groups"]

# Exact classes whose update of an element reads nothing but that element's gradient and states, and scalars of its tensor.
ELEMENTWISE: frozenset[type] = frozenset(
    (
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.SGD,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.ASGD,
        SwitchedAdam,
        Lion,
        FusedAdam,
        DeepSpeedCPUAdam,
        DeepSpeedCPUAdagrad,
        FusedLion,
        DeepSpeedCPULion,
    )
)

_MUP = "needs the mup package, which is not integrated; build the optimizer with mup in your script and pass it as optimizer="
_ONE_BIT = "1-bit optimizers are gone from DeepSpeed too; use Adam or Lamb"
REFUSED: dict[str, str] = {
    "LBFGS": "it calls a closure several times a step and needs all parameters in one flat view",
    "SparseAdam": "it takes sparse gradients only, and gradients are reduced as dense ones here; use Adam",
    "MuAdam": _MUP,
    "MuAdamW": _MUP,
    "MuSGD": _MUP,
    "OneBitAdam": _ONE_BIT,
    "ZeroOneAdam": _ONE_BIT,
    "OneBitLamb": _ONE_BIT,
}


def is_elementwise(optimizer: Optimizer) -> bool:
    """Tell whether the optimizer gives the same result on slices of tensors as on whole ones.

    Up to one rounding: torch's fused CPU kernels round the last elements of a tensor, those beyond a multiple of 16 fp32
    numbers, a little differently. Slices of a multiple of 64 elements, or `fused=False`, are equal bit for bit.
    A subclass is not trusted: its step may read more.
    """
    return type(optimizer) in ELEMENTWISE


def build_optimizer(type_name: str, params: Mapping[str, Any] | None, param_groups: Iterable[Any]) -> Optimizer:
    """Build the optimizer of a config's `optimizer.type` and `optimizer.params` with DeepSpeed's meaning and defaults.

    Args:
        type_name: Adam, AdamW, SGD, Adagrad, Lion, Lamb or Muon in any case, or a class name of torch.optim.
        params: options of the optimizer; lists stand for tuples.
        param_groups: tensors, (name, tensor) pairs or group dicts; for Muon the groups of `split_muon_groups`.

    Raises ConfigError for unknown types and options, with the nearest known one, and for values the class refuses.
    """
    name = _resolve(type_name)
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in (params or {}).items()}
    if "max_grad_norm" in given:
        raise ConfigError("optimizer.params.max_grad_norm: not an option of the optimizer; set gradient_clipping at the top level")
    try:
        return _BUILDERS.get(name, _build_torch)(name, given, as_groups(param_groups))
    except ConfigError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"optimizer {name}: {error}") from error


def _resolve(type_name: str) -> str:
    """Return the canonical name of an optimizer type."""
    torch_names = [n for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, Optimizer) and c is not Optimizer]
    own = {name.lower(): name for name in (*_BUILDERS, "SGD", "Adagrad", *REFUSED)}
    name = own.get(type_name.lower(), type_name)
    if name in REFUSED:
        raise ConfigError(f"optimizer.type: {name}: {REFUSED[name]}")
    if name not in _BUILDERS and name not in torch_names:
        near = suggestion(type_name, [*_BUILDERS, *torch_names])
        raise ConfigError(f"optimizer.type: {type_name!r} is not one of {', '.join(_BUILDERS)} or a class of torch.optim{near}")
    return name


def _tensors(groups: list[dict[str, Any]]) -> list[Tensor]:
    return [item[1] if isinstance(item, tuple) else item for group in groups for item in group["params"]]


def _build_torch(name: str, given: dict[str, Any], groups: list[dict[str, Any]]) -> Optimizer:
    """A class of torch.optim, fused where torch can and the config does not choose an implementation."""
    cls: Callable[..., Optimizer] = getattr(torch.optim, name)
    known, _ = keywords_of(getattr(torch.optim, name))
    check_keywords("optimizer.params", given, known)
    if not given.keys() & {"fused", "foreach", "differentiable"} and can_fuse(name, _tensors(groups)):
        given["fused"] = True
    return cls(groups, **given)


def _build_adam(name: str, given: dict[str, Any], groups: list[dict[str, Any]]) -> Optimizer:
    """Adam or AdamW: torch's class unless an option asks for what torch's classes do not do."""
    adam_w_mode = given.pop("adam_w_mode", True) or name == "AdamW"
    torch_adam = given.pop("torch_adam", False)
    bias_correction = given.pop("bias_correction", True)
    fp32_states = given.pop("fp32_optimizer_states", True)
    given.pop("set_grad_none", None)  # gradients are the engine's
    # DeepSpeed's own Adam decays nothing unless told to; torch's AdamW, which torch_adam asks for, does.
    given.setdefault("weight_decay", 0.01 if torch_adam and adam_w_mode else 0.0)
    torch_only = given.keys() & {"foreach", "capturable", "differentiable"}
    switches = {"adam_w_mode": adam_w_mode, "bias_correction": bias_correction, "fp32_optimizer_states": fp32_states}
    check_keywords("optimizer.params", given, [*keywords_of(torch.optim.AdamW)[0], "torch_adam", *switches])
    half = any(tensor.dtype in HALF_DTYPES for tensor in _tensors(groups))
    if bias_correction and (torch_adam or torch_only or not (half and fp32_states)):
        return _build_torch("AdamW" if adam_w_mode else "Adam", given, groups)
    if torch_only:
        raise ConfigError(f"optimizer.params.{min(torch_only)}: not together with bias_correction false")
    return SwitchedAdam(groups, **given, **switches)


def _build_lion(name: str, given: dict[str, Any], groups: list[dict[str, Any]]) -> Optimizer:
    given.pop("set_grad_none", None)
    check_keywords("optimizer.params", given, keywords_of(Lion)[0])
    return Lion(groups, **given)


def _build_lamb(name: str, given: dict[str, Any], groups: list[dict[str, Any]]) -> Optimizer:
    if given.pop("amsgrad", False):
        raise ConfigError("optimizer.params.amsgrad: Lamb has no AMSGrad variant")
    check_keywords("optimizer.params", given, keywords_of(Lamb)[0])
    return Lamb(groups, **given)


def _build_muon(name: str, given: dict[str, Any], groups: list[dict[str, Any]]) -> Optimizer:
    given.pop("torch_adam", None)  # the Adam half is torch's kernel anyway
    if given.pop("per_head_muon", False):
        raise ConfigError("optimizer.params.per_head_muon: not available; leave it out to orthogonalize whole projections")
    check_muon_params(given)
    return Muon(groups, **{key: given[key] for key in MUON_PARAMS if key in given})


_BUILDERS: dict[str, Callable[[str, dict[str, Any], list[dict[str, Any]]], Optimizer]] = {
    "Adam": _build_adam,
    "AdamW": _build_adam,
    "Lion": _build_lion,
    "Lamb": _build_lamb,
    "Muon": _build_muon,
}
