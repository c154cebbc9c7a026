"""What scripts ask a pipelined engine besides its step: groups of ranks, whole weights, single parameters, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pipe_jobs as jobs
import pytest
import stateroom
import torch
import torch.distributed as dist
from stateroom.errors import EngineError
from stateroom.pipe import PipelineModule
from stateroom.utils import groups
from torch import nn

full = pytest.mark.full


def make(count: int, stages: int, specs: Any = None, **more: Any) -> Any:
    net = PipelineModule(specs or jobs.layers(), num_stages=stages, loss_fn=jobs.loss_fn, seed_layers=True)
    return stateroom.initialize(model=net, config=jobs.config(count, stages, **more))[0]


# ---- groups


def asked() -> dict[str, Any]:
    """Return every answer of stateroom.utils.groups, with what a sum over each group comes to."""
    rank = torch.tensor([float(dist.get_rank())])
    data = rank.clone()
    dist.all_reduce(data, group=groups.get_data_parallel_group())
    found = {
        "data": (groups.get_data_parallel_rank(), groups.get_data_parallel_world_size(), groups._get_data_parallel_group_ranks()),
        "data sum": float(data),
        "private": (groups._get_data_parallel_rank(), groups._get_data_parallel_world_size(), groups._get_broadcast_src_rank()),
        "model": (groups.get_model_parallel_rank(), groups.get_model_parallel_world_size(), groups._get_model_parallel_world_size()),
        "pipe": (groups.get_pipe_parallel_rank(), groups.get_pipe_parallel_world_size()),
        "tensor": (groups.get_tensor_model_parallel_rank(), groups.get_tensor_model_parallel_world_size()),
        "source": groups.get_tensor_model_parallel_src_rank(),
    }
    if hasattr(groups, "get_model_parallel_group"):
        chain = rank.clone()
        dist.all_reduce(chain, group=groups.get_model_parallel_group())
        found["model sum"] = float(chain)
        found["model order"] = dist.get_rank(groups.get_pipe_parallel_group())
    return found


def groups_over_time(stages: int) -> dict[str, Any]:
    """Ask before there is an engine, with a pipelined one, with one more of fewer stages, and after each is gone."""
    found = {"before": asked()}
    engine = make(2, stages)
    found["with"] = asked()
    grid = engine.grid
    found["grid"] = (
        grid.get_data_parallel_rank(),
        grid.get_model_parallel_world_size(),
        grid.pp_group,
        grid.get_data_parallel_group_ranks(),
    )
    found["engine"] = (engine.dp_world_size, engine.mp_world_size, engine.get_data_parallel_rank(), engine.get_model_parallel_rank())
    found["same group"] = groups.get_data_parallel_group() is engine.dp.group
    plain, *_ = stateroom.initialize(
        model=nn.Linear(2, 2), config={"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    )
    found["beside a plain one"] = asked()
    plain.destroy()
    engine.train_batch(iter(jobs.batches(1, 2, 4)[0][engine.cut.copy]))
    engine.destroy()
    found["after"] = asked()
    return found


@pytest.mark.parametrize(("stages", "copies"), [(2, 1), pytest.param(2, 2, marks=full), pytest.param(4, 1, marks=full)])
def test_groups_are_those_of_the_stages(pools, stages, copies):
    world = stages * copies
    for rank, found in enumerate(pools(world).run(groups_over_time, stages)):
        stage, copy_ = divmod(rank, copies)
        row, chain = [stage * copies + each for each in range(copies)], [each * copies + copy_ for each in range(stages)]
        everyone = {
            "data": (rank, world, list(range(world))), "data sum": float(sum(range(world))), "private": (rank, world, 0),
            "model": (0, 1, 1), "pipe": (0, 1), "tensor": (0, 1), "source": rank,
        }  # fmt: skip
        assert found["before"] == found["after"] == everyone
        assert found["with"] == found["beside a plain one"] == {
            "data": (copy_, copies, row), "data sum": float(sum(row)), "private": (copy_, copies, row[0]),
            "model": (stage, stages, stages), "pipe": (stage, stages), "tensor": (0, 1), "source": rank,
            "model sum": float(sum(chain)), "model order": stage,
        }  # fmt: skip
        assert found["grid"] == (copy_, stages, chain, row) and found["engine"] == (copies, stages, copy_, stage)
        assert found["same group"]


# ---- whole weights


def whole_weights(stages: int, zero: int) -> dict[str, Any]:
    """Take the whole model's weights, put others in their place, and train."""
    engine = make(2, stages, zero_optimization={"stage": zero})
    data = jobs.batches(2, 2, engine.cut.grid.copies)
    found: dict[str, Any] = {"first": engine.module_state_dict(), "on first": len(engine.whole_state_on_first_rank())}
    torch.manual_seed(0)
    other = jobs.Twin(jobs.layers(), seed=77).state_dict()
    found["fits"] = [list(each) for each in engine.load_module_state_dict(other)]
    found["second"] = engine.module_state_dict()
    part = dict(list(other.items())[1:])
    try:
        engine.load_module_state_dict({**part, "unknown": torch.zeros(1)})
    except EngineError as error:
        found["said"] = str(error)
    found["loose"] = [list(each) for each in engine.load_module_state_dict({**part, "unknown": torch.zeros(1)}, strict=False)]
    found["losses"] = [float(engine.train_batch(iter(step[engine.cut.copy]))) for step in data]
    found["third"] = engine.module_state_dict()
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("stages", "copies", "zero"), [(2, 1, 0), *(pytest.param(*each, marks=full) for each in ((2, 2, 1), (2, 2, 3), (4, 1, 1), (1, 2, 1)))]
)
def test_whole_weights_are_taken_and_given_on_every_rank(pools, stages, copies, zero):
    data = jobs.batches(2, 2, copies)
    start = jobs.Twin(jobs.layers()).state_dict()
    other = jobs.Twin(jobs.layers(), seed=77)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.05, momentum=0.9)
    second, losses = copy.deepcopy(other.state_dict()), []
    for step in data:
        optimizer.zero_grad()
        micro = [each for row in step for each in row]
        parts = [jobs.loss_fn(other(ids), labels) / len(micro) for ids, labels in micro]
        torch.stack(parts).sum().backward()
        optimizer.step()
        losses.append(float(sum(parts).detach()))
    for rank, found in enumerate(pools(stages * copies).run(whole_weights, stages, zero)):
        for name, want in (("first", start), ("second", second), ("third", other.state_dict())):
            assert set(found[name]) == set(want)
            for key, value in want.items():
                torch.testing.assert_close(found[name][key], value, rtol=1e-5, atol=1e-6)
        assert found["losses"] == pytest.approx(losses, rel=1e-5) and found["on first"] == (len(start) if rank == 0 else 0)
        assert found["fits"] == [[], []] and found["loose"] == [["0.weight"], ["unknown"]]
        assert "1 missing (0.weight), 1 unknown to all stages (unknown)" in found["said"]


