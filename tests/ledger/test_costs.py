"""What steps that ran have cost: parts that sum to the step, FLOPs, MFU with its denominator, the peak; and a run beside its prediction."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from dryrun_job import SEQ, SIZES, build, config_of, take_step  # noqa: E402
from stateroom.ledger.commands import _job_of_run  # noqa: E402
from stateroom.ledger.figures import count_flops, peak_of_device  # noqa: E402
from stateroom.ledger.flops import training_flops_per_token  # noqa: E402
from stateroom.ledger.problems import LedgerError  # noqa: E402
from stateroom.ledger.shapes import read_shape  # noqa: E402
from stateroom.ledger.verdict import compare_run  # noqa: E402

HARDWARE = {
    "name": "small", "peak": {"bf16": 1e11, "fp32": 5e10}, "usable_bytes": 8e9, "hbm_bytes_s": 1e10, "link_bytes_s": 1e9,
    "family": "calibrated",
}  # fmt: skip


def trained(run_dir, stage, gas, hardware=None):
    engine = build(config_of(stage, "bf16", gas, run_dir=run_dir))
    for _ in range(4):
        take_step(engine)
    ledger = engine.ledger(show=False, hardware=hardware)
    engine.destroy()
    return ledger


@pytest.fixture(scope="module")
def run(pools, tmp_path_factory):
    folder = tmp_path_factory.mktemp("costs")
    (folder / "here.json").write_text(json.dumps(HARDWARE))
    ledger, _ = pools(2).run(trained, str(folder / "run"), 3, 2, str(folder / "here.json"))
    return folder, ledger


def test_the_parts_of_a_step_sum_to_it(run):
    folder, ledger = run
    step = ledger.step
    assert step.steps == 3 and math.isclose(sum(step.parts.values()), step.seconds, rel_tol=1e-9)
    assert {"forward", "backward", "step", "outside the engine", "waiting for all_gather of parameters"} <= step.parts.keys()
    assert math.isclose(step.exposed_s, sum(s for name, s in step.parts.items() if name.startswith("waiting for")), rel_tol=1e-9)
    assert all(seconds > 0 for seconds in step.parts.values())
    for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()[1:]:
        record = json.loads(line)
        assert math.isclose(sum(record["account"].values()), record["account_s"], rel_tol=1e-9)
        assert record["account_step"] == record["step"] and 0 < record["exposed_s"] < record["account_s"]
        assert record["step_s"] == record["account_s"]


def test_flops_and_utilisation_name_their_denominator(run):
    _, ledger = run
    step = ledger.step
    tokens = 2 * 2 * 2 * SEQ  # ranks, micro-batches, sequences
    shape = read_shape({"name": "example", "vocab": 512, "hidden": 128, "layers": 3, "heads": 4, "kv_heads": 2, "ffn": 352})
    assert step.tokens == tokens and step.seq == SEQ and SIZES["dim"] == shape.hidden
    assert step.flops.model == pytest.approx(tokens * training_flops_per_token(shape, SEQ))
    assert step.mfu == pytest.approx(step.flops.model / (step.seconds * 2 * 1e11)) and step.hfu == step.mfu
    assert step.denominator == "0.1 TFLOP/s bf16, dense, of small"
    text = str(ledger)
    assert step.memory.predicted_phase == "backward" and 5e6 < step.memory.predicted_bytes < 2e7
    assert "MFU" in text and "of 0.1 TFLOP/s bf16" in text and "exposed communication" in text and "reached in" in text


def test_the_run_directory_carries_the_figures(run):
    folder, ledger = run
    kept = json.loads((folder / "run" / "ledger.json").read_text())
    assert kept["step"]["flops"]["model"] == ledger.step.flops.model and kept["model"]["hidden"] == 128
    assert kept["step"]["mfu"] is None and "no peak is published for this CPU" in kept["step"]["denominator"]
    assert kept["step"]["memory"]["num_bytes"] >= kept["step"]["memory"]["before_bytes"] > 0
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["peak_bytes"] for record in records] == sorted(record["peak_bytes"] for record in records)
    assert records[-1]["flops"] == kept["step"]["flops"]["model"]


def arguments(folder, **given):
    import argparse

    names = ("model", "on", "ranks", "network", "overhead", "seq")
    return argparse.Namespace(run=str(folder / "run"), attention="causal", **{**dict.fromkeys(names), **given})


def test_a_real_run_beside_its_prediction(run, tmp_path):
    """Sizes, sequence and ranks are the run's own; states and traffic are equal, and what is off is said."""
    folder, _ = run
    job = _job_of_run(arguments(folder, on=str(folder / "here.json")))
    assert job.shape.hidden == 128 and job.seq == SEQ and job.cluster.devices == 2
    found = compare_run(folder / "run", job)
    rows = {row.name: row for row in found.rows}
    for name in ("parameters", "gradients", "master weights", "optimizer states", "tokens of a step", "all_gather of parameters a step"):
        assert rows[name].difference == 0, name
    assert rows["FLOPs of a step"].difference == pytest.approx(0, abs=1e-9)
    parts = [rows[f"  {name}"].measured for name in ("forward and backward", "exposed communication", "optimizer", "outside the engine")]
    assert sum(parts) == pytest.approx(rows["step time"].measured, rel=0.3)  # medians of parts
    text = "\n".join(found.lines())
    assert "most of it is" in text or "within 15 %" in text
    assert "how far a CPU process has grown" in text


