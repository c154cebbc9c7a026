"""What goes wrong in a pipelined step ends on every rank, with one clear message and no rank left waiting."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pipe_jobs as jobs
import pytest
import stateroom
import torch
from stateroom.errors import ConfigError, EngineError
from stateroom.pipe import LayerSpec, PipelineModule, ProcessTopology
from stateroom.pipe.schedules import schedule
from torch import nn


class Trap(nn.Module):
    """Raises in the forward or the backward of one call, or ends the process."""

    def __init__(self, where: str, at: int) -> None:
        super().__init__()
        self.where, self.at, self.calls = where, at, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.at:
            if self.where == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.where == "forward":
                raise ValueError("a layer's own trouble")
            if self.where == "backward":
                x = x * 1.0
                x.register_hook(_raise)
        return x * 1.0


def _raise(gradient: torch.Tensor) -> None:
    raise ValueError("a layer's own trouble")


def failing_run(specs: list[Any], data: Any, cfg: dict[str, Any], note: str | None = None, loss: Any = jobs.loss_fn) -> dict[str, Any]:
    """Run steps, going on after one that raises; return what was said, the losses of the others, and the counters."""
    net = PipelineModule(specs, num_stages=cfg["pipeline"]["stages"], loss_fn=loss, seed_layers=True)
    engine, *_ = stateroom.initialize(model=net, config=cfg)
    said, losses = [], []
    for step in data:
        try:
            losses.append(float(engine.train_batch(iter(step[engine.cut.copy]))))
        except (Exception, StopIteration) as error:
            said.append(f"{type(error).__name__}: {error}")
            if note:
                Path(f"{note}{engine.global_rank}").write_text("\n".join(said))
    counted = (engine.global_steps, engine.micro_steps, engine.skipped_steps)
    engine.destroy()
    return {"said": said, "losses": losses, "counted": counted}


def goes_on(got: list[dict[str, Any]], specs: list[Any], data: Any) -> None:
    """Every rank failed in the second step alone, and trained the others as if it had never been."""
    want = jobs.plain_run(specs, [data[0], *data[2:]])
    for rank in got:
        assert len(rank["said"]) == 1 and rank["counted"][0] == len(want["losses"])
        assert rank["losses"] == pytest.approx(want["losses"], rel=1e-5)


def with_trap(where: str, place: int, at: int = 6) -> list[Any]:
    specs = jobs.layers(blocks=4, tied=False)
    specs.insert(place, LayerSpec(Trap, where, at))
    return specs


QUICK = {("1f1b", "forward", 6), ("zbv", "backward", 6), ("gpipe", "forward", 1)}  # each ends its rank processes


@pytest.mark.parametrize(
    ("name", "where", "place"),
    [
        pytest.param(name, where, place, marks=[] if (name, where, place) in QUICK else pytest.mark.full)
        for name in ("gpipe", "1f1b", "zbv")
        for where in ("forward", "backward")
        for place in (1, 6)
    ],
)
def test_a_stage_that_raises_ends_all(pools, name, where, place):
    cfg = jobs.config(4, pipeline={"schedule": name})
    data = jobs.batches(4, 4, 1)
    got = pools(2).run(failing_run, with_trap(where, place), data, cfg)
    goes_on(got, with_trap("nowhere", place), data)
    first = [rank["said"][0] for rank in got]
    assert sorted(text.split(":")[0] for text in first) == ["RankError", "ValueError"]
    other = next(text for text in first if text.startswith("RankError"))
    assert "failed: ValueError: a layer's own trouble" in other and "stage" in other and "training can go on" in other


@pytest.mark.parametrize(
    ("stages", "stage"),
    [pytest.param(*each, marks=[] if each == (2, 2) else pytest.mark.full) for each in ((1, 2), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3))],
)
def test_a_stage_that_raises_ends_the_other_copies_too(pools, stages, stage):
    """With sharded gradients the copies of a stage meet within the schedule."""
    cfg = jobs.config(4, stages, pipeline={"schedule": "1f1b"}, zero_optimization={"stage": stage})
    specs = jobs.layers(blocks=4, tied=False)
    data = jobs.batches(4, 4, 2)
    got = pools(2 * stages).run(failing_run, [*specs[:1], LayerSpec(OneRankTrap), *specs[1:]], data, cfg)
    goes_on(got, [*specs[:1], LayerSpec(Trap, "nowhere", 0), *specs[1:]], data)
    first = [rank["said"][0] for rank in got]
    assert [text.split(":")[0] for text in first] == ["ValueError", *["RankError"] * (2 * stages - 1)]
    place = "stage 0, copy 0"
    assert all(f"rank 0 ({place}) failed: ValueError: a layer's own trouble" in text for text in first[1:])


class OneRankTrap(nn.Module):
    """Raises on the first rank alone, in the sixth forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 6 and torch.distributed.get_rank() == 0:
            raise ValueError("a layer's own trouble")
        return x * 1.0