# ---- single parameters


def single_parameters(zero: int) -> dict[str, Any]:
    """Read and write states of this stage's parameters between steps."""
    utils = stateroom.utils
    engine = make(2, 2, jobs.layers(tied=False), zero_optimization={"stage": zero})
    data = jobs.batches(2, 2, engine.cut.grid.copies)
    found: dict[str, Any] = {"norm before": engine.get_global_grad_norm()}
    engine.train_batch(iter(data[0][engine.cut.copy]))
    named = dict(engine.module.named_parameters())
    found["weights"] = {name: utils.safe_get_full_fp32_param(param) for name, param in named.items()}
    found["momentum"] = {name: utils.safe_get_full_optimizer_state(param, "momentum_buffer") for name, param in named.items()}
    found["gradients"] = {name: utils.safe_get_full_grad(param) for name, param in named.items()}
    found["norm"] = engine.get_global_grad_norm()
    for param in named.values():
        utils.safe_set_full_fp32_param(param, torch.full(param.ds_shape if hasattr(param, "ds_shape") else param.shape, 0.25))
    with stateroom.zero.GatheredParameters(list(named.values()), modifier_rank=0):
        for param in named.values():
            if engine.dp.rank == 0:
                param.data.add_(0.5)
    found["set"] = {name: value.unique().tolist() for name, value in engine.module_state_dict().items()}
    engine.offload_states()
    engine.reload_states()
    found["modes"] = (engine.eval().module.training, engine.train().module.training)
    found["loss"] = float(engine.train_batch(iter(data[1][engine.cut.copy])))
    own = next(iter(named))
    found["traced"] = engine.trace_parameter(own, show=False).name == own
    try:
        engine.trace_parameter("0.weight" if engine.cut.stage else "8.weight", show=False)
    except EngineError as error:
        found["not here"] = str(error)
    ledger = engine.ledger(show=False)
    found["ledger"] = bool(ledger.traffic)
    engine.destroy()
    return found


