"""state_dict() and load_state_dict() of the user's module with sharded units: whole tensors, one unit in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..parallel.collectives import Collectives
from .pick import Site
from .unit import Unit


class StateDictHooks:
    """Hooks that let the module's own state_dict and load_state_dict see whole values.

    Saving gathers each site's units, copies them to host memory and releases them; all ranks must call it, and a rank
    that waits in vain for the others says so instead of hanging. Loading takes over into shards and master weights.
    """

    def __init__(self, module: nn.Module, sites: Sequence[tuple[Site, list[Unit]]], comm: Collectives) -> None:
        self._comm = comm
        self._handles: list[Any] = []
        self._sharded = any(unit.sharded for _, units in sites for unit in units)
        if self._sharded:
            self._handles.append(module.register_state_dict_pre_hook(_only_for(module, self._meet)))
        for site, units in sites:
            for owner in site.modules:
                mine = partial(_only_for, owner)
                if self._sharded:
                    self._handles.append(owner.register_state_dict_pre_hook(mine(self._gather(units))))
                    self._handles.append(owner.register_state_dict_post_hook(mine(self._copy_out(units))))
                self._handles.append(owner.register_load_state_dict_pre_hook(mine(self._gather_to_load(units))))
                self._handles.append(owner.register_load_state_dict_post_hook(mine(self._take_over(units))))

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _meet(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not keep_vars:
            self._comm.meet("state_dict() of a ZeRO-3 model")

    def _gather(self, units: Sequence[Unit]) -> Callable[..., None]:
        def hook(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            if not keep_vars:
                for unit in units:
                    unit.gather()

        return hook

    def _copy_out(self, units: Sequence[Unit]) -> Callable[..., None]:
        def hook(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
            for unit in units:
                if not unit.sharded:
                    continue
                low = unit.full.data_ptr()
                high = low + unit.full.untyped_storage().nbytes()
                for key, value in state_dict.items():
                    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and low <= value.data_ptr() < high:
                        state_dict[key] = value.detach().to("cpu", copy=True)
                unit.release()

        return hook

    def _gather_to_load(self, units: Sequence[Unit]) -> Callable[..., None]:
        def hook(module: nn.Module, *_: Any) -> None:
            for unit in units:
                unit.gather()
                unit.expect_write()

        return hook

    def _take_over(self, units: Sequence[Unit]) -> Callable[..., None]:
        def hook(module: nn.Module, incompatible_keys: Any) -> None:
            for unit in units:
                unit.gather()
                unit.keep()
                unit.release()

        return hook


def _only_for(owner: nn.Module, hook: Callable[..., None]) -> Callable[..., None]:
    """Return the hook without effect on copies of `owner`, which carry it along but have whole parameters of their own."""
    key = id(owner)

    def run(module: nn.Module, *args: Any) -> None:
        if id(module) == key:
            hook(module, *args)

    return run
