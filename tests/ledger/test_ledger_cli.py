"""The `ledger` and `plan` commands: what they print, their exit statuses, and that they start without torch."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from stateroom.ledger.cli import _COMMANDS, main
from stateroom.ledger.hardware import read_hardware
from stateroom.ledger.plan.cli import main as plan

JOB = ["--model", "llama3-8b", "--on", "8xh100", "--batch", "64"]


def out(capsys, command, *argv):
    status = command(list(argv))
    said = capsys.readouterr()
    return status, said.out, said.err


def test_the_account_adds_up_as_json(capsys):
    status, text, _ = out(capsys, main, *JOB, "--zero", "3", "--json", "--tokens", "15T", "--price", "2")
    data = json.loads(text)
    assert status == 0 and data["tokens_per_step"] == 64 * 8192
    for account in (
        data["time"]["parts"],
        data["model"]["parameters"],
        data["recovery"]["checkpoint"],
        data["memory"]["instants"]["backward"],
        data["cost"],
    ):
        assert account["total"] == pytest.approx(sum(term["value"] for term in account["terms"]))
    assert data["memory"]["peak_bytes"] == max(each["total"] for each in data["memory"]["instants"].values())
    assert data["time"]["parts"]["switches"]["attention counted"] == "causal"


def test_sections_conventions_and_a_job_that_does_not_fit(capsys):
    status, text, _ = out(capsys, main, *JOB, "--zero", "1", "--micro-batch", "8", "--section", "memory", "--gib")
    assert status == 1 and "GiB" in text and "traffic" not in text  # 8 sequences of activations are too many
    _, causal, _ = out(capsys, main, *JOB, "--zero", "3", "--section", "flops", "--json")
    _, full, _ = out(capsys, main, *JOB, "--zero", "3", "--section", "flops", "--json", "--attention", "full")
    assert json.loads(full)["flops"]["per_token"] > json.loads(causal)["flops"]["per_token"]


def test_a_batch_in_tokens_is_rounded_and_said(capsys):
    _, text, _ = out(capsys, plan, "--model", "llama3-70b", "--on", "128x8 h100", "--batch-tokens", "4M", "--top", "1")
    assert "a batch of 4M tokens is taken as 512 sequences of 8,192: 4,194,304 tokens" in text
    assert "1. TP 4, DP 256, ZeRO 3" in text and "neighbours of 1:" in text


def test_plan_writes_a_config_and_a_report(capsys, tmp_path):
    config, report = tmp_path / "ds.json", tmp_path / "plan.html"
    status, text, _ = out(capsys, plan, *JOB, "--emit", str(config), "--html", str(report), "--explain")
    assert status == 0 and "4. CP 1" in text and report.read_text().startswith("<!doctype html>")
    status, text, _ = out(capsys, main, "--model", "llama3-8b", "--on", "8xh100", "--config", str(config), "--ranks", "8", "--json")
    data = json.loads(text)
    assert status == 0 and data["layout"]["zero"] == json.loads(config.read_text())["zero_optimization"]["stage"]
    _, printed, _ = out(capsys, plan, *JOB, "--emit", "-")
    assert json.loads(printed) == json.loads(config.read_text())
    _, printed, _ = out(capsys, plan, *JOB, "--json")
    assert json.loads(printed)["config"] == json.loads(config.read_text())


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--model", "llama3-8", "--on", "8xh100"], "unknown model 'llama3-8'; nearest: llama3-8b"),
        (["--model", "llama3-8b", "--on", "8xh1000"], "unknown accelerator 'h1000'; nearest: h100"),
        (["--model", "llama3-8b", "--on", "8xh100", "--tp", "3"], "8 devices do not divide by tp 3"),
        (["--model", "llama3-8b", "--on", "2x8 h100", "--tp", "16"], "tp 16 leaves the 8 devices that fast links join"),
        (["--model", "llama3-8b", "--on", "8xh100", "--batch", "9"], "does not divide by dp 8 x micro-batch 1 = 8; nearest: 8 or 16"),
        (["--model", "llama3-8b"], "name the hardware"),
        (["--on", "8xh100"], "name a model"),
        (["--model", "llama3-8b", "--on", "8xh100", "--batch", "8", "--batch-tokens", "4M"], "not both"),
        (["derive", "mfu", "tokens=1e12"], "mfu does not follow from tokens"),
        (["derive", "mfu", "tokens"], "write NAME=VALUE"),
        (["bubble", "--pp", "4", "--microbatches", "8", "--times", "1,2"], "write three numbers"),
        (["compare", "/nowhere"], "is no folder"),
        (["verdict", "0.4", "--on", "8xh100"], "name a model"),
    ],
)
def test_what_cannot_be_answered_is_one_clear_message(capsys, argv, says):
    status, text, error = out(capsys, main, *argv)
    assert status == 1 and says in error and text == "" and "Traceback" not in error


@pytest.mark.parametrize("argv", [["--model"], ["--attention", "half"], ["bubble"], ["--section", "everything"]])
def test_usage_errors_have_status_2(capsys, argv):
    assert out(capsys, main, *argv)[0] == 2


@pytest.mark.parametrize("command", [None, *_COMMANDS])
def test_every_command_has_help_with_an_example(capsys, command):
    status, text, _ = out(capsys, main, *([command] if command else []), "--help")
    assert status == 0 and "stateroom ledger" in text and "example" in text


def test_tables_of_models_hardware_schedules_and_bands(capsys):
    assert "deepseek-v3" in out(capsys, main, "models")[1]
    assert "layer: mlp in" in out(capsys, main, "models", "llama3-8b")[1]
    assert json.loads(out(capsys, main, "models", "llama3-8b", "--json")[1])["parameters"]["total"] == 8030261248
    assert "79.2 GiB usable" in out(capsys, main, "hardware", "h100")[1]
    rows = json.loads(out(capsys, main, "bubble", "--pp", "8", "--microbatches", "24", "--chunks", "2", "--json")[1])
    assert {row["schedule"]: row["simulated_over_ideal"] for row in rows}["1f1b"] == pytest.approx(7 / 48)
    status, text, _ = out(capsys, main, "verdict", "41", "--params", "405B", "--on", "2048x8 h100")
    assert status == 0 and "within the published band" in text
    assert out(capsys, main, "verdict", "12", "--params", "405B", "--on", "2048x8 h100")[0] == 1


def test_two_accounts_written_as_json_are_compared(capsys, tmp_path):
    for name, stage in (("a", "1"), ("b", "3")):
        (tmp_path / f"{name}.json").write_text(out(capsys, main, *JOB, "--zero", stage, "--json")[1])
    status, text, _ = out(capsys, main, "diff", str(tmp_path / "a.json"), str(tmp_path / "b.json"))
    assert status == 0 and "zero: 1 -> 3" in text and "peak memory" in text


def test_calibration_measures_this_machine(capsys, tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "here.hjson"
    path.write_text(out(capsys, main, "calibrate", "--device", "cpu", "--seconds", "0.01")[1])
    assert read_hardware(path).peak_flops("fp32") > 1e8
    found = json.loads(out(capsys, main, "calibrate", "--device", "cpu", "--seconds", "0.01", "--json")[1])
    assert found["products"]["fp32"] > 1e8 and found["memory_bytes_s"] > 1e8 and found["usable_bytes"] > found["overhead_bytes"] > 0
    assert "no device 'nothing' here" in out(capsys, main, "calibrate", "--device", "nothing")[2]


def test_the_commands_need_no_torch_and_start_at_once():
    """The bound is generous, for a machine that does other things; without torch a start is well below it."""
    code = (
        "import sys, time; began = time.process_time()\n"
        "from stateroom.__main__ import main\n"
        "main(['ledger', '--model', 'llama3-8b', '--on', '8xh100', '--json'])\n"
        "main(['plan', '--model', 'llama3-8b', '--on', '8xh100', '--batch', '64', '--fix', 'tp=1', '--json'])\n"
        "print(sorted({'torch', 'numpy', 'pydantic', 'rich'} & set(sys.modules)), time.process_time() - began < 3)\n"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] True"
    assert time.monotonic() - began < 60
