"""`deepspeed` means Stateroom after enable(): every name is found once, what is missing says so, and nothing is left by disable()."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys
import types

import pytest
import stateroom
import stateroom.hf
from packaging.version import Version
from stateroom.config_schemas import load
from stateroom.errors import RankError
from stateroom.hf import alias, stand_ins
from stateroom.hf.table import children_of, names_of, target_of

# section by section what Hugging Face's libraries, peft, Lightning and scripts import: name -> the object that it must be
SAME = {
    "DeepSpeedEngine": "stateroom.engine:Engine",
    "DeepSpeedConfigError": "stateroom.errors:ConfigError",
    "initialize": "stateroom.engine:initialize",
    "init_distributed": "stateroom.parallel:init_distributed",
    "add_config_arguments": "stateroom.engine:add_config_arguments",
    "get_accelerator": "stateroom.parallel:get_accelerator",
    "OnDevice": "stateroom.zero:OnDevice",
    "accelerator.get_accelerator": "stateroom.parallel:get_accelerator",
    "checkpoint.utils.clone_tensors_for_torch_save": "stateroom.hf.stand_ins:clone_tensors_for_torch_save",
    "checkpointing.checkpoint": "stateroom.engine.checkpointing:checkpoint",
    "runtime.activation_checkpointing.checkpointing.configure": "stateroom.engine.checkpointing:configure",
    "comm.all_reduce": "torch.distributed:all_reduce",
    "comm.init_distributed": "stateroom.hf.stand_ins:init_distributed",
    "comm.comm.get_rank": "stateroom.parallel.comm:get_rank",
    "launcher.runner.DEEPSPEED_ENVIRONMENT_NAME": "stateroom.hf.stand_ins:DEEPSPEED_ENVIRONMENT_NAME",
    "ops.adam.DeepSpeedCPUAdam": "stateroom.engine.optim.deepspeed_names:DeepSpeedCPUAdam",
    "ops.adam.FusedAdam": "stateroom.engine.optim.deepspeed_names:FusedAdam",
    "ops.adagrad.DeepSpeedCPUAdagrad": "stateroom.engine.optim.deepspeed_names:DeepSpeedCPUAdagrad",
    "ops.lion.DeepSpeedCPULion": "stateroom.engine.optim.deepspeed_names:DeepSpeedCPULion",
    "runtime.base_optimizer.DeepSpeedOptimizer": "stateroom.zero.optimizer:ShardedOptimizer",
    "runtime.dataloader.RepeatingLoader": "stateroom.engine.data:RepeatingLoader",
    "runtime.engine.DeepSpeedEngine": "stateroom.engine:Engine",
    "runtime.lr_schedules.VALID_LR_SCHEDULES": "stateroom.engine.schedules:VALID_LR_SCHEDULES",
    "runtime.lr_schedules.WarmupLR": "stateroom.engine.schedules:WarmupLR",
    "pipe.LayerSpec": "stateroom.pipe.specs:LayerSpec",
    "pipe.PipelineModule": "stateroom.pipe.module:PipelineModule",
    "runtime.pipe.engine.PipelineEngine": "stateroom.engine.pipeline:PipelineEngine",
    "runtime.pipe.topology.PipeDataParallelTopology": "stateroom.pipe.topology:PipeDataParallelTopology",
    "runtime.utils.move_to_device": "stateroom.engine.batches:to_device",
    "runtime.utils.see_memory_usage": "stateroom.engine.progress:see_memory_usage",
    "runtime.zero.GatheredParameters": "stateroom.zero.access:GatheredParameters",
    "runtime.zero.partition_parameters.Init": "stateroom.zero.init:Init",
    "runtime.zero.partition_parameters.ZeroParamStatus": "stateroom.zero.parameter:ZeroParamStatus",
    "runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": "stateroom.zero.optimizer:ShardedOptimizer",
    "utils.groups.get_data_parallel_world_size": "stateroom.utils.groups:get_data_parallel_world_size",
    "utils.logger": "stateroom.utils.logging:logger",
    "utils.safe_get_full_grad": "stateroom.zero.access:safe_get_full_grad",
    "utils.set_z3_leaf_modules": "stateroom.zero.leaf:set_z3_leaf_modules",
    "zero.GatheredParameters": "stateroom.zero.access:GatheredParameters",
    "zero.Init": "stateroom.zero.init:Init",
    "zero.register_external_parameter": "stateroom.zero.access:register_external_parameter",
}


@pytest.fixture(autouse=True)
def undecided(monkeypatch):
    """Other tests of this process import the libraries without the alias; here none of them is used."""
    for name in ("accelerate.utils", "accelerate.accelerator", "transformers.trainer", "transformers.integrations.deepspeed"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def enabled(undecided):
    stateroom.hf.enable()
    yield importlib.import_module("deepspeed")
    stateroom.hf.disable()


@pytest.mark.parametrize("name", SAME)
def test_a_name_is_the_same_object_by_attribute_and_by_import(enabled, name):
    module, _, attribute = SAME[name].partition(":")
    wanted = getattr(importlib.import_module(module), attribute)
    found = enabled
    for part in name.split("."):
        found = getattr(found, part)
    assert found is wanted
    parent, _, last = f"deepspeed.{name}".rpartition(".")
    namespace: dict[str, object] = {}
    exec(f"from {parent} import {last} as found\nimport {parent}", namespace)
    assert namespace["found"] is wanted


def test_the_version_is_deepspeeds_and_says_who_answers(enabled):
    for text in (importlib.metadata.version("deepspeed"), enabled.__version__):
        assert Version(text) >= Version("0.19.8") and "stateroom" in text
    assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"
    assert "deepspeed" in {found.metadata["Name"] for found in importlib.metadata.distributions()}
    assert importlib.util.find_spec("deepspeed") is not None


def test_every_module_of_the_table_can_be_listed_and_imported_with_a_star(enabled):
    seen = []

    def walk(path):
        module = importlib.import_module(f"deepspeed.{path}".rstrip("."))
        for name in module.__all__:
            assert getattr(module, name) is not None, (path, name)
        exec(f"from {module.__name__} import *", {})
        seen.append(path)
        for child in children_of(path):
            walk(f"{path}.{child}".lstrip("."))

    walk("")
    assert len(seen) > 20 and {"zero", "runtime.engine", "launcher.runner"} <= set(seen)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("init_inference", "training engine"),
        ("moe", "experts"),
        ("ops.transformer", "optimizers are torch's"),
        ("runtime.sequence_parallel.ulysses_sp", "sp_size"),
        ("utils.groups.get_model_parallel_group", "its size is 1"),
        ("zero.TiledLinear", ""),
        ("no_such_thing", ""),
    ],
)
def test_what_is_missing_names_itself_and_who_answers(enabled, name, hint):
    parent, _, last = f"deepspeed.{name}".rpartition(".")
    texts = []
    with pytest.raises(ImportError) as error:
        importlib.import_module(f"deepspeed.{name}")
    texts.append(str(error.value))
    with pytest.raises(ImportError) as error:
        exec(f"from {parent} import {last}", {})
    texts.append(str(error.value))
    found = enabled
    with pytest.raises(AttributeError) as error:
        for part in name.split("."):
            found = getattr(found, part)
    texts.append(str(error.value))
    for text in texts:
        assert text.startswith("deepspeed.") and "Stateroom answers for deepspeed" in text and hint in text


def test_what_is_set_on_a_module_stays_on_it(enabled):
    enabled.zero.note = 1
    assert enabled.zero.note == 1 and not hasattr(stateroom.zero, "note")


def test_enable_and_disable_are_idempotent_and_leave_nothing():
    path, modules = list(sys.meta_path), set(sys.modules)
    absent = importlib.util.find_spec("deepspeed") is None
    stateroom.hf.enable()
    stateroom.hf.enable()
    assert len(sys.meta_path) == len(path) + 1
    assert importlib.import_module("deepspeed.zero").Init is stateroom.zero.Init
    stateroom.hf.disable()
    stateroom.hf.disable()
    assert sys.meta_path == path and not {name for name in set(sys.modules) - modules if name.startswith("deepspeed")}
    if absent:
        with pytest.raises(ModuleNotFoundError, match="No module named 'deepspeed'"):
            importlib.import_module("deepspeed")
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version("deepspeed")


@pytest.mark.parametrize("name", ["deepspeed", "deepspeed.runtime"])
def test_another_deepspeed_is_refused(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    with pytest.raises(stateroom.hf.AliasError, match=rf"another '{name}'.*call enable\(\) before"):
        stateroom.hf.enable()
    assert not any(isinstance(finder, alias.AliasFinder) for finder in sys.meta_path)


def test_other_packages_are_left_to_other_finders(enabled):
    finder = sys.meta_path[0]
    assert finder.find_spec("deepspeed_extra") is None and finder.find_spec("torch") is None
    names = types.SimpleNamespace(name="torch")
    assert list(finder.find_distributions(names)) == []


def test_the_table_offers_single_names_only_where_they_belong():
    assert target_of("deepspeed.no.such") is None and target_of("deepspeed.hf") is None
    assert set(names_of("launcher.runner")) == {"DEEPSPEED_ENVIRONMENT_NAME"}


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_ranks_that_accelerate_would_not_count_are_refused(monkeypatch, backend):
    """Without an accelerator it names no backend; where one is named, or nothing was launched, the call goes through."""
    asked = []
    monkeypatch.setattr(stand_ins, "_init_distributed", lambda *args, **kwargs: asked.append((args, kwargs)))
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    for name, value in {"ACCELERATE_USE_DEEPSPEED": "true", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    if backend is None:
        with pytest.raises(RankError, match=r"2 ranks .* use_cpu=True"):
            stand_ins.init_distributed(dist_backend=None, auto_mpi_discovery=False)
        monkeypatch.setenv("WORLD_SIZE", "1")
    stand_ins.init_distributed(dist_backend=backend, auto_mpi_discovery=False)
    assert asked == [((backend,), {"auto_mpi_discovery": False})]


def test_a_resolved_config_answers_like_the_dict_that_scripts_expect():
    config = load({"train_batch_size": 2, "zero_optimization": {"stage": 3}})
    assert config.get("zero_optimization", {}).get("stage", None) == 3 == config["zero_optimization"]["stage"]
    assert config.get("no_such_key") is None and config.get("get", 7) == 7
    with pytest.raises(KeyError):
        config["no_such_key"]


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


def test_importing_stateroom_enables_nothing_and_the_alias_alone_needs_no_torch():
    code = (
        "import sys, importlib.util, stateroom, stateroom.hf\n"
        "before = importlib.util.find_spec('deepspeed') is None\n"
        "stateroom.hf.enable(); import deepspeed\n"
        "print(before, 'torch' in sys.modules, deepspeed.__version__)"
    )
    assert run(code).startswith("True False 0.19.8")


@pytest.mark.parametrize(
    "line",
    ["import accelerate", "from transformers import Trainer", pytest.param("import transformers.modeling_utils", marks=pytest.mark.full)],
)
def test_libraries_that_have_decided_are_refused(line):
    printed = run(f"{line}\nimport stateroom.hf\nstateroom.hf.enable()")
    assert "AliasError" in printed and "found no DeepSpeed" in printed and "python -m stateroom.hf" in printed


def test_libraries_that_have_not_decided_yet_are_allowed():
    code = (
        "import transformers\nimport stateroom.hf\nstateroom.hf.enable()\n"
        "from transformers.integrations.deepspeed import is_deepspeed_available\nfrom accelerate.utils import DummyOptim\n"
        "print(is_deepspeed_available(), DummyOptim.__name__)"
    )
    assert run(code).split()[-2:] == ["True", "DummyOptim"]
