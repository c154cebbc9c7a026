"""The ledger: predicted bytes and traffic, from layout and placement alone, equal the measured ones to the byte."""

from __future__ import annotations

import json

import pytest
import torch
from models import batch, build
from stateroom.ledger import UnitRecord, predict_states, predict_traffic
from stateroom.zero.layout import Layout
from stateroom.zero.placement import STAGES
from training import cast, config_for

OPTIMIZERS = {
    "adamw": {"type": "AdamW", "params": {"lr": 1e-3}},
    "amsgrad": {"type": "AdamW", "params": {"lr": 1e-3, "amsgrad": True}},
    "sgd": {"type": "SGD", "params": {"lr": 1e-3}},
    "momentum": {"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9}},
    "lion": {"type": "Lion", "params": {"lr": 1e-4}},
    "adagrad": {"type": "Adagrad", "params": {"lr": 1e-3}},
    "muon": {"type": "Muon", "params": {"lr": 1e-3}},
    "lamb": {"type": "Lamb", "params": {"lr": 1e-3}},
}


def ledgers(model_name, stage, precision, gas, optimizer, extra=None):
    """Return the ledger after training, evaluating and reading in between (which are not part of a step)."""
    import stateroom

    engine, *_ = stateroom.initialize(
        build(model_name), config=config_for(stage, precision, gas, optimizer=OPTIMIZERS[optimizer], **(extra or {}))
    )
    for step in range(3):
        for micro in range(gas):
            engine.backward(engine(*cast(batch(model_name, step, micro, engine.global_rank), precision)))
            engine.step()
        with torch.no_grad():
            engine(*cast(batch(model_name, step, 9, engine.global_rank), precision))
    with torch.no_grad():
        engine(*cast(batch(model_name, 9, 9, engine.global_rank), precision))
    ledger = engine.ledger(show=False)
    engine.destroy()
    return ledger


def assert_balanced(ledger):
    for row in ledger.states:
        assert row.predicted_bytes == row.measured_bytes, row
    for row in ledger.traffic:
        assert (row.predicted_calls, row.predicted_bytes) == (row.counted_calls, row.counted_bytes), row
    assert ledger.measured_bytes > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", range(4))
def test_predicted_equals_measured(pools, stage, precision):
    for gas in (1, 3):
        for ledger in pools(2).run(ledgers, "llama", stage, precision, gas, "adamw"):
            assert_balanced(ledger)
            assert len(ledger.traffic) >= 4


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_states_are_known(pools, optimizer):
    for stage in (0, 1, 3):
        for ledger in pools(2).run(ledgers, "gpt", stage, "fp32", 1, optimizer):
            assert_balanced(ledger)


@pytest.mark.parametrize(
    "extra", [{"deterministic": True}, {"communication_data_type": "bf16"}, {"data_types": {"grad_accum_dtype": "bf16"}}]
)
def test_switches_that_change_traffic_or_bytes(pools, extra):
    for stage in (0, 1, 2, 3):
        for ledger in pools(2).run(ledgers, "gpt", stage, "bf16", 2, "adamw", extra):
            assert_balanced(ledger)


def test_four_ranks_and_one(pools):
    for ranks in (1, 4):
        for ledger in pools(ranks).run(ledgers, "gpt", 3, "bf16", 1, "adamw"):
            assert_balanced(ledger)
            assert bool(ledger.traffic) == (ranks > 1)


def record(numel, world, root=False):
    return UnitRecord("u", Layout.even([("p", (numel,))], world), True, root, 2, 4, 4, 4)


def test_stage_table():
    """The design's table: 2 Psi for stages 0 to 2, 3 Psi for stage 3 (one unit, one micro-batch, 2-byte wire)."""
    psi = 1000
    unit = UnitRecord("u", Layout.even([("p", (psi,))], 4), True, False, 2, 2, 2, 4)
    for stage, expected in enumerate((2, 2, 2, 3)):
        moved = sum(num_bytes for _, num_bytes in predict_traffic([unit], STAGES[stage], 4, 1).values())
        assert moved == expected * psi * 2


def test_states_shrink_with_stage_as_published():
    """Rajbhandari et al. 2020, figure 1: 2+2+12 bytes a parameter; here gradients are fp32, so 2+4+4+8."""
    psi, world = 1000, 4
    totals = []
    for placement in STAGES:
        from stateroom.ledger import OptimizerRecord

        share = psi // world if placement.optimizer.sharded else psi
        adam = OptimizerRecord("AdamW", (), (share,), 4)
        states = predict_states([record(psi, world)], placement, 0, [adam])
        totals.append(sum(states.values()) - 4)  # less the step count
    assert totals == [18 * psi, 6 * psi + 12 * psi // 4, 2 * psi + 16 * psi // 4, 18 * psi // 4]


def test_an_unknown_optimizer_is_not_guessed():
    from stateroom.ledger import OptimizerRecord

    states = predict_states([record(8, 2)], STAGES[1], 0, [OptimizerRecord("Mine", (), (4,), 4)])
    assert states["optimizer states"] is None


def printed(stage):
    import contextlib
    import io

    import stateroom

    engine, *_ = stateroom.initialize(build("gpt"), config=config_for(stage, "fp32", 1))
    engine.backward(engine(*batch("gpt", 0, 0, engine.global_rank)))
    engine.step()
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        ledger = engine.ledger()
    engine.destroy()
    return out.getvalue(), ledger.to_json()


def test_the_first_rank_prints_tables_that_add_up(pools):
    (text, data), (silent, _) = pools(2).run(printed, 3)
    assert "parameters" in text and "reduce_scatter" in text and silent == ""
    data = json.loads(data)
    assert sum(row["measured_bytes"] for row in data["states"]) == data["measured_bytes"] == data["predicted_bytes"]


def run_directory(folder):
    """Train two steps with a run directory."""
    import stateroom

    engine, *_ = stateroom.initialize(build("gpt"), config=config_for(3, "fp32", 1, run_dir=folder))
    for step in range(2):
        engine.backward(engine(*batch("gpt", step, 0, engine.global_rank)))
        engine.step()
    engine.destroy()


def test_a_run_directory_holds_what_the_contract_names(pools, tmp_path):
    from stateroom.config_schemas import load
    from stateroom.parallel.ring import read_ring

    pools(2).run(run_directory, str(tmp_path / "run"))
    run = tmp_path / "run"
    assert load(str(run / "config.resolved.json"), ranks=2).zero_optimization.stage == 3
    assert json.loads((run / "environment.json").read_text())["ranks"] == 2
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [s["step"] for s in steps] == [1, 2]
    assert all({"loss", "lr", "grad_norm", "samples", "tokens", "step_s", "memory_bytes"} <= s.keys() for s in steps)
    ledger = json.loads((run / "ledger.json").read_text())
    assert ledger["measured_bytes"] == ledger["predicted_bytes"] > 0
    for rank in range(2):
        records = read_ring(run / "trace" / f"rank_{rank}.ring")
        assert {"parameters", "gradients"} <= {r.state for r in records} and all(r.end_s for r in records)
