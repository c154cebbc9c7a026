"""Cuts an ordinary model along its one list of layers, without rewriting it: every stage runs the model's own forward.

A model of this kind does something before its layers (embeddings, masks), passes one value through them, and does something
after (norm, head). A stage runs this same forward. Layers before its own hand on what the stage before it sent; when the
first layer behind its own is called, the forward is left. So whatever else the forward computes for its layers (masks,
rotary tables) is computed on every stage from the batch, and only the value between two layers travels. Modules with
weights that are not here stand in with the shapes of their outputs, found without memory on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError, EngineError
from ..ledger.pipeline import home_of, virtual_stage
from .payload import put_together, take_apart
from .specs import meta_copy
from .ties import Tie
from .topology import Grid


class _Left(BaseException):
    """Leaves the model's forward; no Exception, so that no handler of the model's takes it."""


@dataclass
class _Run:
    """One run of the forward: for layers [start, stop), on what arrived."""

    start: int
    stop: int
    payload: Any
    output: Any = None
    calls: int = 0
    reached: bool = False


@dataclass
class Outside:
    """A module with weights in front of the layers or behind them: its path, its owner and name there."""

    path: str
    owner: nn.Module
    key: str
    is_before: bool

    @property
    def module(self) -> nn.Module:
        """The module itself."""
        return self.owner._modules[self.key]  # type: ignore[return-value]


@dataclass
class Trunk:
    """A model's list of layers, and what stands around it."""

    path: str
    layers: nn.ModuleList
    outside: list[Outside] = field(default_factory=list)


