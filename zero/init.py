"""`zero.Init`: parameters are sharded as their modules are built, so that no rank ever holds the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook

from ..errors import EngineError
from ..parallel import Collectives, init_distributed, local_device
from .layout import Layout
from .parameter import Slot, slot_of
from .unit import Unit

_OPEN_AT_ONCE = 8  # parameters that stay whole while their module is still being initialised


class Init:
    """A context in which each module's parameters are sharded as soon as the module is attached to its parent.

    Built on torch's registration hooks, which are taken off at the end. An initialiser that touches a sharded parameter
    later (`self.apply(init)`, `nn.init.normal_(self.head.weight)`) gets it whole; what rank 0 wrote is kept. So does code
    that touches it after the context and before an engine takes the model over, if all ranks run it; `state_dict()` then
    lists sharded parameters as meta tensors, so that loaders may look and nothing is gathered.

    Args:
        module: shard the parameters of an existing module instead.
        config_dict_or_path: a config; its precision block gives the dtype. `config` is an alias.
        dtype: dtype of floating-point parameters; buffers keep theirs.
        enabled: False makes the context do nothing.
        remote_device, pin_memory: accepted; shards rest on the compute device.
        mem_efficient_linear, mpu: accepted; saved weights are views already, and all ranks of the group share a parameter.

    Raises:
        EngineError: an argument asks for what this version does not do (quantized weights, other groups).
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        **unsupported: Any,
    ) -> None:
        asked = sorted(name for name, value in unsupported.items() if value not in (None, False))
        if asked:
            raise EngineError(f"zero.Init: {', '.join(asked)} is not supported in this version; leave it out")
        self._enabled = enabled
        self._comm: Collectives | None = None
        self._dtype = dtype or _dtype_of(config_dict_or_path if config_dict_or_path is not None else config)
        self._group = data_parallel_group
        self._handles: list[Any] = []
        self._built: list[nn.Module] = []
        self._keeper = _Keeper()
        if module is not None and enabled:
            self._start()
            self._shard(module)
            self._finish(module.modules())

    def __enter__(self) -> Init:
        if self._enabled:
            self._start()
            self._handles = [
                register_module_parameter_registration_hook(self._on_parameter),
                register_module_module_registration_hook(self._on_module),
            ]
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._enabled and exc[0] is None:
            for module in self._built:
                self._shard(module, recurse=False)
            self._finish(self._built)
        self._built = []

    def _start(self) -> None:
        init_distributed()
        self._comm = Collectives(self._group, local_device())

    def _finish(self, modules: Iterable[nn.Module]) -> None:
        self._keeper.settle(0)
        self._keeper.inside = False
        self._comm = None
        for module in {id(module): module for module in modules}.values():
            module.register_state_dict_pre_hook(_start_listing)
            module.register_state_dict_post_hook(_list_as_meta)

    def _on_parameter(self, module: nn.Module, name: str, param: Any) -> None:
        if not self._built or self._built[-1] is not module:
            self._built.append(module)

    def _on_module(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None:
            self._shard(child)

    def _shard(self, module: nn.Module, recurse: bool = True) -> None:
        for name, param in module.named_parameters(recurse=recurse):
            if slot_of(param) is None and not param.is_meta:
                self._shard_one(name, param)

    def _shard_one(self, name: str, param: nn.Parameter) -> None:
        assert self._comm is not None
        dtype = self._dtype if self._dtype is not None and param.dtype.is_floating_point else param.dtype
        layout = Layout.even([(name, tuple(param.shape))], self._comm.world)
        unit = Unit(name, [(name, param)], layout, self._comm, dtype=dtype, sharded=True)
        unit.access_handler = self._keeper.on_access
        unit.release()


class _Keeper:
    """Answers for parameters that rest as shards without an engine: brings their values when they are touched, keeps rank 0's.

    Inside the context initialisers touch them, afterwards libraries that finish the model (peft copies a head, transformers
    pads a bias). All ranks must touch the same ones; outside the context a rank that does it alone is told so.
    """

    def __init__(self) -> None:
        self.inside = True  # the context is still open, and every rank runs the same constructors
        self.listing = False  # state_dict() passes by and wants no values
        self._open: list[Unit] = []

    def on_access(self, unit: Unit, slot: Slot) -> None:
        """Gather the parameter; the oldest of several that are whole rests again."""
        if self.listing:
            return
        if not self.inside:
            unit.comm.meet(f"the use of parameter {slot.name!r}, sharded by zero.Init, before an engine has it")
        unit.gather()
        self._open.append(unit)
        self.settle(_OPEN_AT_ONCE)

    def settle(self, allowed: int) -> None:
        """Shard again what was opened, keeping rank 0's values, until `allowed` are open."""
        while len(self._open) > allowed:
            unit = self._open.pop(0)
            if unit.gathered and all(slot_of(slot.param) is slot for slot in unit.slots):  # else an engine has it now
                unit.comm.broadcast(unit.full, state="parameters", unit=unit.name)
                unit.keep()
                unit.release()


def _start_listing(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    for _, keeper in _resting(module):
        keeper.listing = not keep_vars


def _list_as_meta(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for name, keeper in _resting(module):
        if keeper.listing:
            keeper.listing = False
        param = module._parameters[name]
        if state_dict[prefix + name] is not param:  # keep_vars asks for the parameters themselves
            state_dict[prefix + name] = torch.empty(param.shape, dtype=param.dtype, device="meta")  # type: ignore[union-attr]


def _resting(module: nn.Module) -> list[tuple[str, _Keeper]]:
    """Return name and keeper of the module's own parameters that are sharded now and that no engine has taken over."""
    slots = {name: slot_of(param) for name, param in module._parameters.items() if param is not None}
    keepers = {name: getattr(slot.unit.access_handler, "__self__", None) for name, slot in slots.items() if slot and not slot.unit.gathered}
    return [(name, keeper) for name, keeper in keepers.items() if isinstance(keeper, _Keeper)]


def _dtype_of(config: Any) -> torch.dtype | None:
    if config is None:
        return None
    if not isinstance(config, Mapping):
        from ..config_schemas import load

        config = load(config).to_dict()

    def on(name: str) -> bool:
        return (config.get(name) or {}).get("enabled") is True

    if on("bf16") or on("bfloat16"):
        return torch.bfloat16
    return torch.float16 if on("fp16") else None
