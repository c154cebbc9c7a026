"""A resumed run is the same run, bit for bit: losses, weights, states, random numbers, schedule and sample order."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from engine_jobs import Recorder, Sentences, differences, states_of
from training import config_for


def run(stage, precision, plan, folder, dropped="", use_async=False):
    """Train from the engine's loader; `plan` holds numbers of steps, "save" and "load". Returns losses, samples and final states."""
    import stateroom

    torch.manual_seed(3)
    model = Recorder()
    config = config_for(stage, precision, 2, seed=11, checkpoint={"async": use_async})
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 5e-3, "warmup_num_steps": 30, "warmup_type": "linear"}}
    engine, *_ = stateroom.initialize(model, config=config, training_data=Sentences())
    seed = 1000 * ("load" in plan) + engine.global_rank  # ranks draw differently, and a new process starts elsewhere
    torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
    torch.rand(7 * engine.global_rank + 1)
    losses = []
    for item in plan:
        if item == "save":
            engine.save_checkpoint(folder)
        elif item == "load":
            engine.load_checkpoint(folder, load_lr_scheduler_states=dropped != "schedule")
            if dropped == "data":
                engine.training_dataloader.go_to({"epoch": 0, "samples": 0})
            if dropped in ("torch", "numpy", "python"):
                {"torch": torch.manual_seed, "numpy": np.random.seed, "python": random.seed}[dropped](5)
        else:
            losses += [engine.train_batch().item() for _ in range(item)]
    engine.saving.wait()
    found = (losses, model.seen, states_of(engine))
    engine.destroy()
    return found


def assert_same(straight, resumed, steps_before):
    for (losses, seen, states), (losses_after, seen_after, states_after) in zip(straight, resumed, strict=True):
        assert losses_after == losses[steps_before:]
        assert seen_after == seen[len(seen) - len(seen_after) :] and seen_after
        assert differences(states, states_after) == []


def check(pool, stage, precision, folder, before, after, use_async=False, fresh=None):
    straight = pool.run(run, stage, precision, [before + after], None)
    pool.run(run, stage, precision, [before, "save"], folder, use_async=use_async)
    if fresh is not None:
        pool = fresh()
    assert_same(straight, pool.run(run, stage, precision, ["load", after], folder), before)
    return straight


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
def test_resume_is_the_same_run(pools, tmp_path, stage, precision):
    """22 samples, batch 2 on 2 ranks, accumulation 2: the save falls into the middle of the second epoch."""
    check(pools(2), stage, precision, str(tmp_path), 4, 3, use_async=stage == 2)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_resume_in_fresh_processes_is_the_same_run(pools, tmp_path, ranks, stage, precision):
    def fresh():
        pools(ranks).close()
        return pools(ranks)

    check(pools(ranks), stage, precision, str(tmp_path), 10, 10, fresh=fresh)


def test_saving_does_not_change_the_run(pools, tmp_path):
    """The third run saves at every step, in turn beside training and not."""
    straight = pools(2).run(run, 3, "fp32", [4], None)
    for use_async in (False, True):
        folder = str(tmp_path / str(use_async))
        often = pools(2).run(run, 3, "fp32", [1, "save", 1, "save", 1, "save", 1], folder, use_async=use_async)
        assert_same(straight, often, 0)


@pytest.mark.parametrize("dropped", ["torch", "numpy", "python", "schedule", "data"])
def test_what_is_not_restored_is_noticed(pools, tmp_path, dropped):
    """Negative controls of the tests above."""
    straight = pools(2).run(run, 0, "fp32", [4], None)
    pools(2).run(run, 0, "fp32", [2, "save"], str(tmp_path))
    resumed = pools(2).run(run, 0, "fp32", ["load", 2], str(tmp_path), dropped=dropped)
    with pytest.raises(AssertionError):
        assert_same(straight, resumed, 2)


def order(folder, tag, updates, micro=2):
    """Return the samples that this rank sees in so many updates after loading (or from the start without a tag)."""
    import stateroom

    model = Recorder()
    config = config_for(1, "fp32", 1, micro, seed=11, dataloader_drop_last=False)
    engine, *_ = stateroom.initialize(model, config=config, training_data=Sentences())
    if tag is not None:
        engine.load_checkpoint(folder, tag=tag)
    model.seen.clear()
    rounds = []
    for _ in range(updates):
        before = len(model.seen)
        engine.train_batch()
        rounds.append(model.seen[before:])
    if tag is None:
        engine.save_checkpoint(folder, tag="middle")
    engine.destroy()
    return rounds


def test_another_number_of_ranks_goes_on_at_the_same_sample(pools, tmp_path):
    """3 updates of 4 samples on 2 ranks, then 1 and 3 ranks: each sample of the epoch is seen once, in the epoch's order."""
    before = pools(2).run(order, str(tmp_path), None, 3)
    whole = [sample for rounds in pools(1).run(order, str(tmp_path / "other"), None, 11) for ids in rounds for sample in ids]
    assert sorted(whole) == list(range(22))

    def dealt(per_rank):
        """Samples in the order of the epoch: round by round, sample by sample, rank by rank."""
        return [ids[i] for rounds in zip(*per_rank, strict=True) for i in range(len(rounds[0])) for ids in rounds if i < len(ids)]

    assert dealt(before) == whole[:12]
    after = dealt(pools(1).run(order, str(tmp_path), "middle", 5))
    assert after == whole[12:]
    three = dealt(pools(3).run(order, str(tmp_path), "middle", 1, 3))
    assert three == whole[12:21]
