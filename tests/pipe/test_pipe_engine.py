"""What scripts do with a pipelined engine: loaders, evaluation, questions, NaN, recomputation set later."""

from __future__ import annotations

from typing import Any

import pipe_jobs as jobs
import pytest
import stateroom
import torch
from stateroom.pipe import LayerSpec, PipelineModule
from torch import nn
from torch.utils.data import Dataset


class Numbered(Dataset):
    """Samples that carry their number in the first label."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((3,), index % jobs.VOCABULARY), torch.full((3,), index % jobs.VOCABULARY)


def make(count: int = 2, stages: int = 2, loss: Any = jobs.loss_fn, specs: Any = None, cfg: Any = None, **more: Any) -> Any:
    net = PipelineModule(specs or jobs.layers(), num_stages=stages, loss_fn=loss, seed_layers=True)
    return stateroom.initialize(model=net, config=cfg or jobs.config(count, stages), **more)


def questions() -> dict[str, Any]:
    engine, *_ = make(4)
    found = {
        "first": engine.is_first_stage(),
        "last": engine.is_last_stage(),
        "piped": engine.is_pipe_parallel(),
        "sizes": (engine.train_batch_size(), engine.dp_world_size, engine.world_size, engine.get_batch_info()),
        "mesh": tuple(engine.mesh.shape),
        "type": type(engine).__name__,
        "isinstance": isinstance(engine, stateroom.PipelineEngine) and isinstance(engine, stateroom.Engine),
        "layers": engine.module.own_layers,
        "grid": (engine.grid.get_stage_id(), engine.grid.get_data_parallel_world_size(), engine.get_data_parallel_rank()),
    }
    engine.set_train_batch_size(4)
    found["steps"] = engine.gradient_accumulation_steps()
    data = jobs.batches(1, 2, 1)[0][0]
    found["loss"] = float(engine.train_batch(iter(data)))
    found["micro_steps"], found["global_steps"] = engine.micro_steps, engine.global_steps
    found["gradient"] = None
    engine.destroy()
    return found


def test_an_engine_answers(pools):
    first, last = pools(2).run(questions)
    assert (first["first"], first["last"], last["first"], last["last"]) == (True, False, False, True)
    assert first["sizes"] == last["sizes"] == (8, 1, 2, (8, 2, 4)) and first["mesh"] == (2, 1, 1, 1, 1)
    assert first["type"] == "PipelineEngine" and first["isinstance"] and first["piped"]
    assert (first["grid"], last["grid"]) == ((0, 1, 0), (1, 1, 0))
    assert first["layers"] + last["layers"] == list(range(9))
    assert first["steps"] == 2 and first["loss"] == last["loss"] and (first["micro_steps"], first["global_steps"]) == (2, 1)


def evaluation() -> dict[str, Any]:
    engine, *_ = make(2)
    data = jobs.batches(1, 3, 1, lengths=(4, 6, 5))[0][0]
    before = {name: value.clone() for name, value in engine.module_state_dict().items()}
    found: dict[str, Any] = {
        "mean": float(engine.eval_batch(iter(data), num_micro_batches=3)),
        "sum": float(engine.eval_batch(iter(data), num_micro_batches=3, reduce_output="sum")),
        "each": engine.eval_batch(iter(data), num_micro_batches=3, reduce_output=None).tolist(),
    }
    loss, logits = engine.eval_batch(iter(data), return_logits=True, num_micro_batches=3)
    found["again"], found["logits"] = float(loss), None if logits is None else [tuple(each.shape) for each in logits]
    alone = engine.eval_batch(iter(data), compute_loss=False, num_micro_batches=3)
    found["alone"] = None if alone is None else len(alone)
    found["same"] = all(torch.equal(before[name], value) for name, value in engine.module_state_dict().items())
    found["training"] = engine.training
    engine.train_batch(iter(data))
    engine.reset_activation_shape()
    engine.train_batch(iter(data))
    found["after"] = float(engine.eval_batch(iter(data), num_micro_batches=3))
    engine.destroy()
    return found


def test_evaluation(pools):
    first, last = pools(2).run(evaluation)
    torch.manual_seed(0)
    net, data = jobs.Twin(jobs.layers()), jobs.batches(1, 3, 1, lengths=(4, 6, 5))[0][0]
    want = [float(jobs.loss_fn(net(ids), labels).detach()) for ids, labels in data]
    for rank in (first, last):
        assert rank["each"] == pytest.approx(want, rel=1e-5)
        assert rank["mean"] == rank["again"] == pytest.approx(sum(want) / 3, rel=1e-5) and rank["sum"] == pytest.approx(sum(want), rel=1e-5)
        assert rank["same"] and rank["training"] and rank["after"] != rank["mean"]
    assert first["logits"] is None and first["alone"] is None
    assert last["logits"] == [(2, 4, 11), (2, 6, 11), (2, 5, 11)] and last["alone"] == 3


class Seen(nn.Module):
    """Hands ids through and remembers those of the first column."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.seen += ids[:, 0].tolist()
        return ids


