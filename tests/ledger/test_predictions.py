"""Predictions of published runs, verdicts on measured ones, and runs beside each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from stateroom.ledger import Ledger, LedgerRow, TrafficRow
from stateroom.ledger.hardware import known_accelerator, read_cluster
from stateroom.ledger.hardware.device import Accelerator
from stateroom.ledger.job import Job, Layout, problems
from stateroom.ledger.problems import LedgerError
from stateroom.ledger.shapes import read_shape
from stateroom.ledger.step.constants import FITTED, constants_of
from stateroom.ledger.step.fit import fit, page, quantile, residuals
from stateroom.ledger.step.runs import published_runs
from stateroom.ledger.verdict import compare_run, diff_runs, verdict

DOCS = Path(__file__).parents[2] / "docs"


def test_published_runs_are_predicted_within_15_percent_at_the_median_and_30_at_the_90th():
    found = residuals()
    for group in (found, [each for each in found if each.run.fitted], [each for each in found if not each.run.fitted]):
        errors = [abs(each.error) for each in group]
        assert len(errors) >= 20
        assert quantile(errors, 0.5) <= 0.15 and quantile(errors, 0.9) <= 0.30


def test_runs_are_legal_jobs_with_the_published_batch():
    for run in published_runs():
        job = run.job()
        assert not problems(job), run.name
        assert job.layout.sequences == run.batch, run.name
        assert run.source


def test_the_page_is_the_one_that_is_printed():
    assert (DOCS / "ledger_fit.md").read_text().strip() == page(residuals()).strip()


def test_the_fit_finds_its_constants_again():
    """From a start that is off, the search comes back to as good a fit."""
    from dataclasses import replace

    found = fit("tpu", replace(FITTED["tpu"], product=0.5))
    assert found.product == pytest.approx(FITTED["tpu"].product, rel=0.03)


def test_a_family_without_runs_borrows_and_says_so_and_an_unknown_one_is_refused():
    assert constants_of(known_accelerator("mi300x"))[1].startswith("borrowed from hopper")
    own = Accelerator("mine", "own", {"bf16": 1e14}, 8e10, 1e12)
    with pytest.raises(LedgerError, match=r"no constants for mine .*; give it a family"):
        constants_of(own)


def test_a_measured_mfu_is_set_against_runs_of_like_size():
    device = known_accelerator("h100")
    low, high, inside = (verdict(each, device, 405e9, 16384) for each in (0.2, 0.7, 0.41))
    assert (low.standing, high.standing, inside.standing) == ("below", "above", "within")
    assert inside.band.low < 0.41 < inside.band.high
    text = "\n".join(inside.lines())
    assert "arXiv:2407.21783" in text and "Llama 3 405B" in text
    assert verdict(0.4, known_accelerator("l40s"), 1e9, 8).standing == "no band"


def account(measured_master=400):
    states = (
        LedgerRow("parameters", "bf16", "replicated", "device", 200, 200),
        LedgerRow("master weights", "fp32", "sharded over dp_shard", "device", 400, measured_master),
        LedgerRow("optimizer states", "fp32", "sharded over dp_shard", "device", None, 77, "unknown optimizer"),
    )
    traffic = (TrafficRow("all_gather", "parameters", 2, 3, 400, 600, 500),)
    return Ledger("ZeRO stage 1", 0, 8, states, traffic).to_json()


def run_directory(folder, step_s=1.0, tokens=131072, ledger=None, **config):
    folder.mkdir()
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "run_dir": str(folder)}
    resolved = {**sizes, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, **config}
    (folder / "config.resolved.json").write_text(json.dumps(resolved))
    (folder / "environment.json").write_text(json.dumps({"ranks": 8}))
    (folder / "ledger.json").write_text(ledger or account())
    times = [30.0, 5.0, *[step_s] * 5]
    common = {"grad_norm": 1.0, "tokens": tokens, "memory_bytes": 5e10}
    lines = [json.dumps({"step": n, "loss": 3.0 - n / 10, "step_s": each, **common}) for n, each in enumerate(times)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 7, "lo')  # killed while it wrote
    return folder


def base():
    return Job(read_shape("llama3-8b"), read_cluster("8xh100"), Layout(), 8192)


def test_a_run_beside_its_prediction(tmp_path):
    run = run_directory(tmp_path / "run", step_s=20.0, ledger=account(measured_master=500))
    found = compare_run(run, base())
    rows = {row.name: row for row in found.rows}
    assert rows["master weights"].difference == pytest.approx(0.25) and rows["optimizer states"].predicted is None
    assert rows["step time"].measured == 20.0 and rows["tokens a second"].measured == pytest.approx(131072 / 20)
    assert rows["peak of tensors"].measured == 5e10
    text = "\n".join(found.lines())
    for finding in (
        "off by +100 bytes",
        "3 calls counted, 2 predicted",
        "not known to the ledger",
        "times as long as predicted",
        "below the published band",
    ):
        assert finding in text, finding
    assert json.loads(json.dumps(found.to_dict()))["verdict"]["standing"] == "below"


def test_findings_name_the_assumption_that_is_off(tmp_path):
    near = compare_run(run_directory(tmp_path / "a", step_s=2.0), base())
    fast = compare_run(run_directory(tmp_path / "b", step_s=0.01), base())
    short = compare_run(run_directory(tmp_path / "c", step_s=2.0, tokens=70000), base())
    assert any("shorter than its lower bound" in each for each in fast.findings)
    assert any("70,000 tokens, not 131,072" in each for each in short.findings)
    assert not any("tokens, not" in each for each in near.findings)
    alone = compare_run(tmp_path / "a")
    assert any("give --model and --on" in each for each in alone.findings) and alone.verdict is None


def test_two_runs_differ_in_keys_and_figures(tmp_path):
    one = run_directory(tmp_path / "one", step_s=2.0)
    other = run_directory(tmp_path / "other", step_s=1.5, zero_optimization={"stage": 2})
    found = diff_runs(one, other)
    assert found.keys == (("zero_optimization.stage", 1, 2),)
    figures = {name: (first, second) for name, first, second, _ in found.figures}
    assert figures["step time"] == (2.0, 1.5) and figures["master weights"] == (400, 400)
    assert "-25.00 %" in "\n".join(found.lines())


def test_what_is_no_run_directory(tmp_path):
    with pytest.raises(LedgerError, match="is no folder"):
        compare_run(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(LedgerError, match=r"holds none of metrics.jsonl"):
        compare_run(tmp_path / "empty")
    broken = run_directory(tmp_path / "broken")
    (broken / "ledger.json").write_text('{"states": [')
    with pytest.raises(LedgerError, match=r"ledger.json is cut off"):
        compare_run(broken)
    (broken / "ledger.json").unlink()
    assert any("ended before its first step" in each for each in compare_run(broken).findings)
    with pytest.raises(LedgerError, match="two run directories, or two files"):
        diff_runs(broken, broken / "metrics.jsonl")
