"""The optimizer section: which optimizer, its parameters, and which weights are spared from decay."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict

from .fields import HONOURED, Bool, Float, Section, Str, as_float, key, no_effect


def _betas(value: Any) -> list[float]:
    if not isinstance(value, (list, tuple)) or len(value) < 2:
        raise ValueError("expected a list of at least two numbers")
    return [as_float(item) for item in value]


class OptimizerParams(Section):
    """Types of the parameters that several optimizers share; others pass as they are."""

    model_config = ConfigDict(extra="allow")

    lr: Float | None = key(None, "Learning rate; absent means the optimizer's own default.", ge=0)
    betas: Annotated[list[float], BeforeValidator(_betas)] | None = key(None, "Decay rates of the running averages.")
    eps: Float | None = key(None, "Added to the denominator.", ge=0)
    weight_decay: Float | None = key(None, "Weight decay; decoupled from the gradient unless adam_w_mode is false.", ge=0)
    momentum: Float | None = key(None, "Momentum of SGD, Muon and their kin.", ge=0)
    bias_correction: Bool = key(True, "Correct the bias of the running averages in the first steps.")
    amsgrad: Bool = key(False, "Keep the largest second moment seen.")
    torch_adam: Bool = key(False, "Use torch's Adam or AdamW as it is.")
    adam_w_mode: Bool = key(True, 'Decoupled weight decay, which "Adam" means too unless this is false.')
    fp32_optimizer_states: Bool = key(True, "Keep the moments in fp32.")
    muon_lr: Float | None = key(None, "Learning rate of the matrices under Muon.", ge=0)
    adam_lr: Float | None = key(None, "Learning rate of everything else under Muon.", ge=0)
    ns_method: Str | None = key(None, "How Muon orthogonalises.")
    per_head_muon: Bool = key(False, "Orthogonalise each attention head by itself.")


class Optimizer(Section):
    """Which optimizer is built when the script passes none."""

    type: Str | None = key(None, "Adam, AdamW, Adagrad, Lamb, Lion, Muon, SGD, or the name of a class in torch.optim.", effect=HONOURED)
    params: dict[str, Any] = key({}, "Arguments of the optimizer: lr, betas, eps, weight_decay and so on.", effect=HONOURED)
    no_decay: list[Str] = key([], "Patterns of parameter names that get no weight decay, such as *.bias.", effect=HONOURED)
    legacy_fusion: Bool = key(False, "Older flattening of fused Lamb.", effect=no_effect("parameters always live in flat unit buffers"))


_COMMON = {"lr", "weight_decay", "foreach", "maximize", "capturable", "differentiable", "fused", "set_grad_none"}
_ADAM = _COMMON | {
    "betas",
    "eps",
    "amsgrad",
    "bias_correction",
    "adam_w_mode",
    "adamw_mode",
    "torch_adam",
    "fp32_optimizer_states",
    "decoupled_weight_decay",
}
# What the well-known optimizers take; a type that is not here is the engine's to look up, with whatever it takes.
KNOWN_PARAMS: dict[str, frozenset[str]] = {
    "adam": frozenset(_ADAM),
    "adamw": frozenset(_ADAM),
    "adagrad": frozenset(_COMMON | {"eps", "lr_decay", "initial_accumulator_value"}),
    "lamb": frozenset(_COMMON | {"betas", "eps", "amsgrad", "bias_correction", "max_coeff", "min_coeff", "eps_inside_sqrt"}),
    "lion": frozenset(_COMMON | {"betas", "fp32_optimizer_states"}),
    "muon": frozenset(
        _COMMON
        | {"muon_lr", "adam_lr", "momentum", "betas", "eps", "ns_method", "per_head_muon", "nesterov", "ns_steps"}
        | {"ns_coefficients", "adjust_lr_fn"}
    ),
    "sgd": frozenset(_COMMON | {"momentum", "dampening", "nesterov"}),
}

# type in lower case -> what to use instead
DEAD_OPTIMIZERS = {
    "onebitadam": "AdamW",
    "zerooneadam": "AdamW",
    "onebitlamb": "Lamb",
}