class KilledRank(nn.Module):
    """Ends the process of one rank in its sixth forward."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.calls = rank, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 6 and torch.distributed.get_rank() == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return x * 1.0


@pytest.mark.parametrize(
    ("copies", "stage", "killed", "place"),
    [(1, 0, 1, 6), *(pytest.param(*each, marks=pytest.mark.full) for each in ((1, 0, 0, 1), (2, 0, 3, 6), (2, 2, 0, 1), (2, 3, 3, 6)))],
)
def test_a_killed_rank_ends_the_others(tmp_path, copies, stage, killed, place):
    from ranks import Pool, RankFailure

    pool = Pool(2 * copies)
    note = str(tmp_path / "said")
    specs = jobs.layers(blocks=4, tied=False)
    specs.insert(place, LayerSpec(KilledRank, killed))
    with pytest.raises(RankFailure, match="died"):
        pool.run(failing_run, specs, jobs.batches(4, 4, copies), jobs.config(4, zero_optimization={"stage": stage}), note)
    pool.close()
    for rank in range(2 * copies):
        if rank != killed:
            said = Path(f"{note}{rank}").read_text().splitlines()
            assert said[0].startswith("RankError: a rank of this job ended")
            assert said[1].startswith("EngineError: this engine's stages are disconnected since a rank was lost")


def ending_run(lengths: list[int], count: int, stages: int = 2) -> list[str]:
    """Give rank r an iterator of lengths[r] micro-batches and train until something is raised."""
    net = PipelineModule(jobs.layers(tied=False), num_stages=stages, loss_fn=jobs.loss_fn, seed_layers=True)
    engine, *_ = stateroom.initialize(model=net, config=jobs.config(count, stages))
    rows = jobs.batches(1, max(lengths), engine.cut.grid.copies)[0]
    source = iter(rows[engine.cut.copy][: lengths[engine.global_rank]])
    steps = 0
    try:
        while True:
            engine.train_batch(source)
            steps += 1
    except (Exception, StopIteration) as error:
        said = f"{type(error).__name__}: {error}"
    again = float(engine.train_batch(iter(rows[engine.cut.copy][:count])))
    engine.destroy()
    return [str(steps), said, str(again)]


def test_an_iterator_that_ends_early_on_one_rank_is_named_on_all(pools):
    got = pools(2).run(ending_run, [8, 6], 4)
    for steps, said, _ in got:
        assert steps == "1" and said.startswith("EngineError: data iterators ended on some ranks: rank 1 after 2 of 4 micro-batches")
    assert got[0][2] == got[1][2]  # nothing was computed, and training can go on


@pytest.mark.full
@pytest.mark.parametrize(("lengths", "ended"), [([8, 8, 8, 6], 3), ([8, 4, 8, 8], 1)])
def test_an_iterator_of_one_copy_that_ends_early_is_named_on_all(pools, lengths, ended):
    got = pools(4).run(ending_run, lengths, 4)
    for steps, said, _ in got:
        assert steps == "1" and f"rank {ended} after {lengths[ended] - 4} of 4 micro-batches" in said and "Nothing was computed" in said
    assert len({again for *_, again in got}) == 1


def test_iterators_that_end_together_stop_the_loop(pools):
    for steps, said, _ in pools(2).run(ending_run, [8, 8], 4):
        assert steps == "2" and said.startswith("StopIteration")


def vector_loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="none")


def test_a_vector_loss_is_refused_on_all_ranks(pools):
    got = pools(2).run(failing_run, jobs.layers(), jobs.batches(1, 2, 1), jobs.config(2), None, vector_loss)
    texts = [rank["said"][0] for rank in got]
    assert texts[1].startswith("EngineError: loss_fn must return a scalar tensor, got shape (10,)")
    assert texts[0].startswith("RankError: rank 1 (stage 1) failed: loss_fn must return a scalar tensor")


def raising_loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if int(labels[0, 0]) == -7:
        raise KeyError("no such label")
    return jobs.loss_fn(output, labels)


@pytest.mark.parametrize("kind", ("loss_fn", "data"))
def test_bad_data_in_one_micro_batch_costs_one_step(pools, kind):
    """A loss_fn that raises, and a batch that is none, on the last stage; further ones are not affected."""
    data = jobs.batches(4, 2, 1)
    specs = jobs.layers(blocks=4, tied=False)
    bad = [*data]
    ids, labels = data[1][0][1]
    bad[1] = [[data[1][0][0], (ids, torch.full_like(labels, -7)) if kind == "loss_fn" else "no batch"]]
    got = pools(2).run(failing_run, specs, bad, jobs.config(2), None, raising_loss)
    goes_on(got, specs, data)
    if kind == "loss_fn":
        assert got[1]["said"][0].startswith("KeyError") and "rank 1 (stage 1) failed: KeyError" in got[0]["said"][0]
    else:
        assert all("with loss_fn a batch is (inputs, labels)" in rank["said"][0] for rank in got)


def undivided() -> list[str]:
    """Ask for micro-batches that a schedule cannot share out, then for such that it can."""
    specs = jobs.layers(blocks=5)
    net = PipelineModule(specs, num_stages=2, loss_fn=jobs.loss_fn, seed_layers=True)
    engine, *_ = stateroom.initialize(model=net, config=jobs.config(3, pipeline={"schedule": "interleaved-1f1b"}))
    data = jobs.batches(1, 4, 1)[0][0]
    try:
        engine.train_batch(iter(data))
    except ConfigError as error:
        said = str(error)
    engine.set_train_batch_size(8)
    loss = float(engine.train_batch(iter(data)))
    engine.destroy()
    return [said, str(loss)]


def test_micro_batches_that_do_not_divide_are_refused_on_all_ranks(pools):
    first, last = pools(2).run(undivided)
    assert first == last and "3 micro-batches do not divide by 2 stages" in first[0] and float(first[1]) > 0


def refusals() -> list[str]:
    """Build what cannot be built, and call what must not be called."""
    said = []

    def refused(call: Any) -> None:
        try:
            call()
        except (ConfigError, EngineError) as error:
            said.append(str(error))

    refused(lambda: PipelineModule([nn.Linear(2, 2)], num_stages=2))
    refused(lambda: PipelineModule([nn.Linear(2, 2)] * 4, num_stages=3))
    refused(lambda: PipelineModule([nn.Linear(2, 2)] * 4))
    refused(lambda: PipelineModule([nn.Linear(2, 2)] * 4, topology=ProcessTopology(["pipe", "model"], [1, 2])))
    net = PipelineModule(jobs.layers(), num_stages=2, loss_fn=jobs.loss_fn)
    refused(lambda: net(torch.zeros(1, 1, dtype=torch.long)))
    refused(lambda: stateroom.initialize(model=net, config=jobs.config(2, 4)))
    refused(lambda: stateroom.initialize(model=nn.Linear(2, 2), config=jobs.config(2)))
    split = jobs.config(2, pipeline={"schedule": "zbv"}, zero_optimization={"stage": 3})
    refused(lambda: stateroom.initialize(model=PipelineModule(jobs.layers(), num_stages=2), config=split))
    moved = jobs.config(2, pipeline={"schedule": "zbv"})
    other = PipelineModule(jobs.layers(), num_stages=2, loss_fn=jobs.loss_fn)
    refused(lambda: stateroom.initialize(model=other, optimizer=torch.optim.SGD(other.parameters(), lr=0.1), config=moved))
    engine, *_ = stateroom.initialize(model=net, config=jobs.config(2))
    for call in (lambda: engine(1), lambda: engine.backward(1), lambda: engine.step(), lambda: engine.train_batch([1, 2])):
        refused(call)
    engine.destroy()
    return said


def test_refusals_say_what_to_do(pools):
    wanted = [
        "1 layers cannot be cut into 2 stages",
        "2 rank(s) cannot be shared out over 3 pipeline stages",
        "needs num_stages or topology",
        "the axis 'model' has 2 ranks",
        "run the model with engine.train_batch()",
        "PipelineModule has 2 stages",
        "set pipeline.split to auto",
        "use stage 2 or less",
        "pass the optimizer as a function of parameters",
        "no forward() of its own",
        "no backward() of its own",
        "no step() of its own",
        "data_iter must be an iterator, got list",
    ]
    for said in pools(2).run(refusals):
        assert len(said) == len(wanted)
        for text, part in zip(said, wanted, strict=True):
            assert part in text


@pytest.mark.parametrize(
    ("name", "stages", "count", "part"),
    [
        ("interleaved-1f1b", 4, 6, "6 micro-batches do not divide by 4 stages; nearest: 4 or 8"),
        ("dualpipev", 2, 3, "needs at least 2 micro-batches a stage: 4 for 2 stages, got 3"),
        ("2f2b", 2, 3, "there is no schedule '2f2b'; known: gpipe, 1f1b"),
        ("1f1b", 2, 0, "at least one stage and one micro-batch"),
    ],
)
def test_micro_batches_that_a_schedule_cannot_share_out(name, stages, count, part):
    with pytest.raises(ConfigError) as caught:
        schedule(name, stages, count)
    assert part in str(caught.value)