class CutModel:
    """The parts of an ordinary model on this stage.

    Args:
        bounds: of the layers, by part. vee, chunks: how parts lie on stages.
    """

    loss_fn = None
    dynamic_shape = False

    def __init__(
        self, model: nn.Module, trunk: Trunk, bounds: list[int], grid: Grid, stage: int, chunks: int, *, vee: bool, device: torch.device
    ) -> None:
        self.module, self.bounds = model, bounds
        self._stage, self._stages, self._chunks, self._vee = stage, grid.stages, chunks, vee
        self._path, self._count, self._device = trunk.path, len(trunk.layers), device
        self._now: _Run | None = None
        self._own: dict[int, nn.Module] = {}
        self._around: dict[bool, list[nn.Module]] = {True: [], False: []}
        self._shared_names = self._names_of_shared(trunk)
        self._foreign = tuple(self._shared_buffers(trunk)) if stage else ()
        self._take(trunk)

    # ---- which weights are here

    def _part_of(self, layer: int) -> int:
        return max(part for part in range(len(self.bounds) - 1) if self.bounds[part] <= layer)

    def _home(self, part: int) -> int:
        return home_of(part, self._stages, vee=self._vee)[0]

    def _names_of_shared(self, trunk: Trunk) -> list[tuple[str, tuple[int, ...], nn.Parameter]]:
        """Return (first name, stages that use it, parameter) of parameters that several stages use."""
        layer_of = {id(module): number for number, layer in enumerate(trunk.layers) for module in layer.modules()}
        outside_of = {id(module): each.is_before for each in trunk.outside for module in each.module.modules()}
        users: dict[int, tuple[str, dict[int, None], nn.Parameter]] = {}
        last = len(self.bounds) - 2
        for path, module in self.module.named_modules(remove_duplicate=False):
            for key, param in module._parameters.items():
                if param is None:
                    continue
                number = layer_of.get(id(module))
                part = self._part_of(number) if number is not None else 0 if outside_of[id(module)] else last
                users.setdefault(id(param), (f"{path}.{key}", {}, param))[1][self._home(part)] = None
        return [(name, tuple(stages), param) for name, stages, param in users.values() if len(stages) > 1]

    def _shared_buffers(self, trunk: Trunk) -> Iterator[str]:
        """Yield the names of buffers of modules without weights: every stage has these, and the first one saves them."""
        layered = {id(module) for layer in trunk.layers for module in layer.modules()}
        owned = {id(module) for each in trunk.outside for module in each.module.modules()}
        for path, module in self.module.named_modules():
            if id(module) not in layered and id(module) not in owned:
                yield from (f"{path}.{key}" if path else key for key in module._buffers)

    def _take(self, trunk: Trunk) -> None:
        """Leave modules of other stages without weights, and watch the calls of this stage's layers."""
        last = len(self.bounds) - 2
        for number, layer in enumerate(trunk.layers):
            name = f"{trunk.path}.{number}"
            if self._home(self._part_of(number)) == self._stage:
                self._own[number] = layer
                layer.forward = partial(self._layer, number, layer.forward)
            else:
                trunk.layers[number] = Absent(name, meta_copy(layer), partial(self._layer, number, None))
        for each in trunk.outside:
            if self._home(0 if each.is_before else last) == self._stage:
                self._around[each.is_before].append(each.module)
            else:
                body = meta_copy(each.module)
                each.owner._modules[each.key] = Absent(each.path, body, partial(self._stand_in, each.path, body, each.is_before))

    def ties(self) -> list[Tie]:
        """Return the parameters that several stages use, the same list on every stage."""
        found = []
        for name, stages, param in self._shared_names:
            here = any(param is own for own in self.module.parameters())
            found.append(Tie(name, tuple(sorted(stages)), [(name, param)] if here else []))
        return found

    def modules_of(self, chunk: int) -> list[nn.Module]:
        """Return the modules with weights that a chunk of this stage runs."""
        part = virtual_stage(self._stage, chunk, self._stages, vee=self._vee)
        before = self._around[True] if part == 0 else []
        after = self._around[False] if part == len(self.bounds) - 2 else []
        return [*before, *(self._own[number] for number in range(self.bounds[part], self.bounds[part + 1])), *after]

    @property
    def foreign_buffers(self) -> tuple[str, ...]:
        """Names of buffers that are here and that another stage saves."""
        return self._foreign

    # ---- running

    def run_part(self, chunk: int, payload: Any, inputs: Any) -> Any:
        """Run the model's forward for one chunk of layers.

        Raises:
            EngineError: the forward does not pass one value through the layers in order.
        """
        part = virtual_stage(self._stage, chunk, self._stages, vee=self._vee)
        start, stop = self.bounds[part], self.bounds[part + 1]
        args, kwargs = (
            ((), dict(inputs)) if isinstance(inputs, Mapping) else (inputs if isinstance(inputs, (list, tuple)) else (inputs,), {})
        )
        run = self._now = _Run(start, stop, payload)
        result: Any = None
        try:
            result = self.module(*args, **kwargs)
        except _Left:
            pass
        finally:
            self._now = None
        if run.calls != stop - start or (stop < self._count and not run.reached):
            raise EngineError(
                f"the forward of {type(self.module).__name__} called {run.calls} of the layers {start} to {stop - 1} of {self._path}, and "
                "each must be called once and in order to be cut into stages; write the model as a stateroom.pipe.PipelineModule"
            )
        return run.output if stop < self._count else result

    def _layer(self, number: int, forward: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
        """Do what a call of layer `number` means for the part that runs."""
        run = self._now
        if run is None:  # recomputed in a backward
            assert forward is not None
            return forward(*args, **kwargs)
        if number < run.start:
            return run.payload
        if number >= run.stop:
            run.reached = True
            raise _Left
        assert forward is not None
        run.calls += 1
        run.output = forward(*args, **kwargs)
        return run.output

    def _stand_in(self, path: str, body: nn.Module, is_before: bool, *args: Any, **kwargs: Any) -> Any:
        run = self._now
        where = f"{path!r} is on another stage"
        if run is not None and (not is_before or run.calls):
            kind = "in front of" if is_before else "behind"
            raise EngineError(
                f"{where}, since it is registered {kind} {self._path} in the model, but its forward uses it on the other side too; "
                "write the model as a stateroom.pipe.PipelineModule, with a TiedLayerSpec for what is used twice"
            )
        spec, tensors = take_apart((args, kwargs))
        try:
            given, named = put_together(spec, [tensor.detach().to("meta") for tensor in tensors])
            with torch.no_grad():
                shapes, found = take_apart(body(*given, **named))
        except Exception as error:
            raise EngineError(
                f"{where}, and its output's shape cannot be found without its weights: {type(error).__name__}: {error}"
            ) from error
        return put_together(shapes, [torch.zeros(each.shape, dtype=each.dtype, device=self._device) for each in found])


class Absent(nn.Module):
    """Stands where a module of another stage was: has no weights, answers for its attributes, and is called instead."""

    def __init__(self, name: str, body: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["_body"] = body  # not registered: its parameters are not this stage's
        self.__dict__["_call"] = call
        self.__dict__["_name"] = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Do what the cut model does instead."""
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_body"], name)

    def extra_repr(self) -> str:
        """Say what is not here."""
        return f"{self.__dict__['_name']}, on another stage"


# ---- finding the layers


def find_trunk(model: nn.Module, split: str) -> Trunk:
    """Return the list of layers of a model and what stands around it.

    Args:
        split: "auto", or the path of the list.

    Raises:
        ConfigError: there is no such list, or several, or weights that belong to no module before or after it.
    """
    lists = dict(_outermost_lists(model, ""))
    if split != "auto":
        named = dict(model.named_modules()).get(split)
        if not isinstance(named, nn.ModuleList):
            raise ConfigError(f"pipeline.split: {split!r} is no nn.ModuleList of the model; it has {', '.join(lists) or 'none'}")
        lists = {split: named}
    if len(lists) != 1:
        said = f"{len(lists)} lists of layers ({', '.join(lists)})" if lists else "no nn.ModuleList of at least two layers with parameters"
        raise ConfigError(
            f"pipeline.split auto: {type(model).__name__} has {said}; name one by its path, "
            "or write the model as a stateroom.pipe.PipelineModule"
        )
    path, layers = next(iter(lists.items()))
    trunk = Trunk(path, layers)
    _look_around(model, path, trunk)
    return trunk


def _outermost_lists(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.ModuleList]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList) and len(child) > 1 and all(_has_weights(layer) for layer in child):
            yield path, child
        else:
            yield from _outermost_lists(child, f"{path}.")


def _look_around(model: nn.Module, path: str, trunk: Trunk) -> None:
    """Sort the modules with weights outside the list into those in front of it and those behind, in the order of registration."""
    owner, walked = model, ""
    steps = path.split(".")
    for depth, step in enumerate(steps):
        is_before = True  # on every level: what is registered in front of the module that holds the list
        loose = [key for key, param in owner._parameters.items() if param is not None]
        if loose:
            raise ConfigError(
                f"pipeline.split: parameter {walked + loose[0]!r} belongs to no module before or after {path}, so it is not known which "
                "stage uses it; put it into a module of its own, or write the model as a stateroom.pipe.PipelineModule"
            )
        for name, child in list(owner.named_children()):
            if name == step:
                is_before = False
            elif _has_weights(child):
                trunk.outside += _callable_modules(owner, name, child, f"{walked}{name}", is_before)
        owner = owner._modules[step]  # type: ignore[assignment]
        walked = f"{'.'.join(steps[: depth + 1])}."
    trunk.outside.sort(key=lambda each: not each.is_before)


def _callable_modules(owner: nn.Module, key: str, module: nn.Module, path: str, is_before: bool) -> Iterator[Outside]:
    if type(module).forward is not nn.Module.forward:
        yield Outside(path, owner, key, is_before)
        return
    for name, child in module.named_children():  # a container that is never called itself
        if _has_weights(child):
            yield from _callable_modules(module, name, child, f"{path}.{name}", is_before)


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
