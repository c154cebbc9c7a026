"""Bring meta-device parameters and buffers to life, one site at a time, through the modules' own initialisers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from ..errors import EngineError
from .pick import Site


def has_meta(model: nn.Module) -> bool:
    """Return whether any parameter or buffer is still on the meta device."""
    return any(t.is_meta for t in [*model.parameters(), *model.buffers()])


class Materializer:
    """Replaces meta parameters by real ones and runs `reset_parameters()` (or the model's `_init_weights`) on their modules.

    Attributes:
        replaced: id of a meta parameter -> the parameter that took its place, for optimizers that were given the former.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self.replaced: dict[int, nn.Parameter] = {}
        self._users: dict[int, list[tuple[str, nn.Module, str]]] = {}
        self._keep: list[nn.Parameter] = []  # ids stay unique while their owners live
        for path, module in model.named_modules():
            for key, param in module._parameters.items():
                if param is not None and param.is_meta:
                    self._users.setdefault(id(param), []).append((path, module, key))
                    self._keep.append(param)

    def bring(self, site: Site, homes: Mapping[int, torch.Tensor]) -> None:
        """Give the site's meta parameters, and the buffers of the modules that own them, real values on the device.

        Args:
            homes: id of a meta parameter -> the memory, of its shape and dtype, that it is to use.

        Raises:
            EngineError: a module has no way to initialise itself; names it.
        """
        owners: dict[int, tuple[str, nn.Module]] = {}
        for index, (name, param) in enumerate(site.params):
            if not param.is_meta:
                continue
            fresh = nn.Parameter(torch.empty(0, dtype=param.dtype, device=self._device), requires_grad=param.requires_grad)
            home = homes.get(id(param))
            # .data keeps the parameter's own version counter, apart from that of the buffer around it
            fresh.data = torch.empty_like(param, device=self._device) if home is None else home
            self.replaced[id(param)] = fresh
            for path, module, key in self._users[id(param)]:
                module._parameters[key] = fresh
                owners[id(module)] = (path, module)
            site.params[index] = (name, fresh)
        for path, module in owners.values():
            self._fresh_buffers(module)
            self._initialise(path, module)

    def bring_buffers(self) -> None:
        """Give values to meta buffers of modules without parameters of their own."""
        for path, module in self._model.named_modules():
            if any(b is not None and b.is_meta for b in module._buffers.values()):
                self._fresh_buffers(module)
                self._initialise(path, module)

    def _fresh_buffers(self, module: nn.Module) -> None:
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device=self._device)

    def _initialise(self, path: str, module: nn.Module) -> None:
        own = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        with torch.no_grad():
            if callable(own):
                own()
            elif callable(getattr(self._model, "_init_weights", None)):
                self._model._init_weights(module)  # type: ignore[operator]
            else:
                raise EngineError(
                    f"module {path!r} ({type(module).__name__}) is on the meta device and has no reset_parameters(), so its weights and "
                    "buffers have no initial values; give it one, or build the model inside `with stateroom.zero.Init():`"
                )


def move_buffers(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Move buffers to the device, keeping their dtype."""
    for module in modules:
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                module._buffers[key] = buffer.to(device)
