"""Each mechanism broken on purpose: then the comparison must fail, or it would show nothing when all is well."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import conform
import pytest
import torch
import torch.distributed as dist
from catalogue import CASES
from ranks import Pool, RankFailure
from torch import nn

STEPS = 4


@contextlib.contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Put make(what is there) in its place, and take it back at the end."""
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def module(path: str) -> Any:
    return importlib.import_module(f"stateroom.{path}")


def untied() -> Any:
    """Before units are picked, give every further use of a parameter a copy of its own."""

    def make(pick: Any) -> Any:
        def run(model: nn.Module, **options: Any) -> Any:
            seen: set[int] = set()
            for part in model.modules():
                for name, param in part._parameters.items():
                    if id(param) in seen:
                        part._parameters[name] = nn.Parameter(param.detach().clone())
                    seen.add(id(param))
            return pick(model, **options)

        return run

    return replaced(module("zero.model"), "pick_sites", make)


@contextlib.contextmanager
def owned_by_the_first_user() -> Iterator[None]:
    """Let a parameter that several units use belong to the first of them, and let nothing be gathered on access."""

    def make(pick: Any) -> Any:
        def run(model: nn.Module, **options: Any) -> Any:
            sites = pick(model, **options)
            for site in sites[1:]:
                inside = {id(p) for part in site.modules for p in part.parameters()}
                moved = [pair for pair in sites[0].params if id(pair[1]) in inside]
                sites[0].params = [pair for pair in sites[0].params if id(pair[1]) not in inside]
                site.params.extend(moved)
            return sites

        return run

    gathering = module("zero.gather").Gathering
    with replaced(module("zero.model"), "pick_sites", make), replaced(gathering, "_on_access", lambda _: lambda self, unit, slot: None):
        yield


def all_used() -> Any:
    """Let every parameter count as used, as if zeros had been its gradient."""
    return replaced(module("zero.optimizer").ShardedOptimizer, "_agree", lambda agree: lambda self: [b"\1" * len(f) for f in agree(self)])


def last_call_counts() -> Any:
    """Note the last call of a module where its first should be noted: so its backward seems over after one of its uses."""

    class Last(dict):
        def setdefault(self, key: int, value: int) -> int:
            self[key] = value
            return value

    def make(init: Any) -> Any:
        def run(self: Any, *args: Any, **options: Any) -> None:
            init(self, *args, **options)
            self._first_call = Last()

        return run

    return replaced(module("zero.gather").Gathering, "__init__", make)


def other_gradient() -> Any:
    """Collect twice what autograd left."""

    def make(accept: Any) -> Any:
        return lambda self, index, factor: accept(self, index, 2 * factor)

    return replaced(module("zero.gradients").Gradients, "accept", make)


def one_rank_alone() -> Any:
    """Do not add the other ranks' gradients."""

    def make(original: Any) -> Any:
        return lambda own, arrived, rank, world: None

    return replaced(module("parallel.transport"), "_sum_in_rank_order", make)


def waits_for_the_last_gradient() -> Any:
    """Hold a unit's reduction back until each of its parameters has a gradient, or until the backward ends."""
    return replaced(module("zero.backward").BackwardPass, "passed", lambda _: lambda self, unit: None)


BREAKS = {each.__name__: each for each in (untied, owned_by_the_first_user, all_used, last_call_counts, other_gradient, one_rank_alone)}
BREAKS["waits_for_the_last_gradient"] = waits_for_the_last_gradient
CONTROLS = [
    ("untied", "TiedEmbedding", 0),
    ("untied", "TiedAcrossUnits", 3),
    ("owned_by_the_first_user", "TiedAcrossUnits", 3),
    ("all_used", "Unused", 0),
    ("all_used", "AlternatingHeads", 3),
    ("last_call_counts", "CalledTwice", 3),
    ("other_gradient", "two losses with a backward each", 1),
    ("one_rank_alone", "Plain", 2),
]


def figures(name: str, stage: int, how: str | None) -> dict[str, Any]:
    """Return how far a run is from plain PyTorch, with a mechanism broken or with all of them well; on rank 0."""
    case = CASES[name]
    wanted = conform.first_rank(lambda: conform.plain(case, None, case.optimizer, STEPS, dist.get_world_size()))
    with BREAKS[how]() if how else contextlib.nullcontext():
        try:
            run = conform.sharded(case, stage, "fp32", case.optimizer, STEPS)
        except (RuntimeError, ValueError) as error:
            return {"raised": f"{type(error).__name__}: {error}"}
    return conform.difference(run, wanted) if wanted is not None else {}


def far(figures: dict[str, Any]) -> bool:
    return "raised" in figures or max(figures["loss"], figures["weights"]) > 1e-5


@pytest.mark.parametrize(("how", "name", "stage"), CONTROLS)
def test_a_broken_mechanism_is_seen(pools, how, name, stage):
    well = pools(2).run(figures, name, stage, None)[0]
    assert not far(well), well
    bad = pools(2).run(figures, name, stage, how)
    if any("raised" in rank for rank in bad):
        pools(2).close()  # a step was left half done
    assert far(bad[0]), bad


@pytest.mark.full
def test_experts_without_tokens_stop_ranks_that_wait_for_every_gradient():
    """The ranks then wait for each other, and the watch ends them: the pool is lost."""
    pool = Pool(2)
    with pytest.raises(RankFailure, match="died"):
        pool.run(figures, "ExpertsInBlocks", 3, "waits_for_the_last_gradient")
    assert not pool.alive


def test_the_measure_sees_a_single_bit():
    """Half a unit in the last place of one weight is a difference, and a name too many is one."""
    run, wanted = conform.Run(losses=[1.0]), conform.Run(losses=[1.0])
    wanted.state = {"w": torch.ones(8)}
    run.state = {"w": torch.ones(8)}
    assert conform.difference(run, wanted)["weights"] == 0.0
    run.state["w"][3] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    assert 0.0 < conform.difference(run, wanted)["weights"] < 2e-7
    run.state["w"][3] = float("nan")
    assert conform.difference(run, wanted)["weights"] == float("inf")
    run.state = {"w": torch.ones(8), "v": torch.ones(1)}
    assert conform.difference(run, wanted)["weights"] == float("inf")
    run.state, run.losses = {"w": torch.ones(8)}, [float("nan")]
    assert conform.difference(run, wanted)["loss"] == float("inf")
