"""A model whose states are placed: units, their gather and backward schedules, built from an unmodified nn.Module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from ..errors import LayoutError
from ..parallel.collectives import Collectives
from ..parallel.host_memory import give_back_freed_memory
from .backward import IN_FLIGHT, BackwardPass
from .gather import Gathering
from .gradients import Gradients
from .grow import Growth
from .intact import Trained
from .layout import Layout, flat_order
from .materialize import Materializer, has_meta, move_buffers
from .pick import Site, pick_sites
from .placement import Placement
from .statedict import StateDictHooks
from .tiers.tiers import Tiers
from .unit import Unit


@dataclass(frozen=True)
class Precision:
    """Dtypes of the states. `compute` None keeps each parameter's own dtype; `master` None means no separate copy."""

    compute: torch.dtype | None = None
    master: torch.dtype | None = torch.float32
    accumulate: torch.dtype = torch.float32
    wire: torch.dtype = torch.float32


@dataclass(frozen=True)
class UnitOptions:
    """How units are picked and how far ahead they are gathered."""

    classes: Sequence[str] = ()
    min_numel: int | None = None
    max_numel: int | None = None
    closed: Sequence[str] = ()
    ahead_numel: int | None = None
    in_flight: int = IN_FLIGHT
    keep_dtype_of: tuple[type, ...] = field(default=(nn.modules.batchnorm._BatchNorm,))
    apart: Mapping[int, str] = field(default_factory=dict)  # id of a parameter -> name of the unit that holds it and its like


@dataclass
class UnitPlan:
    """A unit to be: its parameters in flat order, their layout, and the buffer that will hold them."""

    name: str
    params: list[tuple[str, nn.Parameter]]
    layout: Layout
    dtype: torch.dtype
    trainable: bool
    full: torch.Tensor


