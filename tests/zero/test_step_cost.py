"""How much a step looks at: counted, so that no cost grows faster than the model or with the number of ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from models import batch, build
from oracle import engine_for
from stateroom.parallel.transport import Native
from stateroom.zero.gather import Trace, _taken_after
from stateroom.zero.intact import Trained
from stateroom.zero.small import SMALL_NUMEL, WAITING_NUMEL, SmallGradients
from torch import nn


class Looked(tuple):
    """Bounds that count how often somebody goes through them."""

    times = 0

    def __iter__(self):
        self.times += 1
        return super().__iter__()


def test_bounds_are_gone_through_once_and_not_in_each_collective(monkeypatch):
    done = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(torch.distributed, "all_gather_single", lambda *args, **kwargs: done, raising=False)
    monkeypatch.setattr(torch.distributed, "all_gather", lambda *args, **kwargs: done)
    transport, flat = Native(None, 0, 8), torch.zeros(16)
    even, uneven = Looked(range(0, 17, 2)), Looked([0, 4, *range(4, 17, 2)])
    for bounds in (even, uneven):
        transport.all_gather(flat, bounds, 0)
    first = [even.times, uneven.times]
    assert first[0] == 1  # uneven ones are cut too, which no cache spares
    for _ in range(5):
        transport.all_gather(flat, even, 0)
    assert even.times == 1
    assert transport._even(uneven) is False and transport._even(even) is True
    assert transport._even(range(0, 17, 2)) is True and transport._even([0, 3, 4]) is False


class Counted(dict):
    """Calls of sites that count how often somebody looks at one."""

    looks = 0

    def items(self):
        self.looks += len(self)
        return super().items()

    def popitem(self):
        self.looks += 1
        return super().popitem()


@pytest.mark.parametrize("sites", [10, 100, 1000])
def test_a_backward_looks_at_each_site_a_fixed_number_of_times(sites):
    calls = Counted({site: site + 1 for site in range(sites)})
    passed = []
    for call in reversed(range(sites + 1)):  # the backward of one output after the other
        passed += _taken_after(calls, call)
    assert passed == list(reversed(range(sites)))
    assert calls.looks <= 2 * sites + 1


def test_sites_passed_together_come_in_the_order_of_their_calls():
    calls = {7: 1, 3: 2, 5: 4, 1: 6}
    assert _taken_after(calls, 2) == [5, 1]
    assert calls == {7: 1, 3: 2}
    assert _taken_after(calls, 2) == []
    assert _taken_after(calls, 0) == [7, 3]


class Order(list):
    """An order that counts how many of its entries were copied."""

    copied = 0

    def __getitem__(self, at):
        found = super().__getitem__(at)
        self.copied += len(found) if isinstance(at, slice) else 1
        return found


@pytest.mark.parametrize("sites", [10, 1000])
def test_prefetch_looks_only_at_the_sites_that_it_asks_for(sites):
    trace = Trace()
    for site in range(sites):
        assert list(trace.visit(site)) == []
    trace.restart()
    trace._last = Order(trace._last)
    nexts = [next(trace.visit(site), None) for site in range(sites)]
    assert nexts == [*range(1, sites), None]
    assert trace._last.copied <= 2 * sites


class Seen(nn.Module):
    """A module that counts walks over its children."""

    walks = 0

    def named_modules(self, *args, **kwargs):
        Seen.walks += 1
        return super().named_modules(*args, **kwargs)


def walked_steps(steps):
    Seen.walks = 0
    model = Seen()
    model.inner = nn.Linear(2, 2)
    trained = Trained(model)
    for param in model.parameters():
        param.stateroom_slot = SimpleNamespace(unit=SimpleNamespace(trainable=True))
    trained.check()
    after_first = Seen.walks
    for _ in range(steps):
        trained.check()
    return after_first, Seen.walks, model, trained


def test_the_module_tree_is_walked_when_it_changed_and_else_not():
    first, later, model, trained = walked_steps(5)
    assert first == later >= 1
    model.inner.extra = nn.Linear(2, 2).requires_grad_(False)
    trained.check()
    assert Seen.walks > later


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m.inner, "more", nn.Parameter(torch.ones(1))),
        lambda m: setattr(m.inner, "weight", nn.Parameter(torch.ones(2, 2))),
        lambda m: m.inner.add_module("deep", nn.Linear(1, 1)),
        lambda m: m.inner._parameters.__setitem__("weight", nn.Parameter(torch.ones(2, 2))),
        lambda m: m.add_module("inner", nn.Linear(2, 2)),
    ],
)
def test_whatever_way_a_parameter_comes_into_the_model_it_is_seen(change):
    _, _, model, trained = walked_steps(1)
    change(model)
    with pytest.raises(Exception, match="was put into the model after initialize"):
        trained.check()


def test_what_was_put_in_frozen_is_seen_when_it_is_unfrozen():
    _, _, model, trained = walked_steps(1)
    model.late = nn.Parameter(torch.ones(1), requires_grad=False)
    trained.check()
    model.late.requires_grad_(True)
    with pytest.raises(Exception, match="'late' was put into the model"):
        trained.check()


# ---- small gradients


def slots_of(*numels):
    ends = torch.tensor([0, *numels]).cumsum(0).tolist()
    return [SimpleNamespace(numel=numel, offset=at, shape=torch.Size([numel])) for numel, at in zip(numels, ends, strict=False)]


def moved_one_by_one(slots, rounds, factor, dtype):
    full, filled = torch.full((sum(s.numel for s in slots),), torch.nan, dtype=dtype), bytearray(len(slots))
    for grads in rounds:
        for index, grad in grads.items():
            view = full[slots[index].offset : slots[index].offset + slots[index].numel]
            if filled[index]:
                view.add_(grad, alpha=factor)
            else:
                view.copy_(grad)
                view.mul_(factor)
            filled[index] = 1
    return full, filled


@pytest.mark.parametrize("factor", [1.0, 0.125, 1 / 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (2, 0), (1,), ()])
def test_small_gradients_move_as_each_would_by_itself(order, dtype, factor):
    slots = slots_of(3, 16, 8, 5)
    rounds = [{i: torch.randn(slots[i].numel, dtype=dtype) for i in some} for some in (order, order[1:], (0, 1, 2, 3))]
    small, full, filled = SmallGradients(slots), torch.full((32,), torch.nan), bytearray(4)
    for grads in rounds:
        assert all(small.take(index, grad) for index, grad in grads.items())
        small.move(full, filled, factor)
        assert not small
    wanted, wanted_filled = moved_one_by_one(slots, rounds, factor, torch.float32)
    assert filled == wanted_filled
    torch.testing.assert_close(full, wanted, rtol=0, atol=1e-7)


def collected_with_two_factors():
    engine = engine_for(nn.Linear(3, 2), 0, lambda params: torch.optim.SGD(params, lr=0.1))
    unit = engine.sharded.units[0]
    for slot, factor in zip(unit.slots, (0.5, 0.25), strict=True):
        slot.param.grad = torch.full(slot.shape, 8.0)
        unit.gradients.accept(slot.index, factor)
    unit.gradients.land()
    found = [unit.gradients.full[slot.offset].item() for slot in unit.slots]
    engine.destroy()
    return found


def test_each_waiting_gradient_keeps_the_factor_it_came_with(pools):
    assert pools(1).run(collected_with_two_factors) == [[4.0, 2.0]]


def test_what_waits_is_bounded_and_only_small_dense_gradients_wait():
    slots = slots_of(*[SMALL_NUMEL] * 20, SMALL_NUMEL + 1, 0)
    small = SmallGradients(slots)
    assert not small.take(20, torch.zeros(SMALL_NUMEL + 1)) and not small.take(21, torch.zeros(0))
    assert not small.take(0, torch.zeros(SMALL_NUMEL).to_sparse())
    waited = 0
    while not small.are_many:
        assert small.take(waited, torch.zeros(SMALL_NUMEL))
        waited += 1
    assert waited * SMALL_NUMEL == WAITING_NUMEL
    assert not small.take(0, torch.zeros(SMALL_NUMEL)) and 0 in small


class Launches(torch.overrides.TorchFunctionMode):
    """Counts the operations that are called by name."""

    def __init__(self, *names):
        super().__init__()
        self.names, self.found = names, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.found += getattr(func, "__name__", "") in self.names
        return func(*args, **(kwargs or {}))


def expansions(stage, steps):
    engine = engine_for(build("gpt"), stage, lambda ps: torch.optim.AdamW(ps, lr=1e-2))
    counts = []
    for step in range(steps):
        with Launches("expand") as launches:
            ids, targets = batch("gpt", step, 0, engine.global_rank)
            engine.backward(engine(ids, targets))
            engine.step()
        counts.append(launches.found)
    slots = sum(map(len, (unit.slots for unit in engine.sharded.units)))
    engine.destroy()
    return counts, slots


def test_released_parameters_get_their_stand_ins_once(pools):
    for counts, slots in pools(2).run(expansions, 3, 4):
        assert slots > 10
        assert max(counts[1:]) <= slots / 2, counts  # the model's own; hiding twice a step would be two for each parameter
