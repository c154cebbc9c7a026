"""Verdicts, the command, and the JSON Schema: complete, plain when piped, and quick to start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from config_inventory import DEPRECATED, keys
from stateroom.config_schemas import Note, load
from stateroom.config_schemas.cli import main
from stateroom.config_schemas.schema import json_schema

BATCH = {"train_batch_size": 8}
FULL = {
    **BATCH,
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 5,
        "offload_param": {"device": "cpu"},
        "zero_quantized_weights": True,
        "zero_hpz_partition_size": 2,
    },
    "tensorboard": {"enabled": True, "job_name": "a"},
    "wandb": {"enabled": False, "project": "b"},
    "amp": {"enabled": False},
    "gradient_predivide_factor": 2.0,
}


def verdict_of(config: Any) -> dict[str, str]:
    return {verdict.path: str(verdict) for verdict in config.verdicts()}


def test_each_key_that_is_set_has_a_verdict_and_no_other() -> None:
    verdicts = verdict_of(load(FULL, dp_world=1))
    assert verdicts == {
        "train_batch_size": "honoured",
        "gradient_predivide_factor": "no effect here because prescale_gradients is false",
        "zero_optimization.stage": "honoured",
        "zero_optimization.reduce_bucket_size": "no effect here because a unit's flat buffer is the bucket",
        "zero_optimization.zero_quantized_weights": "no effect yet: weights and gradients travel unquantized",
        "zero_optimization.offload_param.device": "honoured",
        "zero_optimization.zero_hpz_partition_size": "no effect yet: parameters are sharded over all ranks",
        "tensorboard.enabled": "no effect yet: monitors come with observability; metrics are in run_dir",
        "tensorboard.job_name": "no effect yet: monitors come with observability; metrics are in run_dir",
        "wandb.enabled": "honoured",
        "wandb.project": "no effect here because wandb is off",
        "amp": verdicts["amp"],
    }
    assert verdicts["amp"].startswith("no effect here because it is switched off")


def test_verdicts_with_defaults_cover_every_value() -> None:
    config = load(FULL, dp_world=1)
    assert set(config.origin) <= {verdict.path for verdict in config.verdicts(defaults=True)}


def test_unsupported_tells_result_from_placement() -> None:
    config = load({**FULL, "mesh": {"tp": 2}, "data_efficiency": {"enabled": True}}, dp_world=1)
    assert [line.split(" = ")[0] for line in config.unsupported("placement")] == ["zero_optimization.zero_hpz_partition_size"]
    result = [line.split(" = ")[0] for line in config.unsupported("result")]
    assert result == ["zero_optimization.zero_quantized_weights", "mesh.tp", "data_efficiency.enabled"]
    assert len(config.unsupported()) == 3 + 1
    assert load(BATCH, dp_world=1).unsupported() == []


@pytest.mark.parametrize(
    "extra",
    [
        {"mesh": {"cp": 2}},
        {"mesh": {"ep": 2}},
        {"mesh": {"dp_replicate": 2}},
        {"tensor_parallel": {"autotp_size": 2}},
        {"sequence_parallel_size": 2},
        {"expert_parallel": {"enabled": True}},
        {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
        {"zero_optimization": {"stage": 2, "zenflow": {}}},
        {"hybrid_engine": {"enabled": True}},
        {"data_types": {"buffer_dtype": "bf16"}},
    ],
)
def test_what_would_be_silently_different_is_named(extra: dict[str, Any]) -> None:
    assert len(load({**BATCH, **extra}, dp_world=2).unsupported()) == 1


@pytest.mark.parametrize(("offload", "verdict"), [("none", "no effect here because nothing is offloaded"), ("cpu", "honoured")])
def test_the_size_of_sub_groups_matters_only_with_offload(offload: str, verdict: str) -> None:
    zero = {"stage": 3, "sub_group_size": 5e8, "offload_optimizer": {"device": offload}}
    assert verdict_of(load({**BATCH, "zero_optimization": zero}, dp_world=1))["zero_optimization.sub_group_size"].startswith(verdict)


def test_offload_of_what_the_stage_does_not_shard_has_no_effect() -> None:
    config = load({**BATCH, "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, dp_world=1)
    assert config.unsupported() == []
    assert verdict_of(config)["zero_optimization.offload_param.device"] == "no effect here because it needs stage 3"


def test_off_or_default_is_not_named() -> None:
    extra = {"tensor_parallel": {"autotp_size": 0}, "expert_parallel": {"enabled": False, "autoep_size": 4}, "mesh": {"tp": 1}}
    assert load({**BATCH, **extra}, dp_world=1).unsupported() == []


def test_notes_are_records_that_print() -> None:
    note = next(note for note in load(FULL, dp_world=1).notes if note.path == "amp")
    assert note == Note("amp", "ignored_block", note.text)
    assert str(note).startswith("amp: switched off")


def test_check_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(BATCH))
    bad.write_text(json.dumps({**BATCH, "x": 1}))
    assert main(["check", str(good)]) == 0
    assert main(["check", str(bad)]) == 1
    assert main(["check", str(tmp_path / "none.json")]) == 1
    assert "none.json does not exist" in capsys.readouterr().out
    assert main(["check"]) == 2
    assert main([]) == 2
    assert main(["check", str(good), "--ranks", "0"]) == 2
    assert main(["check", str(good), "--ranks", "3"]) == 1
    assert main(["--help"]) == 0
    assert "example" in capsys.readouterr().out


def test_check_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(FULL))
    assert main(["check", str(file), "--ranks", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and report["batch"] == ["2 ranks: micro batch 4, accumulation 1, train batch 8 (4 x 2 ranks)"]
    assert {"path": "tensorboard.job_name", "value": "a", "verdict": "no effect yet"}.items() <= report["keys"][8].items()
    file.write_text('{"a": 1, "b": 2}')
    assert main(["check", str(file), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"] and [line.split(":")[0] for line in report["problems"]] == [
        "train_micro_batch_size_per_gpu",
        "a (line 1)",
        "b (line 1)",
    ]


def test_batch_line_counts_only_data_parallel_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"train_micro_batch_size_per_gpu": 4, "mesh": {"tp": 4}}))
    main(["check", str(file), "--ranks", "8"])
    assert "8 ranks: micro batch 4, accumulation 1, train batch 8 (4 x 2 data-parallel ranks)" in capsys.readouterr().out


def test_show_marks_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(FULL, indent=1))
    assert main(["show", str(file), "--ranks", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "gradient_clipping = 1.0: default" in lines
    assert "train_batch_size = 8: line 2" in lines
    assert "train_micro_batch_size_per_gpu = 4: derived" in lines
    assert main(["show", str(file), "--ranks", "2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert load(shown["config"], dp_world=2).to_dict() == shown["config"]
    assert shown["origin"]["gradient_clipping"] == "default"


def test_schema_describes_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    for path in [*keys(), *DEPRECATED]:
        node = schema
        for part in path.split("."):
            node = resolve(schema, node)
            named = part not in ("0", "any")
            node = node["properties"][part] if named else node.get("items") or node["additionalProperties"]
        # a section whose description is the one of its type leaves it to the type
        assert node.get("description") or resolve(schema, node).get("description"), path


def resolve(schema: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    for choice in [node, *node.get("anyOf", [])]:
        if "$ref" in choice:
            return dict(schema["$defs"][choice["$ref"].rsplit("/", 1)[-1]])
        if choice.get("type") in ("object", "array") and ("items" in choice or "additionalProperties" in choice):
            return dict(choice)
    return node


def test_schema_is_closed_and_knows_auto() -> None:
    schema = json_schema()
    assert schema["additionalProperties"] is False
    assert all(part.get("additionalProperties") is False for name, part in schema["$defs"].items() if name != "OpenBlock")
    assert {"const": "auto"} in schema["properties"]["train_batch_size"]["anyOf"]
    assert schema["$defs"]["ZeroOptimization"]["properties"]["stage"]["effect"] == "honoured"
    assert "lr" in schema["$defs"]["Optimizer"]["properties"]["params"]["properties"]


def test_check_starts_without_tensors_or_tables(tmp_path: Path) -> None:
    """Start-up is fast because nothing heavy is loaded; how fast is a benchmark's to say."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(FULL))
    code = (
        "import sys; from stateroom.config_schemas.cli import main; main(['check', sys.argv[1]]); "
        "bad = {'torch', 'numpy', 'rich'} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_needs_no_validator() -> None:
    code = "import sys; from stateroom.config_schemas.cli import main; main(['--help']); sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