class ShardedModel:
    """Places the parameters and gradients of `module` and installs the hooks that move them.

    Args:
        module: any nn.Module, also on the meta device.
        group_of: id(parameter) -> index of its optimizer group; parameters outside it are trained by nobody.
        whole: cut only between parameters, for optimizers that need whole matrices.
        tiers: where states rest that leave the device; None: nothing does.
    """

    def __init__(
        self,
        module: nn.Module,
        group_of: dict[int, int],
        placement: Placement,
        comm: Collectives,
        precision: Precision,
        options: UnitOptions,
        *,
        whole: bool = False,
        tiers: Tiers | None = None,
    ) -> None:
        self.module = module
        self.placement = placement
        self.comm = comm
        self.precision = precision
        self.whole = whole
        self.tiers = tiers
        self.replaced: dict[int, nn.Parameter] = {}
        self.units: list[Unit] = []
        self.group_of = group_of
        _refuse_unplaceable(module, comm.world)
        self._keep_dtype_of, self._apart = options.keep_dtype_of, options.apart
        kept = kept_dtypes(module, options.keep_dtype_of)
        sites = pick_sites(module, classes=options.classes, min_numel=options.min_numel, max_numel=options.max_numel, closed=options.closed)
        self.sites = self._build(sites, kept)
        move_buffers(module.modules(), comm.device)
        for name, buffer in module.named_buffers():
            if buffer.numel():
                comm.broadcast(buffer, state="buffers", unit=name)
        trained = [unit for unit in self.units if unit.trainable]
        if tiers is not None:
            tiers.divide(trained)
        for unit in trained:
            self.give_gradients(unit)
        self.gathering = Gathering(self.sites, options.ahead_numel, self._begin_pass, self._unit_passed)
        self.backward = BackwardPass(self.units, comm, self.gathering.unit_done, self.gathering.end_pass, in_flight=options.in_flight)
        self._state_dict_hooks = StateDictHooks(module, self.sites, comm)
        self.growth = Growth(self)
        self.trained = Trained(module)

    def _begin_pass(self) -> None:
        self.backward.begin()

    def _unit_passed(self, unit: Unit) -> None:
        self.backward.passed(unit)

    # ---- building

    def _build(self, sites: list[Site], kept: set[int]) -> list[tuple[Site, list[Unit]]]:
        materializer = Materializer(self.module, self.comm.device) if has_meta(self.module) else None
        built = []
        for site in sites:
            plans = self._plans_of(site, kept)
            if materializer is not None:
                self._bring(materializer, site, plans)
            units = []
            for plan in plans:
                units.append(self._realize(plan, len(self.units)))
                self.units.append(units[-1])
            built.append((site, units))
        if materializer is not None:
            materializer.bring_buffers()
            self.replaced = materializer.replaced
        return built

    def _plans_of(self, site: Site, kept: set[int]) -> list[UnitPlan]:
        plans = []
        for apart in dict.fromkeys(["", *(self._apart.get(id(param), "") for _, param in site.params)]):
            members = [(name, param) for name, param in site.params if self._apart.get(id(param), "") == apart]
            kinds = split_kinds(members, self.precision.compute, kept)
            for (trainable, dtype), params in kinds.items():
                name = apart or site.name
                if len(kinds) > 1:
                    name += f"[{'' if trainable else 'frozen '}{str(dtype).removeprefix('torch.')}]"
                plans.append(self._plan(name, params, dtype, trainable))
        return plans

    def _bring(self, materializer: Materializer, site: Site, plans: list[UnitPlan]) -> None:
        """Bring a site's meta parameters to life in the very buffers of their units, so that none is in memory twice."""
        homes = {}
        for plan in plans:
            for extent, (_, param) in zip(plan.layout.extents, plan.params, strict=True):
                if param.is_meta and param.dtype == plan.dtype:
                    homes[id(param)] = plan.full[extent.offset : extent.end].view(extent.shape)
        materializer.bring(site, homes)
        for plan in plans:
            for index, (name, old) in enumerate(plan.params):
                new = materializer.replaced.get(id(old), old)
                plan.params[index] = (name, new)
                if id(old) in self.group_of:
                    self.group_of.setdefault(id(new), self.group_of[id(old)])

    def _plan(self, name: str, params: list[tuple[str, nn.Parameter]], dtype: torch.dtype, trainable: bool) -> UnitPlan:
        order = flat_order([p.numel() for _, p in params], [self.group_of.get(id(p), -1) for _, p in params])
        params = [params[i] for i in order]
        cut = Layout.whole if self.whole and trainable else Layout.even
        layout = cut([(n, tuple(p.shape)) for n, p in params], self.comm.world)
        return UnitPlan(name, params, layout, dtype, trainable, torch.zeros(layout.padded, dtype=dtype, device=self.comm.device))

    def _realize(self, plan: UnitPlan, index: int) -> Unit:
        interval = plan.layout.interval(self.comm.rank)
        if plan.trainable and not self.placement.optimizer.sharded:
            interval = (0, plan.layout.padded)
        if self.tiers is not None:
            groups = [self.group_of.get(id(param)) for _, param in plan.params]
            self.tiers.place(index, plan.layout, interval, groups, self.whole)
        unit = Unit(
            plan.name,
            plan.params,
            plan.layout,
            self.comm,
            dtype=plan.dtype,
            sharded=self.placement.parameters.sharded,
            trainable=plan.trainable,
            full=plan.full,
            index=index,
            tiers=self.tiers,
        )
        if unit.trainable:
            unit.master_interval = interval
        unit.release()
        return unit

    def make_unit(self, name: str, params: list[tuple[str, nn.Parameter]], dtype: torch.dtype, *, trainable: bool, index: int) -> Unit:
        """Lay out parameters and move them into a unit, released; every rank must call it."""
        return self._realize(self._plan(name, params, dtype, trainable), index)

    def kinds_of(self, named: list[tuple[str, nn.Parameter]]) -> dict[tuple[bool, torch.dtype], list[tuple[str, nn.Parameter]]]:
        """Split parameters as the units of a site are split."""
        return split_kinds(named, self.precision.compute, kept_dtypes(self.module, self._keep_dtype_of))

    def give_gradients(self, unit: Unit) -> None:
        """Give a trainable unit the buffers that collect its gradients."""
        low_precision = unit.dtype in (torch.float16, torch.bfloat16)
        accumulate = self.precision.accumulate if low_precision else unit.dtype
        unit.gradients = Gradients(
            unit,
            dtype=accumulate,
            wire=self.precision.wire if low_precision or self.precision.wire.itemsize < accumulate.itemsize else accumulate,
            sharded=self.placement.gradients.sharded,
            interval=unit.master_interval,
            home=None if self.tiers is None else self.tiers.gradient_home(unit, accumulate, self.placement.gradients.sharded),
        )

    def give_master(self, unit: Unit) -> None:
        """Give a trainable unit the tensor that the optimizer updates: its own bytes, or a copy in the master dtype."""
        if self.tiers is not None:
            self.tiers.give_master(unit, self.precision.master)
            return
        low, high = unit.master_interval
        own = unit.shard if unit.sharded else unit.full[low:high]
        master = self.precision.master
        needs_copy = master is not None and unit.dtype in (torch.float16, torch.bfloat16) and master != unit.dtype
        unit.master = own.to(master) if needs_copy else own.detach()
        unit.master_is_shard = not needs_copy

    def create_masters(self) -> None:
        """Give every trainable unit its master weights."""
        for unit in self.units:
            if unit.trainable:
                self.give_master(unit)

    def agreed_on(self) -> AbstractContextManager[None]:
        """A context at whose end all ranks hear of one that failed in it: see Tiers."""
        return nullcontext() if self.tiers is None else self.tiers.agreed_on()

    def remove(self) -> None:
        """Take all hooks off; whole parameters become the module's own again, sharded ones lose their values."""
        self._state_dict_hooks.remove()
        self.backward.remove()
        self.gathering.remove()
        for unit in self.units:
            unit.detach()
        if self.tiers is not None:
            self.tiers.close()
        if self.comm.device.type == "cpu":
            give_back_freed_memory()


