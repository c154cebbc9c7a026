"""When sharded units are gathered and released: before and after their forward and their backward, the next one in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn

from ..errors import EngineError
from .backward import in_backward
from .parameter import Slot
from .pick import Site, tensors_in
from .unit import Unit


class Trace:
    """The order in which sites were needed last time, and what comes next in it."""

    def __init__(self) -> None:
        self._last: list[int] = []
        self._now: list[int] = []

    def restart(self, guess: list[int] | None = None) -> None:
        """Make the finished order the one to predict from."""
        if self._now:
            self._last = self._now
        elif guess and not self._last:
            self._last = guess
        self._now = []

    def visit(self, site: int) -> Iterator[int]:
        """Note that `site` is needed now and return the sites expected next, or none when the order has changed."""
        if self._now and self._now[-1] == site:
            return iter(())
        self._now.append(site)
        at, last = len(self._now), self._last
        return map(last.__getitem__, range(at, len(last) if last[at - 1 : at] == [site] else at))

    @property
    def now(self) -> list[int]:
        """Sites needed so far."""
        return self._now


def _taken_after(first_calls: dict[int, int], calls: int) -> list[int]:
    """Take out the sites first called after `calls` and return them in that order; calls count up, so they are the last that came in."""
    taken = []
    while first_calls:
        site, first = first_calls.popitem()
        if first <= calls:
            first_calls[site] = first
            break
        taken.append(site)
    return taken[::-1]


class Gathering:
    """Hooks on an unmodified model that bring sharded units to life while their modules run.

    Owns no values; says which unit is gathered when. The root's units stay from the start of a forward to the end of
    its backward. A unit whose parameters are read outside its own modules (a tied head, a functional call) is gathered
    on that access and from then on kept like the root.

    Autograd runs what was recorded last first. So when the gradient of a site's output arrives, the backward has passed every
    site that was first called after that output was made: nothing saved there is needed any more, and a parameter of it without
    a gradient will get none. All gradients of a unit may be there before that, while the backward still needs its weights.
    """

    def __init__(
        self,
        sites: Sequence[tuple[Site, list[Unit]]],
        ahead_numel: int | None,
        begin_pass: Callable[[], None],
        unit_passed: Callable[[Unit], None],
    ) -> None:
        self._units = [[unit for unit in units if unit.sharded] for _, units in sites]
        self._all = [unit for units in self._units for unit in units]
        self._site_of = {id(unit): index for index, units in enumerate(self._units) for unit in units}
        self._ahead_numel = ahead_numel  # None: one site ahead; 0: none
        self._begin_pass = begin_pass
        self._unit_passed = unit_passed
        self._calls = 0  # calls of sites that autograd recorded
        self._forwards = self._passes = 0
        self._first_call: dict[int, int] = {}  # site -> its first recorded call since the last backward
        self._newest_call: dict[int, int] = {}  # the same since the newest forward began
        self._passed: set[int] = set()  # sites that this backward has passed
        self._left: set[int] = set()  # sites that it has passed in the newest forward; an older one may still need them
        self._forward, self._backward = Trace(), Trace()
        self._depth = 0
        self._purpose = "parameters"
        self._makes_graph = False
        self._kept: set[int] = set()  # ids of units that must stay until the end of the coming backward
        self._inputs_done: set[int] = set()
        self._done_units: set[int] = set()
        self._handles: list[Any] = []
        self._copied: set[int] = set()  # ids of the slots of the copy that is being made
        self._copying: Unit | None = None
        for unit in self._all:
            self._answer_for(unit)
        if self._all:
            for index, (site, _) in enumerate(sites):
                if self._units[index] or index == 0:
                    self._attach(index, site.modules)
            self._attach_doors(sites[0][0].modules[0])
        for unit in self._units[0] if self._units else []:
            unit.pinned = True

    def add_to_root(self, unit: Unit) -> None:
        """Take in a unit whose parameters may be used anywhere: it stays like the root's own."""
        if unit.sharded:
            self._units[0].append(unit)
            self._all.append(unit)
            self._site_of[id(unit)] = 0
            self._answer_for(unit)
            unit.pinned = True

    def replace(self, old: Unit, new: Unit) -> None:
        """Let `new` take the place of `old`, whose parameters it holds."""
        if id(old) not in self._site_of:
            return
        index = self._site_of[id(new)] = self._site_of.pop(id(old))
        for units in (self._units[index], self._all):
            units[:] = [new if unit is old else unit for unit in units]
        self._answer_for(new)

    def _answer_for(self, unit: Unit) -> None:
        unit.access_handler, unit.copy_handler = self._on_access, self._on_copy

    def _attach(self, index: int, modules: Sequence[nn.Module]) -> None:
        for module in modules:
            before, after = self._before(index, id(module)), self._after(index, id(module), module is modules[-1])
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))

    def _attach_doors(self, root: nn.Module) -> None:
        """Let modules that own parameters of the root stand in for it where the root itself is not called.

        The encoder of a model that generates is called by itself; its embedding and last norm are the root's.
        """
        roots = {id(slot.param) for unit in self._units[0] for slot in unit.slots}
        for module in root.modules():
            takes_hooks = module is not root and not isinstance(module, torch.jit.ScriptModule)
            if takes_hooks and any(id(param) in roots for param in module._parameters.values()):
                before, after = self._door(self._before(0, id(module)), self._after(0, id(module), True))
                self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
                self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))

    def _door(self, before: Callable[..., None], after: Callable[..., None]) -> tuple[Callable[..., None], Callable[..., None]]:
        entered = False

        def enter(*args: Any) -> None:
            nonlocal entered
            if self._depth == 0 and not in_backward():
                entered = True
                before(*args)

        def leave(*args: Any) -> None:
            nonlocal entered
            if entered:
                entered = False
                after(*args)

        return enter, leave

    # ---- forward

    def _before(self, index: int, key: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if id(module) != key:  # a copy of the module has our hooks, and whole parameters of its own
                return
            if index == 0 and self._depth == 0 and not in_backward():
                self._forward.restart()
                self._copied, self._copying = set(), None
                self._purpose = "parameters" if torch.is_grad_enabled() else "evaluation"
                if torch.is_grad_enabled():
                    self._forwards += 1
                    self._newest_call.clear()
            self._depth += 1
            self._need(index, self._backward if in_backward() else self._forward)
            if not torch.is_grad_enabled():
                return
            if not in_backward():
                self._calls += 1
                self._first_call.setdefault(index, self._calls)
                self._newest_call.setdefault(index, self._calls)
            elif index not in self._first_call and any(not unit.trainable for unit in self._units[index]):
                self._watch_inputs(index, (args, kwargs))

        return hook

    def _after(self, index: int, key: int, is_last: bool) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if id(module) != key:
                return
            self._depth -= 1
            if in_backward():  # a recomputed forward: its backward follows at once
                return
            seen = has_graph = False
            for tensor in tensors_in(output):
                seen = True
                if torch.is_grad_enabled() and tensor.requires_grad and not tensor.is_leaf:
                    made = (self._passes, self._forwards, self._calls)
                    tensor.register_hook(lambda grad, made=made: self._before_backward(index, *made))
                    has_graph = True
                self._keep_if_view(index, tensor)
            if not seen and torch.is_grad_enabled():
                # An output that cannot be looked into: its backward could come at any time.
                self._kept.update(id(unit) for unit in self._units[index])
            if index == 0 and self._depth == 0:
                self._after_root(expects_backward=has_graph)
            elif is_last:
                self._release(self._units[index])

        return hook

    def _keep_if_view(self, index: int, tensor: torch.Tensor) -> None:
        """Keep a unit whose own memory leaves its module, as a view of a weight does, like the root from now on."""
        if tensor.is_leaf or tensor.layout is not torch.strided or tensor.is_meta:
            return
        for unit in self._units[index]:
            if unit.gathered and tensor.untyped_storage()._cdata == unit.full.untyped_storage()._cdata:
                unit.pinned = True

    def _after_root(self, expects_backward: bool) -> None:
        """Release what prefetch brought and nobody used, and without a backward to come the root's units too."""
        for unit in self._all:
            if not (expects_backward and (unit.pinned or id(unit) in self._kept)):
                unit.release()
        if not expects_backward and not torch.is_grad_enabled():
            self._kept.clear()

    # ---- backward

    def _before_backward(self, index: int, passes: int, forwards: int, calls: int) -> None:
        self._begin_pass()
        if passes == self._passes:
            self._pass_by(calls)
        else:  # a graph that was kept over an earlier backward; what is passed in a newer graph may be needed in this one
            self._passed.discard(index)
        if passes == self._passes and forwards == self._forwards:
            self._leave(calls)
        else:
            self._left.discard(index)
        if torch.is_grad_enabled():
            # create_graph: the graph of this backward will need the weights again, with no hook in front of it
            self._makes_graph = True
            self._kept.update(id(unit) for unit in self._units[index])
        self._purpose = "parameters"
        if not self._backward.now:
            self._backward.restart(list(reversed(self._forward.now)))
        # A tensor that a module hands through from its input gets its gradient when the module is passed.
        if index not in self._passed and index not in self._left:
            self._need(index, self._backward)
        if index == 0:
            for unit in self._all:  # an evaluation between forward and backward may have released them
                if unit.pinned:
                    unit.gather(self._purpose)
        self._inputs_done.discard(index)

    def _pass_by(self, calls: int) -> None:
        """Let go of the sites that were first called after `calls`: this backward has passed them."""
        for site in _taken_after(self._first_call, calls):
            self._passed.add(site)
            for unit in self._units[site]:
                self._unit_passed(unit)
            self._release(self._units[site])

    def _leave(self, calls: int) -> None:
        """Release the sites that the newest forward called after `calls`: a loss may be made of several forwards."""
        for site in _taken_after(self._newest_call, calls):
            self._left.add(site)
            self._release(self._units[site])

    def unit_done(self, unit: Unit) -> None:
        """Release a unit whose last gradient has landed where no output shows when the backward has passed (a recomputed forward)."""
        index = self._site_of.get(id(unit))
        if index is None:
            return
        self._done_units.add(id(unit))
        if index not in self._first_call and index not in self._passed:
            self._release([unit])
            self._release_frozen(index)

    def _watch_inputs(self, index: int, inputs: Any) -> None:
        """Find out when the backward of a recomputed site has passed: all gradients of its inputs are there.

        Frozen units have no gradients of their own to wait for.
        """
        watched = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
        left = len(watched)

        def arrived(grad: torch.Tensor) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self._inputs_done.add(index)
                self._release_frozen(index)

        for tensor in watched:
            tensor.register_hook(arrived)

    def _release_frozen(self, index: int) -> None:
        units = self._units[index]
        if index in self._inputs_done and all(id(unit) in self._done_units for unit in units if unit.trainable):
            self._release([unit for unit in units if not unit.trainable])

    def end_pass(self) -> None:
        """Release everything at the end of a backward, but what a second backward over its graph will need."""
        self._backward.restart()
        makes_graph, self._makes_graph = self._makes_graph, False
        self._passes += 1
        for kept in (self._first_call, self._newest_call, self._passed, self._left, self._done_units):
            kept.clear()
        if makes_graph or self._depth:  # autograd.grad inside a forward: the forward still runs
            return
        self._kept.clear()
        self._inputs_done.clear()
        for unit in self._all:
            unit.release()

    # ---- both

    def _need(self, index: int, trace: Trace) -> None:
        units = self._units[index]
        for unit in units:
            unit.request(self._purpose)
        for unit in units:
            unit.gather()
        coming = trace.visit(index)
        if self._ahead_numel is None:
            for site in islice(coming, 1):
                self._request(site)
            for site in islice(coming, 1):
                self._preload(site)
            return
        budget = self._ahead_numel
        for site in coming:
            budget -= sum(unit.layout.padded for unit in self._units[site])
            if budget < 0:
                return
            self._request(site)

    def _request(self, site: int) -> None:
        if site not in self._passed:
            for unit in self._units[site]:
                unit.request(self._purpose)

    def _preload(self, site: int) -> None:
        """Bring shards from host memory or a drive one step before they are gathered, which waits for them."""
        if site not in self._passed:
            for unit in self._units[site]:
                if unit.comes_from_afar:
                    unit.preload()

    def _release(self, units: Sequence[Unit]) -> None:
        for unit in units:
            if not unit.pinned and id(unit) not in self._kept:
                unit.release()

    def _on_access(self, unit: Unit, slot: Slot) -> None:
        if self._depth == 0 and not in_backward():
            raise EngineError(
                f"parameter {slot.name!r} is sharded over {unit.comm.world} ranks (ZeRO-3) and its values are not here; "
                "read or change it inside `with stateroom.zero.GatheredParameters([param]):` on every rank, "
                "or use engine.module_state_dict() for whole weights"
            )
        unit.gather(self._purpose)
        unit.pinned = True

    def _on_copy(self, unit: Unit, slot: Slot) -> None:
        """Gather for copy.deepcopy of the model, one unit at a time; a rank that copies alone says so instead of hanging."""
        if self._depth or in_backward():
            self._on_access(unit, slot)
            return
        if not self._copied or id(slot) in self._copied:
            unit.comm.meet("copy.deepcopy() of a ZeRO-3 model")
            self._copied = set()
        self._copied.add(id(slot))
        if self._copying is not None and self._copying is not unit:
            self._copying.release()
        self._copying = unit
        unit.gather()

    def remove(self) -> None:
        """Take the hooks off the modules."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