def test_a_dry_run_stands_beside_the_measured_peak(run, tmp_path):
    from stateroom.ledger.dryrun.collect import report_of
    from stateroom.ledger.dryrun.run import dry_run

    folder, _ = run
    script = str(HERE / "dryrun_job.py")
    report = report_of(dry_run(script, [json.dumps(config_of(3, "bf16", 2))], 2, backend="gloo"), script)
    (tmp_path / "dry.json").write_text(report.to_json())
    rows = {row.name: row for row in compare_run(folder / "run", None, tmp_path / "dry.json").rows}
    assert rows["peak of tensors, dry run"].predicted == report.peak.total
    assert rows["reduce_scatter of gradients a step, dry run"].difference == 0
    (tmp_path / "dry.json").write_text("{}")
    with pytest.raises(LedgerError, match="no file of `stateroom dryrun --json`"):
        compare_run(folder / "run", None, tmp_path / "dry.json")


def test_what_takes_longer_than_predicted_is_named(run, tmp_path):
    """The same run with one part made long: that part and the assumption behind it are named."""
    folder, _ = run
    job = _job_of_run(arguments(folder, on=str(folder / "here.json")))
    for part, says in (
        ("forward", "kernels are slower"),
        ("waiting for all_gather of parameters", "links or overlap are not as assumed"),
        ("step", "memory is slower than its constant"),
        ("outside the engine", "the data loader or the script's own work"),
    ):
        copy = tmp_path / part
        copy.mkdir()
        for name in ("config.resolved.json", "environment.json", "ledger.json"):
            (copy / name).write_text((folder / "run" / name).read_text())
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        for line in lines[1:]:
            line["account"][part] += 100.0
            line["step_s"] += 100.0
        (copy / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        assert any(says in each for each in compare_run(copy, job).findings), part


class Event:
    """Stands for an accelerator's event: passed only once `now` has moved on."""

    now = 0.0

    def record(self):
        self.at = Event.now

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


def test_an_accelerators_step_is_accounted_when_the_next_one_ends():
    from stateroom.parallel.clock import DeviceClock

    clock = DeviceClock(Event)

    def step(number):
        began = clock.mark()
        Event.now += 3
        waits = clock.mark()
        Event.now += 2
        clock.waited("all_gather of parameters", waits)
        Event.now += 1
        clock.phase("forward", began)
        Event.now += 4
        return clock.end_step(number)

    assert step(1) is None and step(2) is None
    account = step(3)
    assert account.step == 2 and account.seconds == 10
    assert account.parts == {"forward": 4, "waiting for all_gather of parameters": 2, "outside the engine": 4}


def test_a_hosts_step_keeps_sums_and_no_marks():
    from stateroom.parallel.clock import HostClock

    moment = 0.0
    clock = HostClock(lambda: moment)
    assert clock.end_step(0) is None
    for _ in range(3):
        began, waits = clock.mark(), clock.mark()
        moment += 2
        clock.waited("all_gather of parameters", waits)
        moment += 5
        clock.phase("forward", began)
    moment += 1
    account = clock.end_step(1)
    assert account.parts == {"forward": 15, "waiting for all_gather of parameters": 6, "outside the engine": 1}
    assert account.seconds == 22 and account.exposed_s == 6


def test_a_long_evaluation_between_steps_is_not_accounted_on_an_accelerator(monkeypatch):
    from stateroom.parallel import clock as module

    monkeypatch.setattr(module, "_MOST_MARKS", 10)
    clock = module.DeviceClock(Event)
    clock.end_step(0)
    for _ in range(50):
        clock.waited("all_gather of parameters", clock.mark())
    assert clock.end_step(1) is None and clock.end_step(2) is None and clock.end_step(3) is not None


def test_flops_where_the_module_does_not_say_its_sizes():
    plain = count_flops(None, 1000, 0, 10, "full")
    assert plain.model == 6 * 1000 * 10 and plain.hardware == 8 * 1000 * 10 and "attention is not counted" in plain.how


def test_peaks_by_torchs_names_of_devices():
    assert peak_of_device("NVIDIA H100 80GB HBM3", "bf16")[0] == pytest.approx(989e12, rel=0.01)
    assert peak_of_device("NVIDIA A100-SXM4-80GB", "bf16")[0] == pytest.approx(312e12, rel=0.01)
    assert peak_of_device("NVIDIA H200", "bf16")[0] == pytest.approx(989e12, rel=0.01)
    assert peak_of_device("Some Device 9", "bf16")[0] is None
    with pytest.raises(LedgerError, match="unknown accelerator"):
        peak_of_device("x", "bf16", "nothing9")