def kept_dtypes(module: nn.Module, types: tuple[type, ...]) -> set[int]:
    """Return the ids of the parameters whose modules keep their dtype whatever the compute dtype is."""
    return {id(p) for m in module.modules() if isinstance(m, types) for p in m._parameters.values() if p is not None}


def split_kinds(
    named: list[tuple[str, nn.Parameter]], compute: torch.dtype | None, kept: set[int]
) -> dict[tuple[bool, torch.dtype], list[tuple[str, nn.Parameter]]]:
    """Split a site's parameters by trainability and placed dtype; each kind is a unit of its own."""
    kinds: dict[tuple[bool, torch.dtype], list[tuple[str, nn.Parameter]]] = {}
    for name, param in named:
        dtype = param.dtype if compute is None or id(param) in kept or not _castable(param.dtype) else compute
        kinds.setdefault((param.requires_grad, dtype), []).append((name, param))
    return kinds


def _castable(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _refuse_unplaceable(module: nn.Module, ranks: int) -> None:
    for name, param in module.named_parameters():
        if param.is_complex():
            raise LayoutError(f"parameter {name!r} is complex ({param.dtype}); store it as two real parameters")
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise LayoutError(f"parameter {name!r} is not initialised yet (a lazy module): run one forward before initialize()")
    for name, part in module.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None and ranks > 1:
            raise LayoutError(
                f"module {name!r} has max_norm: its forward shortens the rows of this rank's tokens in place, and the ranks' copies "
                "drift apart; leave max_norm out and shorten rows after step(), inside zero.GatheredParameters(weight, modifier_rank=0)"
            )
