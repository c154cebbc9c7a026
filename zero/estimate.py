"""How many bytes the states of a model will take on each rank, before anything is started: arithmetic over layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import nn

from .layout import Layout
from .model import UnitOptions, kept_dtypes, split_kinds
from .pick import pick_sites
from .placement import STAGES, Placement

_HALF_BYTES, _FULL_BYTES = 2, 4
_ADAM_STATES = 2


@dataclass(frozen=True)
class Held:
    """Bytes of one rank: states at rest, and what the largest unit takes more while it is in use (`working`)."""

    parameters: int
    gradients: int
    master: int
    optimizer: int
    working: int

    @property
    def at_rest(self) -> int:
        """Bytes that stay between two uses of a unit."""
        return self.parameters + self.gradients + self.master + self.optimizer


@dataclass(frozen=True)
class UnitSize:
    """What the arithmetic needs to know of a unit."""

    numel: int
    itemsize: int = _HALF_BYTES
    trainable: bool = True


@dataclass(frozen=True)
class Option:
    """One row of a table: where states rest, and whether each process first builds the whole model."""

    text: str
    offload_optimizer: bool
    offload_param: bool = False
    whole_at_start: bool = True


_STAGE_2_OPTIONS = [Option(f"offload_optimizer={'cpu' if offload else 'none'}", offload) for offload in (True, False)]
_STAGE_3_OPTIONS = [
    Option(
        f"offload_param={'cpu' if params else 'none'}, offload_optimizer={'cpu' if states else 'none'}, zero_init={int(init)}",
        states,
        params,
        not init,
    )
    for (params, states), init in product(((True, True), (False, True), (False, False)), (True, False))
]


def unit_sizes(model: nn.Module) -> list[UnitSize]:
    """Return the units that initialize() would make of the model for bf16 or fp16; tied parameters are in one of them, once."""
    kept = kept_dtypes(model, UnitOptions().keep_dtype_of)
    kinds = [split_kinds(site.params, torch.bfloat16, kept) for site in pick_sites(model)]
    return [
        UnitSize(sum(p.numel() for _, p in params), dtype.itemsize, trainable)
        for each in kinds
        for (trainable, dtype), params in each.items()
    ]


def held(units: Sequence[UnitSize], placement: Placement, world: int) -> Held:
    """Return the bytes that each of `world` ranks holds when the units are trained with Adam and fp32 gradients.

    Per element, before sharding: 2 for a parameter, 4 for its gradient, 4 for its master weight, 8 for Adam's two states.
    A parameter that stays fp32 is its own master; a frozen one is nothing but itself. Each unit is padded once, to a
    multiple of the ranks. Adam's step counts are not counted.
    """
    parameters = gradients = master = optimizer = working = 0
    for unit in units:
        layout = Layout.even([("unit", (unit.numel,))], world)
        whole, share = layout.padded, layout.bounds[1]
        parameters += unit.itemsize * (share if placement.parameters.sharded else whole)
        in_use = unit.itemsize * whole if placement.parameters.sharded and world > 1 else 0
        if unit.trainable:
            gradients += _grad_bytes(unit) * (share if placement.gradients.sharded else whole)
            owned = share if placement.optimizer.sharded else whole
            master += _FULL_BYTES * owned if unit.itemsize == _HALF_BYTES else 0
            optimizer += _ADAM_STATES * _grad_bytes(unit) * owned
            in_use += _grad_bytes(unit) * whole if placement.gradients.sharded and world > 1 else 0
        working = max(working, in_use)
    return Held(parameters, gradients, master, optimizer, working)


def _grad_bytes(unit: UnitSize) -> int:
    return max(unit.itemsize, _FULL_BYTES)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print what ZeRO-2 needs to train `model` (also on the meta device) with Adam in bf16 or fp16.

    The formula is that of `held`: per trainable element 2 bytes on every rank, and 4 + 4 + 8 divided by the ranks.
    Tied parameters count once, frozen ones 2 bytes. For the per-CPU column see `host_bytes`.

    Args:
        additional_buffer_factor: what host figures are multiplied by.
    """
    _print_table(2, unit_sizes(model), num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print what ZeRO-2 needs for a model of `total_params` elements, all trained, as if they were one unit."""
    _print_table(2, [UnitSize(total_params)], num_gpus_per_node, num_nodes, additional_buffer_factor, largest=total_params)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print what ZeRO-3 needs to train `model` (also on the meta device) with Adam in bf16 or fp16.

    The formula is that of `held`: per trainable element 2 + 4 + 4 + 8 bytes divided by the ranks, and for the largest unit
    2 + 4 bytes an element while it is in use; with prefetch two units are. Tied parameters count once, frozen ones 2 bytes.
    For the per-CPU column see `host_bytes`.

    Args:
        additional_buffer_factor: what host figures are multiplied by.
    """
    _print_table(3, unit_sizes(model), num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int, largest_layer_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print what ZeRO-3 needs for a model of `total_params` elements, all trained, `largest_layer_params` of them in its largest unit."""
    units = [UnitSize(total_params)]
    _print_table(3, units, num_gpus_per_node, num_nodes, additional_buffer_factor, largest=largest_layer_params)


def device_bytes(option: Option, found: Held) -> int:
    """Return bytes at rest on an accelerator: what is not offloaded."""
    moved = found.gradients + found.master + found.optimizer if option.offload_optimizer else 0
    return found.at_rest - moved - (found.parameters if option.offload_param else 0)


def host_bytes(option: Option, found: Held, numel: int, largest: int, ranks_here: int) -> int:
    """Return bytes on a host: the larger of what its ranks offload and what they hold while the model is built in fp32.

    Each process builds the whole model, or one unit after the other on the meta device and under zero.Init (zero_init=1).
    """
    start = _FULL_BYTES * (numel if option.whole_at_start else largest) * ranks_here
    return max(start, (found.at_rest - device_bytes(option, found)) * ranks_here)


def _print_table(stage: int, units: Sequence[UnitSize], ranks_here: int, nodes: int, factor: float, *, largest: int | None = None) -> None:
    numel = sum(unit.numel for unit in units)
    found = held(units, STAGES[stage], ranks_here * nodes)
    if largest is None:
        largest = max((unit.numel for unit in units), default=0)
    else:
        found = replace(found, working=held([UnitSize(largest)], STAGES[stage], ranks_here * nodes).working)
    print(f"Memory for parameters, gradients and optimizer states, ZeRO-{stage}, bf16 or fp16 with Adam")
    print(f"{nodes} node(s) x {ranks_here} accelerator(s); {numel:,} parameters, {largest:,} in the largest unit")
    print(f"{'per CPU':>12} | {'per GPU':>12} | {'+ unit in use':>13} | options")
    for option in _STAGE_2_OPTIONS if stage == 2 else _STAGE_3_OPTIONS:
        host = factor * host_bytes(option, found, numel, largest, ranks_here)
        print(f"{_size(host):>12} | {_size(device_bytes(option, found)):>12} | {_size(found.working):>13} | {option.text}")


def _size(size: float) -> str:
    unit = "GiB" if size >= 2**27 else "MiB" if size >= 2**17 else "KiB"
    return f"{size / {'GiB': 2**30, 'MiB': 2**20, 'KiB': 2**10}[unit]:.2f} {unit}"
