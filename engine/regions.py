"""Recompute and compile, applied to the forward of each unit; the hooks that move parameters stay outside."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..errors import ConfigError
from .host_activations import HostActivations

_ATEN = torch.ops.aten
# what selective recompute keeps: the results that cost most FLOPs per byte
_COSTLY = frozenset(
    op
    for name in (
        "mm",
        "addmm",
        "bmm",
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_cudnn_attention",
    )
    if (op := getattr(getattr(_ATEN, name, None), "default", None)) is not None
)


class Regions:
    """Wraps the forward of chosen modules (an attribute on the instance, taken off again by remove())."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = list(modules)
        self._wrapped: dict[int, tuple[nn.Module, bool, Any]] = {}
        self._in_place: list[tuple[nn.Module, Any]] = []
        self.compiled = False
        self.host: HostActivations | None = None

    def recompute(self, policy: str, every: int, in_host: bool = False) -> None:
        """Recompute every `every`-th module in backward ("full"), or all but its matrix products ("selective").

        With `in_host` their inputs wait in host memory; results that "selective" keeps stay on the device.
        """
        if policy == "none":
            return
        context = partial(create_selective_checkpoint_contexts, _keep_costly) if policy == "selective" else None
        self.host = HostActivations() if in_host else None
        for index, module in enumerate(self.modules):
            if index % every == 0:
                self._wrap(module, partial(_recomputed, context, self.host))

    def compile(self, **options: Any) -> None:
        """Compile the forward of each module with torch.compile(**options); the arguments are torch's.

        Raises:
            ConfigError: torch does not know the backend.
        """
        backend = options.get("backend", "inductor")
        if isinstance(backend, str) and backend not in torch._dynamo.list_backends(exclude_tags=()):
            known = ", ".join(torch._dynamo.list_backends())
            raise ConfigError(f"compile.backend: torch has no backend {backend!r}; known: {known}")
        for module in self.modules:
            self._wrap(module, lambda forward: torch.compile(forward, **options))
        self.compiled = True

    def compile_with(self, compiler: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Compile each module's forward with a compiler taken from a model that was compiled as a whole."""
        for module in self.modules:
            self._wrap(module, compiler)
        self.compiled = True

    def take_in_compiled(self) -> None:
        """Turn modules that the user compiled in place, module.compile(), into modules with a compiled forward.

        What module.compile() traces includes the hooks around the forward, and those that move parameters break the graph.
        """
        for module in self.modules:
            compiled = module._compiled_call_impl
            compiler = compiler_of(compiled)
            if compiler is not None:
                module._compiled_call_impl = None
                self._in_place.append((module, compiled))
                self._wrap(module, compiler)

    def remove(self) -> None:
        """Give every module its own forward back."""
        for module, compiled in self._in_place:
            module._compiled_call_impl = compiled
        self._in_place.clear()
        for module, had_own, original in self._wrapped.values():
            if had_own:
                module.forward = original
            else:
                vars(module).pop("forward", None)
        self._wrapped.clear()

    def _wrap(self, module: nn.Module, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        if id(module) not in self._wrapped:
            self._wrapped[id(module)] = (module, "forward" in vars(module), vars(module).get("forward"))
        module.forward = _Wrapped(module, wrapper(module.forward))


def compiler_of(compiled: Any) -> Any:
    """Return what torch.compile wraps functions with, taken from a function that it has wrapped; None when there is none.

    torch keeps it in a closure only (seen on 2.13). Where it is not found the function is used as it is: more graphs, same numbers.
    """
    names = getattr(getattr(compiled, "__code__", None), "co_freevars", ())
    cells = dict(zip(names, getattr(compiled, "__closure__", None) or (), strict=False))
    found = cells["self"].cell_contents if "self" in cells else None
    return found if callable(found) else None


class _Wrapped:
    """A module's wrapped forward. A deep copy of the module gets its class's own forward: the wrapper is bound to the original."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        self._module = module
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        module = copy.deepcopy(self._module, memo)
        return MethodType(type(module).forward, module)


def _recomputed(context: Any, host: HostActivations | None, forward: Callable[..., Any]) -> Callable[..., Any]:
    extra = {} if context is None else {"context_fn": context}

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with nullcontext() if host is None else host.keeping():
            return checkpoint(forward, *args, use_reentrant=False, **extra, **kwargs)

    return run


def _keep_costly(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _COSTLY else CheckpointPolicy.PREFER_RECOMPUTE
