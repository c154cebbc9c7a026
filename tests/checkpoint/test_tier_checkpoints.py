"""A checkpoint says nothing of tiers: what was saved from one is loaded into any other and goes on bit for bit."""

from __future__ import annotations

import itertools

import pytest
from offload_jobs import load_and_train, offload, same, train, train_and_save

TIERS = {"device": ("none", "none"), "cpu": ("cpu", "cpu"), "nvme": ("nvme", "nvme"), "mixed": ("cpu", "nvme")}


def section(tier, folder, stage=3):
    optimizer, params = TIERS[tier]
    return offload(stage, optimizer, params if stage == 3 else "none", str(folder))


def straight(pools, ranks, stage, precision, optimizer="adamw"):
    results = pools(ranks).run(train, "gpt", {"stage": stage}, optimizer, precision, steps=4)
    return [(losses[2:], norms[2:], weights, states) for losses, norms, weights, states in results]


def check(pools, tmp_path, source, target, *, ranks=2, stages=(3, 3), precision="fp32", asynchronous=False, optimizer="adamw"):
    drive, saved = tmp_path / "drive", tmp_path / "saved"
    drive.mkdir()
    extra = {"checkpoint": {"async": asynchronous}}
    pools(ranks).run(train_and_save, str(saved), "gpt", section(source, drive, stages[0]), optimizer, precision, **extra)
    found = pools(ranks).run(load_and_train, str(saved), "gpt", section(target, drive, stages[1]), optimizer, precision)
    for mine, theirs in zip(found, straight(pools, ranks, stages[1], precision, optimizer), strict=True):
        same(mine, theirs, (source, target))


@pytest.mark.parametrize(
    ("source", "target"), [("nvme", "device"), ("device", "nvme"), ("nvme", "cpu"), ("mixed", "nvme"), ("nvme", "nvme")]
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_fp32_goes_on_bit_for_bit(pools, tmp_path, source, target, asynchronous):
    check(pools, tmp_path, source, target, asynchronous=asynchronous)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_bf16_goes_on_bit_for_bit(pools, tmp_path, asynchronous):
    check(pools, tmp_path, "nvme", "mixed", precision="bf16", asynchronous=asynchronous)


def test_stages_differ_too(pools, tmp_path):
    check(pools, tmp_path, "nvme", "nvme", stages=(1, 3), optimizer="momentum")


@pytest.mark.full
@pytest.mark.parametrize(("source", "target"), list(itertools.product(TIERS, TIERS)))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["adam", "momentum", "muon"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_pair(pools, tmp_path, source, target, precision, optimizer, ranks):
    check(pools, tmp_path, source, target, ranks=ranks, precision=precision, optimizer=optimizer, asynchronous=ranks == 2)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_other_numbers_of_ranks(pools, tmp_path, before, after):
    """The states at the load are those of the save; training on other ranks then sums in another order."""
    drive, saved = tmp_path / "drive", tmp_path / "saved"
    drive.mkdir()
    pools(before).run(train_and_save, str(saved), "gpt", section("nvme", drive))
    wanted = pools(before).run(load_and_train, str(saved), "gpt", section("device", drive), steps=0)[0]
    found = pools(after).run(load_and_train, str(saved), "gpt", section("nvme", drive), steps=0)[0]
    same(found, wanted)
    assert len(found[3]) >= 20
