"""A model as a list of layers, of which each stage builds and runs its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..errors import ConfigError, EngineError
from ..ledger.pipeline import home_of, partition, virtual_stage
from ..parallel.distributed import init_distributed
from .schedules import KINDS, chunks_of
from .schedules import schedule as make_schedule
from .specs import LayerSpec, TiedLayerSpec, name_of, outline
from .ties import Tie
from .topology import Grid, ProcessTopology
from .weigh import Weight, weigh


class PipelineModule(nn.Module):
    """A list of layers, cut into stages. Each layer is called with what the one before it returned.

    Parameters are named by the layer's place in the whole list ("3.weight"), whatever the stages are, as in an
    nn.Sequential of the same layers; tied layers by the place of the first of them. On one stage the module can be called
    like one.

    Args:
        layers: LayerSpec (built only where it is needed), TiedLayerSpec, modules, and functions of one argument.
        num_stages: how many stages; the ranks that are left copy each stage. topology: a grid with an axis "pipe" instead.
        loss_fn: (output of the last layer, labels) -> scalar; None: the last layer's output is the loss.
        seed_layers: seed each layer by itself with base_seed + its place, so that values do not depend on the cut;
            seed_fn(seed) does it instead of torch.manual_seed.
        partition_method: "parameters" (the largest part has as few as any cut allows; the default), "uniform", "type:REGEX"
            (layers whose class matches are shared out), "memory", "flops", or a list of sizes or bounds.
        activation_checkpoint_interval: keep activations only between groups of so many layers; 0: keep all. May be set
            later too. checkpointable_layers: class names of the layers that may be recomputed; None: all with parameters.
        activation_checkpoint_func: (function, *inputs) -> outputs, instead of torch.utils.checkpoint.
        dynamic_shape: the shapes between layers depend on values, not only on the batch's shapes: tell them each time.
        schedule, chunks: what the config will ask for under pipeline.schedule and .chunks, where that places layers
            otherwise than one run of layers a stage; only needed when the optimizer is built before initialize().
        sample: inputs of the first layer for one micro-batch, by which "memory" and "flops" are measured.
        names: of the layers in parameter names, instead of their places.

    Raises:
        ConfigError: fewer layers than stages, ranks that the stages do not divide, or an argument that cannot be honoured.
    """

    holds_blocks = True  # its children are blocks: each is a unit of its own

    def __init__(
        self,
        layers: Sequence[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], None] | None = None,
        base_seed: int = 1234,
        partition_method: str | Sequence[int] = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        *,
        schedule: str = "1f1b",
        chunks: int = 1,
        sample: Any = None,
        names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        if num_stages is None and topology is None:
            raise ConfigError("PipelineModule needs num_stages or topology")
        if not dist.is_initialized():
            init_distributed()
        stages = num_stages if topology is None else topology.get_dim("pipe")
        if topology is not None and num_stages not in (None, stages):
            raise ConfigError(f"num_stages is {num_stages}, the topology has {stages} stages; give one of them")
        self.grid = Grid.over(dist.get_world_size(), int(stages or 1), topology)
        self.num_stages = self.grid.stages
        self.stage_id, self.copy_id = self.grid.at(dist.get_rank())
        self.loss_fn = loss_fn
        self.seed_layers, self.seed_fn, self.base_seed = seed_layers, seed_fn, base_seed
        self.partition_method = partition_method
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers = checkpointable_layers
        self.dynamic_shape = dynamic_shape
        self.layer_specs = tuple(_checked(number, layer) for number, layer in enumerate(layers))  # a tuple: not registered
        self.layer_names = tuple(map(str, range(len(self.layer_specs)))) if names is None else tuple(names)
        self._sample = sample
        self._outlines: tuple[Any, ...] | None = None
        self.bounds: list[int] = []
        self.chunks, self.vee = 1, False
        self.tied_modules: dict[str, nn.Module] = {}  # key -> module, of those on this stage
        self._calls: dict[int, Callable[[Any], Any]] = {}
        self.place(schedule, chunks, partition_method)

    # ---- which layers are where

    def place(self, schedule: str, chunks: int, method: str | Sequence[int] | None = None) -> bool:
        """Cut the list for a schedule and build the layers of this stage that are not there yet; return whether the cut changed.

        Raises:
            ConfigError: fewer layers than parts, or an unknown method or schedule.
        """
        method = self.partition_method if method is None else method
        number, vee = chunks_of(schedule, chunks), KINDS[schedule].vee
        parts = number * self.num_stages
        if len(self.layer_specs) < parts:
            each = f" x {number} chunks" if number > 1 else ""
            raise ConfigError(
                f"{len(self.layer_specs)} layers cannot be cut into {self.num_stages} stages{each}: each needs at least one layer; "
                f"use at most {max(len(self.layer_specs) // number, 1)} stages, or more layers"
            )
        bounds = self._cut(method, parts, schedule, vee)
        if self.bounds == bounds and (self.chunks, self.vee) == (number, vee):
            return False
        self.bounds, self.chunks, self.vee, self.partition_method = bounds, number, vee, method
        self._build()
        return True

    def layers_of(self, part: int) -> range:
        """Return the numbers of the layers of a part."""
        return range(self.bounds[part], self.bounds[part + 1])

    def part(self, chunk: int) -> int:
        """Return which part of the model a chunk of this stage is."""
        return virtual_stage(self.stage_id, chunk, self.num_stages, vee=self.vee)

    @property
    def own_layers(self) -> list[int]:
        """Numbers of the layers on this stage."""
        return [number for chunk in range(self.chunks) for number in self.layers_of(self.part(chunk))]

    def stage_of(self, layer: int) -> int:
        """Return the stage that holds a layer."""
        part = max(at for at in range(len(self.bounds) - 1) if self.bounds[at] <= layer)
        return home_of(part, self.num_stages, vee=self.vee)[0]

    def _cut(self, method: str | Sequence[int], parts: int, schedule: str, vee: bool) -> list[int]:
        count = len(self.layer_specs)
        if not isinstance(method, str):
            return partition.explicit(method, count, parts)
        kind, _, pattern = method.partition(":")
        kind = kind.strip().lower()
        if kind == "uniform":
            return partition.uniform(count, parts)
        if kind == "type":
            return partition.by_type([name_of(layer) for layer in self.layer_specs], pattern, parts)
        if kind in ("parameters", "best"):
            return partition.balanced([weight.parameters for weight in self._weights(None)], parts)
        if kind == "flops":
            return partition.balanced([weight.flops for weight in self._weights(self._sample)], parts)
        if kind == "memory":
            return self._cut_by_memory(parts, schedule)
        raise ConfigError(
            f"partition_method {method!r} is unknown; use parameters, uniform, memory, flops, type:REGEX, or a list of sizes or bounds"
        )

    def _cut_by_memory(self, parts: int, schedule: str) -> list[int]:
        """Balance states plus activations: earlier stages hold those of more micro-batches, as the schedule says."""
        weights = self._weights(self._sample)
        states, kept = _sums([w.state_bytes for w in weights]), _sums([w.activation_bytes for w in weights])
        plan = make_schedule(schedule, self.num_stages, 4 * self.num_stages, parts // self.num_stages)
        held = plan.activations()

        def cost(part: int, start: int, stop: int) -> float:
            at_once = max(held[plan.home(part)] / plan.chunks, 1)
            return float(states[stop] - states[start] + at_once * (kept[stop] - kept[start]))

        return partition.lightest(cost, len(weights), parts)

    def _weights(self, sample: Any) -> list[Weight]:
        if self._outlines is None:
            self._outlines = tuple(outline(layer) for layer in self.layer_specs)
        return weigh(self.layer_specs, self._outlines, sample, _call_outline)

    # ---- building

    def _build(self) -> None:
        known = dict(self.named_children())
        for name in known:
            delattr(self, name)
        self._calls, self.tied_modules = {}, {}
        for number in self.own_layers:
            layer = self.layer_specs[number]
            if isinstance(layer, TiedLayerSpec):
                name = self.name_of_layer(number)
                if layer.key not in self.tied_modules:
                    self.add_module(name, known.get(name) or self._made(number))
                    self.tied_modules[layer.key] = getattr(self, name)
                layer.check(self.tied_modules[layer.key])
                self._calls[number] = _TiedCall(self.tied_modules[layer.key], layer.forward_fn)
            elif isinstance(layer, (LayerSpec, nn.Module)):
                module = known.get(self.layer_names[number]) or self._made(number)
                self.add_module(self.layer_names[number], module)
                self._calls[number] = module
            else:
                self._calls[number] = layer

    def name_of_layer(self, number: int) -> str:
        """Return the name under which a layer's parameters are known on every stage: its own, or that of the first it is tied to."""
        layer = self.layer_specs[number]
        if not isinstance(layer, TiedLayerSpec):
            return self.layer_names[number]
        tied = (at for at, other in enumerate(self.layer_specs) if isinstance(other, TiedLayerSpec) and other.key == layer.key)
        return self.layer_names[next(tied)]

    def _made(self, number: int) -> nn.Module:
        layer = self.layer_specs[number]
        if isinstance(layer, nn.Module):
            return layer
        if self.seed_layers:
            (self.seed_fn or torch.manual_seed)(self.base_seed + number)
        made = layer.build()
        if not isinstance(made, nn.Module):
            raise ConfigError(f"layer {number}: {layer} made a {type(made).__name__}, not a module")
        return made

    def built_layers(self) -> dict[str, nn.Module]:
        """Return the layers on this stage that were built from a description, by name."""
        names = {self.name_of_layer(number) for number in self.own_layers if isinstance(self.layer_specs[number], LayerSpec)}
        return {name: getattr(self, name) for name in sorted(names)}

    def holders(self) -> dict[str, list[int]]:
        """Return layer -> stages that hold it, for layers that are built from a description."""
        found: dict[str, list[int]] = {}
        for number, layer in enumerate(self.layer_specs):
            if isinstance(layer, LayerSpec):
                found.setdefault(self.name_of_layer(number), []).append(self.stage_of(number))
        return found

    # ---- what is shared between stages

    def ties(self) -> list[Tie]:
        """Return the parameters that several stages use, the same list on every stage."""
        homes: dict[str, list[int]] = {}
        keys: dict[str, str] = {}
        for number, layer in enumerate(self.layer_specs):
            if isinstance(layer, TiedLayerSpec):
                name = self.name_of_layer(number)
                homes.setdefault(name, []).append(self.stage_of(number))
                keys[name] = layer.key
        found = []
        for name, stages in homes.items():
            own = self.tied_modules.get(keys[name])
            params = [] if own is None else [(f"{name}.{key}", param) for key, param in own.named_parameters()]
            found.append(Tie(name, tuple(dict.fromkeys(stages)), params))
        return found + self._ties_of_modules()

    def _ties_of_modules(self) -> list[Tie]:
        """Find parameters that given modules of the list share: every rank has these modules."""
        users: dict[int, list[tuple[int, str, nn.Parameter]]] = {}
        for number, layer in enumerate(self.layer_specs):
            if isinstance(layer, nn.Module):
                for name, param in layer.named_parameters():
                    users.setdefault(id(param), []).append((number, f"{self.layer_names[number]}.{name}", param))
        found = []
        for uses in users.values():
            stages = tuple(dict.fromkeys(self.stage_of(number) for number, _, _ in uses))
            if len(stages) > 1:
                _, name, param = uses[0]
                found.append(Tie(name, stages, [(name, param)] if self.stage_id in stages else []))
        return found

    # ---- running

    def run_part(self, chunk: int, payload: Any, inputs: Any) -> Any:
        """Run one chunk of this stage's layers."""
        return self(payload, chunk=chunk)

    def modules_of(self, chunk: int) -> list[nn.Module]:
        """Return the modules that a chunk of this stage runs."""
        calls = [self._calls[number] for number in self.layers_of(self.part(chunk))]
        return [module for call in calls if isinstance(module := getattr(call, "module", call), nn.Module)]

    def forward(self, inputs: Any, *, chunk: int | None = None) -> Any:
        """Run one chunk of this stage, or, where one stage holds everything, the whole model.

        Raises:
            EngineError: the whole model was called, and other stages hold parts of it.
        """
        if chunk is not None:
            return self._run(list(self.layers_of(self.part(chunk))), inputs)
        if self.num_stages > 1:
            raise EngineError(
                f"stage {self.stage_id} of {self.num_stages} holds layers {self.own_layers} only: run the model with engine.train_batch() "
                "or engine.eval_batch()"
            )
        return self._run(list(range(len(self.layer_specs))), inputs)

    def _run(self, numbers: list[int], value: Any) -> Any:
        interval = self.activation_checkpoint_interval
        if not interval or not torch.is_grad_enabled():
            for number in numbers:
                value = self._calls[number](value)
            return value
        for start in range(0, len(numbers), interval):
            group = numbers[start : start + interval]
            if self._may_recompute(group):
                value = self._recomputed(group, value)
            else:
                for number in group:
                    value = self._calls[number](value)
        return value

    def _recomputed(self, group: list[int], value: Any) -> Any:
        def run(*items: Any) -> Any:
            held: Any = items if is_tuple else items[0]
            for number in group:
                held = self._calls[number](held)
            return held

        is_tuple = type(value) is tuple
        items = value if is_tuple else (value,)
        if self.activation_checkpoint_func is not None:
            return self.activation_checkpoint_func(run, *items)
        return checkpoint(run, *items, use_reentrant=False)

    def _may_recompute(self, group: list[int]) -> bool:
        if self.checkpointable_layers is not None:
            return all(name_of(self.layer_specs[number]) in self.checkpointable_layers for number in group)
        modules = [getattr(self._calls[number], "module", self._calls[number]) for number in group]
        return any(isinstance(module, nn.Module) and next(module.parameters(), None) is not None for module in modules)

    def topology(self) -> Grid:
        """Return which ranks are the stages and copies."""
        return self.grid

    def extra_repr(self) -> str:
        """Say which layers are here."""
        return f"stage {self.stage_id} of {self.num_stages}, layers {self.own_layers} of {len(self.layer_specs)}"


class _TiedCall:
    """One occurrence of a tied layer: its shared module, used in this occurrence's way."""

    def __init__(self, module: nn.Module, forward_fn: Callable[[nn.Module, Any], Any] | None) -> None:
        self.module, self._forward_fn = module, forward_fn

    def __call__(self, inputs: Any) -> Any:
        return self.module(inputs) if self._forward_fn is None else self._forward_fn(self.module, inputs)


def _call_outline(layer: Any, module: Any, inputs: Any) -> Any:
    if isinstance(layer, TiedLayerSpec) and layer.forward_fn is not None:
        return layer.forward_fn(module, inputs)
    return module(inputs)


def _checked(number: int, layer: Any) -> Any:
    if isinstance(layer, LayerSpec) or callable(layer):
        return layer
    raise ConfigError(f"layers[{number}] is a {type(layer).__name__}; a layer is a LayerSpec, a TiedLayerSpec, a module or a function")


def _sums(values: Sequence[int]) -> list[int]:
    found = [0]
    for value in values:
        found.append(found[-1] + value)
    return found
