"""The ledger's tiers: predicted bytes at rest and bytes moved in a step, from layout alone, are the measured ones."""

from __future__ import annotations

import pytest
from models import batch
from offload_jobs import go_on, offload, start
from training import cast

SECTOR = 4096
PLACES = [
    ("cpu", "none", 1),
    ("cpu", "cpu", 3),
    ("nvme", "none", 1),
    ("nvme", "none", 2),
    ("nvme", "nvme", 3),
    ("cpu", "nvme", 3),
    ("none", "nvme", 3),
]


def ledger_of(model, zero, optimizer, precision, gas):
    """Return the ledger as data after steps with an evaluation between them."""
    import torch

    engine = start(model, zero, optimizer, precision, gas)
    go_on(engine, model, 2, precision)
    with torch.no_grad():
        engine(*cast(batch(model, 5, 0, engine.global_rank), precision))
    go_on(engine, model, 1, precision, first=2)
    ledger = engine.ledger(show=False)
    text = str(ledger)
    engine.destroy()
    return ledger, text


def check(pools, folder, place, ranks, optimizer, precision, gas):
    where, params, stage = place
    for ledger, text in pools(ranks).run(ledger_of, "gpt", offload(stage, where, params, folder), optimizer, precision, gas):
        for row in ledger.states:
            assert row.predicted_bytes is not None, row
            difference = row.measured_bytes - row.predicted_bytes
            # a file system may take a block more for where the pieces of a file lie
            assert difference == 0 or (row.tier == "nvme" and 0 < difference <= 3 * SECTOR), row
        tiers = {row.tier for row in ledger.states if row.measured_bytes}
        assert {where, params} - {"none"} <= tiers
        assert bool(ledger.moves) == ("nvme" in (where, params))
        for move in ledger.moves:
            if (move.direction, move.state) == ("read", "parameters"):
                # the evaluation between the steps reads beside the step, and prefetch may begin one unit that nobody uses
                assert move.counted_bytes >= move.predicted_bytes > 0, move
            else:
                assert move.counted_bytes == move.predicted_bytes > 0, move
            assert move.seconds > 0
        assert ("moved by the last step" in text) == bool(ledger.moves)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.full), "bf16"])
def test_predicted_equals_measured_on_every_tier(pools, tmp_path, place, precision):
    check(pools, str(tmp_path), place, 2, "adamw", precision, 2)


@pytest.mark.parametrize("optimizer", ["momentum", "lamb", "muon"])
def test_states_of_other_optimizers(pools, tmp_path, optimizer):
    check(pools, str(tmp_path), ("nvme", "nvme", 3), 1, optimizer, "fp32", 1)


def test_part_of_the_parameters_stays_in_host_memory(pools, tmp_path):
    zero = offload(3, "nvme", "nvme", str(tmp_path))
    zero["offload_param"]["max_in_cpu"] = 3000
    for ledger, _ in pools(1).run(ledger_of, "gpt", zero, "adamw", "bf16", 1):
        params = {row.tier: row for row in ledger.states if row.state == "parameters"}
        assert set(params) == {"cpu", "nvme"}
        assert 0 < params["cpu"].measured_bytes == params["cpu"].predicted_bytes <= 3000 * 2


def test_a_ratio_divides_the_states_between_device_and_host(pools, tmp_path):
    zero = offload(3, "nvme", "none", str(tmp_path), ratio=0.5)
    for ledger, _ in pools(2).run(ledger_of, "gpt", zero, "adamw", "bf16", 1):
        rows = {row.tier: row.measured_bytes for row in ledger.states if row.state == "master weights"}
        assert set(rows) == {"device", "nvme"}
        assert all(row.predicted_bytes == row.measured_bytes for row in ledger.states if row.tier == "device")