def loading(way: str, samples: int) -> list[int]:
    specs = [LayerSpec(Seen), *jobs.layers()]
    more = {"training_data": Numbered(samples)} if way == "training_data" else {}
    engine, *_ = make(2, specs=specs, cfg={**jobs.config(2), "seed": 1}, **more)
    if way == "set_dataloader":
        engine.set_dataloader(engine.deepspeed_io(Numbered(samples), route="eval"))
    if way == "set_dataiterator":
        engine.set_dataiterator(iter(engine.deepspeed_io(Numbered(samples), route="eval")))
    if way == "set_batch_fn":
        engine.set_dataloader([{"text": item} for item in engine.deepspeed_io(Numbered(samples), route="eval")])
        engine.set_batch_fn(lambda batch: tuple(batch["text"]))
    for _ in range(samples // 4):
        engine.train_batch()
    seen = getattr(engine.module, "0").seen if engine.is_first_stage() else []
    engine.destroy()
    return seen


@pytest.mark.parametrize("way", ("training_data", "set_dataloader", "set_dataiterator", "set_batch_fn"))
def test_batches_come_from_where_they_were_promised(pools, way):
    seen = pools(2).run(loading, way, 8)[0]
    assert sorted(seen) == list(range(8)) and (way == "training_data") == (seen != sorted(seen))


def counting(interval_at_start: int, later: int) -> list[int]:
    """Count forwards of a layer on this stage in a step, before and after the interval is set anew."""
    engine, *_ = make(2)
    calls = [0]
    own = next(part for part in engine.module.modules() if isinstance(part, jobs.Block))
    own.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    counts = []
    for interval in (interval_at_start, later):
        engine.module.activation_checkpoint_interval = interval
        calls[0] = 0
        engine.train_batch(iter(jobs.batches(1, 2, 1)[0][0]))
        counts.append(calls[0])
    engine.destroy()
    return counts


def test_the_interval_may_be_set_later_and_recomputation_happens(pools):
    """C40"""
    for counts in pools(2).run(counting, 0, 1):
        assert counts == [2, 4]


def ledgers(schedule: str) -> list[tuple[Any, ...]]:
    engine, *_ = make(4, cfg=jobs.config(4, pipeline={"schedule": schedule}))
    for step in jobs.batches(2, 4, 1):  # the first step also tells shapes
        engine.train_batch(iter(step[0]))
    ledger = engine.ledger(show=False)
    engine.destroy()
    return [
        (row.state, row.predicted_calls, row.counted_calls, row.predicted_bytes, row.counted_bytes)
        for row in ledger.traffic
        if row.kind == "send"
    ]


@pytest.mark.parametrize("schedule", ("1f1b", "interleaved-1f1b", "zbv"))
def test_the_ledger_predicts_what_stages_send(pools, schedule):
    for rows in pools(2).run(ledgers, schedule):
        assert rows
        for state, predicted_calls, calls, predicted_bytes, num_bytes in rows:
            assert (predicted_calls, predicted_bytes) == (calls, num_bytes) and num_bytes == calls * 2 * 5 * 8 * 4, state


def nan_loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return jobs.loss_fn(output, labels) * (float("nan") if int(labels.sum()) % 2 == 0 else 1.0)


def nan_run() -> str:
    engine, *_ = make(2, loss=nan_loss)
    even = [(torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long))] * 2
    try:
        engine.train_batch(iter(even))
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    odd = [(torch.zeros(2, 3, dtype=torch.long), torch.tensor([[1, 0, 0], [0, 0, 0]]))] * 2
    said += f" then {float(engine.train_batch(iter(odd))):.3f}"
    engine.destroy()
    return said


def test_a_nan_loss_is_an_error_on_every_stage_and_training_can_go_on(pools):
    first, last = pools(2).run(nan_run)
    assert first == last and "the loss is NaN on rank(s) [1]" in first and not first.endswith("nan")


def untouched(ids: torch.Tensor) -> Any:
    return ids


class Wide(nn.Module):
    """Gives as many rows as the largest id says: shapes that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(jobs.VOCABULARY, jobs.WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids[:, : int(ids.max())])


def mean_loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return output.pow(2).mean()


def by_value(dynamic: bool) -> str:
    specs = [LayerSpec(Wide), *(LayerSpec(jobs.Block) for _ in range(3))]
    net = PipelineModule(specs, num_stages=2, loss_fn=mean_loss, seed_layers=True, dynamic_shape=dynamic)
    engine, *_ = stateroom.initialize(model=net, config=jobs.config(2))
    rows = [torch.tensor([[1, 2, 3, 4], [1, 1, 1, 1]]), torch.tensor([[1, 2, 2, 2], [1, 1, 1, 1]])]
    try:
        said = f"{float(engine.train_batch(iter([(row, row) for row in rows]))):.4f}"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    engine.destroy()
    return said


def test_shapes_that_depend_on_values(pools):
    first, last = pools(2).run(by_value, True)
    assert first == last and float(first) > 0
    first, last = pools(2).run(by_value, False)
    assert first.startswith(
        "EngineError: the inputs of part 1 changed although the batch's shapes did not: [2, 4, 8] float32 before, [2, 2, 8]"
    )
    assert last.startswith("RankError: rank 0 (stage 0) failed: the inputs of part 1 changed")
