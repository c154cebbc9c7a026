"""Layers that are described first and built later, on the stage that owns them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError


class LayerSpec:
    """A layer to be: its class (or any callable that returns a module) and the arguments."""

    def __init__(self, typename: Callable[..., nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not callable(typename):
            raise ConfigError(f"LayerSpec takes a class or a function that returns a module, got {type(typename).__name__}")
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    @property
    def name(self) -> str:
        """Name of the class."""
        return getattr(self.typename, "__name__", type(self.typename).__name__)

    def build(self, log: bool = False) -> nn.Module:
        """Return a new layer."""
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        given = [*map(repr, self.module_args), *(f"{key}={value!r}" for key, value in self.module_kwargs.items())]
        return f"{type(self).__name__}({', '.join([self.name, *given])})"


class TiedLayerSpec(LayerSpec):
    """A layer that occurs several times in the list: those with the same key share one set of parameters.

    Args:
        forward_fn: called as forward_fn(module, inputs) instead of the module, where this occurrence uses it otherwise.
        tied_weight_attr: names of the parameters for whose sake the layers are tied. All parameters of the layer are
            shared, as they are when one module occurs twice in a plain model.
    """

    def __init__(
        self,
        key: str,
        typename: Callable[..., nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        if not key or "." in key:
            raise ConfigError(f"TiedLayerSpec: the key {key!r} becomes part of parameter names; give a word without dots")
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)

    def check(self, module: nn.Module) -> None:
        """Refuse names in tied_weight_attr that the layer does not have."""
        for attr in self.tied_weight_attr:
            found: Any = module
            for step in attr.split("."):
                found = getattr(found, step, None)
            if not isinstance(found, torch.Tensor):
                raise ConfigError(f"TiedLayerSpec {self.key!r}: {self.name} has no parameter {attr!r}; name it in tied_weight_attr")


def outline(layer: Any) -> nn.Module | None:
    """Return a layer's module without its memory (on the meta device), a given module itself, or None for a plain function.

    A class that cannot be built on the meta device is built for real and dropped by the caller. Random numbers drawn here are
    given back, so that what is built afterwards starts from the same values.
    """
    if isinstance(layer, nn.Module):
        return layer
    if not isinstance(layer, LayerSpec):
        return None
    state = torch.get_rng_state()
    try:
        try:
            with torch.device("meta"):
                return layer.build()
        except (RuntimeError, NotImplementedError, TypeError):
            return layer.build()
    finally:
        torch.set_rng_state(state)


def name_of(layer: Any) -> str:
    """Return what a layer is called for partition_method "type:…": its class, or the function's name."""
    if isinstance(layer, LayerSpec):
        return layer.name
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", type(layer).__name__)


def meta_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a module without memory: each tensor is replaced while it is copied."""
    memo: dict[int, Any] = {id(tensor): _meta_like(tensor) for tensor in [*module.parameters(), *module.buffers()]}
    return copy.deepcopy(module, memo)


def _meta_like(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