@pytest.mark.parametrize(("copies", "zero"), [(1, 0), *(pytest.param(*each, marks=full) for each in ((2, 1), (2, 2), (2, 3)))])
def test_single_parameters_of_a_stage(pools, copies, zero):
    net = jobs.Twin(jobs.layers(tied=False))
    micro = [each for row in jobs.batches(2, 2, copies)[0] for each in row]
    torch.stack([jobs.loss_fn(net(ids), labels) / len(micro) for ids, labels in micro]).sum().backward()
    momentum = {name: param.grad.clone() for name, param in net.named_parameters()}
    torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9).step()
    norm = float(torch.stack([gradient.norm() for gradient in momentum.values()]).norm())
    got = pools(2 * copies).run(single_parameters, zero)
    for found in got:
        for kind, want in (("weights", dict(net.named_parameters())), ("momentum", momentum)):
            for name, value in found[kind].items():
                torch.testing.assert_close(value, want[name].detach(), rtol=1e-5, atol=1e-6)
        assert set(found["gradients"].values()) == {None} and found["norm before"] is None
        assert found["norm"] == pytest.approx(norm, rel=1e-5)
        assert set(found["set"]) == set(net.state_dict()) and all(values == [0.75] for values in found["set"].values())
        assert found["loss"] == pytest.approx(got[0]["loss"]) and found["modes"] == (False, True) and found["traced"] and found["ledger"]
        assert "This rank holds stage" in found["not here"]
    assert {name for found in got for name in found["weights"]} == set(net.state_dict())


def refusals() -> list[str]:
    engine = make(2, 2)
    said = []
    for call in (
        engine.no_sync, engine.coalesce_grad_reduction, engine.allreduce_gradients, lambda: engine.set_gradient_accumulation_boundary(True),
        lambda: engine.scale(torch.zeros(())), lambda: engine(torch.zeros(1, 1, dtype=torch.long)),
    ):  # fmt: skip
        try:
            call()
        except EngineError as error:
            said.append(str(error))
    assert engine.is_gradient_accumulation_boundary()
    engine.zero_grad()
    engine.train_batch(iter(jobs.batches(1, 2, 1)[0][0]))
    engine.destroy()
    return said


def test_what_has_no_meaning_is_refused_with_the_reason(pools):
    for said in pools(2).run(refusals):
        assert len(said) == 6 and all("engine.train_batch(data_iter)" in text for text in said)


def compiled(data: Any, count: int) -> list[float]:
    engine = make(count, 2)
    engine.compile(backend="eager")
    assert engine.is_compiled
    losses = [float(engine.train_batch(iter(step[0]))) for step in data]
    engine.destroy()
    return losses


@full
def test_stages_are_compiled_like_any_model(pools):
    data = jobs.batches(4, 4, 1)
    want = jobs.plain_run(jobs.layers(), data)["losses"]
    for losses in pools(2).run(compiled, data, 4):
        assert losses == pytest.approx(want, rel=1e-5)
