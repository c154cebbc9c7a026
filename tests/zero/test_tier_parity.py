"""States that rest in host memory or on a drive train bit for bit as those on the device, at every stage."""

from __future__ import annotations

import pytest
from offload_jobs import OPTIMIZERS, offload, same, start, train

STAGES = [("cpu", 1), ("cpu", 3), ("nvme", 1), ("nvme", 2), ("nvme", 3), ("both", 3)]
PLACES = {"cpu": ("cpu", "none"), "nvme": ("nvme", "none"), "both": ("nvme", "nvme"), "params": ("none", "nvme")}


@pytest.fixture(scope="module")
def plain(pools):
    """Results without offload, computed once for each case."""
    found: dict[tuple, list] = {}

    def of(ranks, *case, **extra):
        key = (ranks, case, str(extra))
        if key not in found:
            found[key] = pools(ranks).run(train, case[0], {"stage": case[1]}, *case[2:], **extra)
        return found[key]

    return of


def check(pools, plain, folder, ranks, place, stage, optimizer, precision="fp32", model="gpt", **extra):
    where, params = PLACES[place]
    wanted = plain(ranks, model, stage, optimizer, precision, **extra)
    found = pools(ranks).run(train, model, offload(stage, where, params, str(folder)), optimizer, precision, **extra)
    for mine, theirs in zip(found, wanted, strict=True):
        assert len(theirs[3]) >= 20  # the comparison covers states
        same(mine, theirs, (place, stage, optimizer, ranks))


CASES = [(ranks, place, stage, optimizer) for ranks in (1, 2) for place, stage in STAGES for optimizer in ("adam", "adamw", "momentum")]
QUICK = [(1, "both", 3, "adamw"), (2, "cpu", 1, "adam"), (2, "nvme", 1, "momentum"), (2, "nvme", 2, "adam"), (2, "both", 3, "adamw")]


@pytest.mark.parametrize(
    ("ranks", "place", "stage", "optimizer"), [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.full) for case in CASES]
)
def test_fp32_is_bit_identical(pools, plain, tmp_path, ranks, place, stage, optimizer):
    check(pools, plain, tmp_path, ranks, place, stage, optimizer)


@pytest.mark.parametrize("place", PLACES)
def test_bf16_with_accumulation_is_bit_identical(pools, plain, tmp_path, place):
    check(pools, plain, tmp_path, 2, place, 3, "adamw", "bf16", gas=2)


@pytest.mark.parametrize("optimizer", ["lamb", "muon"])
def test_whole_parameters_are_never_cut(pools, plain, tmp_path, optimizer):
    check(pools, plain, tmp_path, 2, "both", 3, optimizer)


def count_runs(zero, **extra):
    engine = start("wide", zero, **extra)
    counts = len(engine.optimizer.runs), len({run.group for run in engine.optimizer.runs})
    engine.destroy()
    return counts


@pytest.mark.parametrize("place", ["cpu", "both"])
@pytest.mark.parametrize("optimizer", ["adamw", "momentum", "muon"])
def test_runs_that_are_cut_keep_the_bits(pools, plain, tmp_path, place, optimizer):
    """Units of some 40,000 elements in sub-groups of 4,096, with a group for biases between the others."""
    kind = OPTIMIZERS[optimizer] | ({} if optimizer == "muon" else {"no_decay": ["*.bias"]})
    where, params = PLACES[place]
    zero = offload(3, where, params, str(tmp_path))
    wanted = pools(2).run(train, "wide", {"stage": 3}, optimizer, extra_optimizer=kind)
    for mine, theirs in zip(pools(2).run(train, "wide", zero, optimizer, extra_optimizer=kind), wanted, strict=True):
        same(mine, theirs, (place, optimizer))
    if optimizer != "muon":  # whole matrices are not cut
        whole, cut = (pools(2).run(count_runs, section, extra_optimizer=kind) for section in ({"stage": 3}, zero))
        assert all(more > runs + 5 for (more, _), (runs, _) in zip(cut, whole, strict=True))
        assert any(groups == 2 for _, groups in whole)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_place(pools, plain, tmp_path, ranks, place, stage, precision, optimizer):
    if place in ("both", "params") and stage < 3:
        place = "nvme"
    for gas in (1, 2):
        check(pools, plain, tmp_path, ranks, place, stage, optimizer, precision, gas=gas)


@pytest.mark.parametrize(
    "more",
    [
        {"pipeline_read": False, "pipeline_write": False},
        {"buffer_count": 4},
        {"buffer_count": 8, "pipeline_read": True},
        {"ratio": 0.5},
        {"ratio": 0.0},
    ],
)
def test_pipelining_and_ratio_change_nothing(pools, plain, tmp_path, more):
    wanted = plain(2, "gpt", 3, "adamw", "fp32")
    found = pools(2).run(train, "gpt", offload(3, "nvme", "nvme", str(tmp_path), **more), "adamw", "fp32")
    for mine, theirs in zip(found, wanted, strict=True):
        same(mine, theirs, more)


def test_small_requests_and_few_threads(pools, plain, tmp_path):
    """Requests of one sector on one thread go through the same places as large ones."""
    wanted = plain(1, "gpt", 3, "adamw", "fp32")
    zero = offload(3, "nvme", "nvme", str(tmp_path))
    zero["offload_param"] |= {"buffer_count": 1, "buffer_size": 1}
    found = pools(1).run(train, "gpt", zero, "adamw", "fp32", aio={"block_size": 4096, "queue_depth": 1})
    same(found[0], wanted[0])


def test_without_clipping_and_with_an_optimizer_of_one_state(pools, plain, tmp_path):
    check(pools, plain, tmp_path, 2, "both", 3, "momentum", gradient_clipping=0.0)
