"""Which Stateroom module stands for which DeepSpeed module, and why a name of DeepSpeed's has no counterpart."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

NAME = "deepspeed"
PACKAGE = __package__.partition(".")[0]
MIRRORED = ("ops", "runtime", "utils")  # folders of this package that have DeepSpeed's own paths

# path below `deepspeed` -> module below `stateroom` whose names it offers; None: only those listed in NAMES
_MODULES: dict[str, str | None] = {
    "": "",
    "accelerator": None,
    "accelerator.real_accelerator": None,
    "checkpoint": None,
    "checkpoint.utils": None,
    "checkpointing": "engine.checkpointing",
    "comm": "parallel.comm",
    "comm.comm": "parallel.comm",
    "launcher": None,
    "launcher.runner": None,
    "pipe": "pipe",
    "runtime.activation_checkpointing": None,
    "runtime.activation_checkpointing.checkpointing": "engine.checkpointing",
    "runtime.base_optimizer": None,
    "runtime.dataloader": None,
    "runtime.engine": None,
    "runtime.pipe": "pipe",
    "runtime.pipe.module": "pipe",
    "runtime.pipe.topology": "pipe.topology",
    "runtime.zero.utils": None,
    "zero": "zero",
}

# path of a name below `deepspeed` -> (module below `stateroom`, attribute)
_NAMES: dict[str, tuple[str, str]] = {
    "__version__": ("hf.alias", "ANSWERED_VERSION"),
    "version": ("hf.alias", "ANSWERED_VERSION"),
    "DeepSpeedOptimizer": ("zero.optimizer", "ShardedOptimizer"),
    "accelerator.get_accelerator": ("parallel", "get_accelerator"),
    "accelerator.real_accelerator.get_accelerator": ("parallel", "get_accelerator"),
    "checkpoint.utils.clone_tensors_for_torch_save": ("hf.stand_ins", "clone_tensors_for_torch_save"),
    "comm.init_distributed": ("hf.stand_ins", "init_distributed"),
    "launcher.runner.DEEPSPEED_ENVIRONMENT_NAME": ("hf.stand_ins", "DEEPSPEED_ENVIRONMENT_NAME"),
    "runtime.base_optimizer.DeepSpeedOptimizer": ("zero.optimizer", "ShardedOptimizer"),
    "runtime.base_optimizer.ZeROOptimizer": ("zero.optimizer", "ShardedOptimizer"),
    "runtime.dataloader.RepeatingLoader": ("engine.data", "RepeatingLoader"),
    "runtime.engine.DeepSpeedEngine": ("engine", "Engine"),
    "runtime.zero.partition_parameters.get_accelerator": ("parallel", "get_accelerator"),
    "runtime.zero.partition_parameters.zero_wrapper_for_fp_tensor_constructor": ("hf.stand_ins", "zero_wrapper_for_fp_tensor_constructor"),
    "runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": ("zero.optimizer", "ShardedOptimizer"),
    "runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": ("zero.optimizer", "ShardedOptimizer"),
    "runtime.zero.utils.is_zero_param": ("hf.stand_ins", "is_zero_param"),
}

_ULYSSES = "this version keeps sequences whole: leave sp_size of accelerate's ParallelismConfig at 1"
# the longest path that a missing name begins with says why it is missing and what to use
_ABSENT: dict[str, str] = {
    "autotuning": "this engine has no autotuner; `stateroom config show` prints what a config does",
    "checkpoint": "checkpoints are written by engine.save_checkpoint() in Stateroom's own format",
    "compression": "it was for compressed inference; this is a training engine",
    "elasticity": "choose batch sizes yourself: train_batch_size = micro batch x accumulation steps x ranks",
    "inference": "this is a training engine: save with engine.save_16bit_model() and serve the weights elsewhere",
    "launcher": "start ranks with `launcher`, torchrun, or `python -m stateroom.hf accelerate launch`",
    "linear": "use peft for LoRA; it works at every ZeRO stage",
    "module_inject": "no module is exchanged here; whole weights come from engine.module_state_dict()",
    "monitor": "metrics are in run_dir/metrics.jsonl; Trainer's report_to works as usual",
    "ops": "optimizers are torch's; nothing is compiled, so there are no operator builders",
    "profiling": "use torch.profiler, or wall_clock_breakdown in the config",
    "runtime.fp16": "loss scales are engine.loss_scale and engine.scaler",
    "runtime.sequence_parallel": _ULYSSES,
    "sequence": _ULYSSES,
}


@dataclass(frozen=True)
class Target:
    """What stands for one DeepSpeed module: `source` is the full name of ours, None when only single names are offered."""

    path: str
    source: str | None


def target_of(fullname: str) -> Target | None:
    """Return what stands for the module `deepspeed[.path]`, or None when nothing does."""
    path = fullname.removeprefix(NAME).removeprefix(".")
    if path in _MODULES:
        module = _MODULES[path]
        return Target(path, None if module is None else _ours(module))
    if path.partition(".")[0] in MIRRORED and importlib.util.find_spec(_ours(path.partition(".")[0])) and _exists(_ours(path)):
        return Target(path, _ours(path))
    return None


def names_of(path: str) -> dict[str, tuple[str, str]]:
    """Return the single names that the module at `path` offers beside its source: name -> (module, attribute)."""
    prefix = f"{path}." if path else ""
    rest = {name.removeprefix(prefix): place for name, place in _NAMES.items() if name.startswith(prefix)}
    return {name: (_ours(module), attribute) for name, (module, attribute) in rest.items() if "." not in name}


def children_of(path: str) -> list[str]:
    """Return the names of the modules below the one at `path` that the table lists."""
    prefix = f"{path}." if path else ""
    below = {name.removeprefix(prefix).partition(".")[0] for name in _MODULES if name.startswith(prefix) and name != path}
    return sorted(below | (set(MIRRORED) if not path else set()))


def why_absent(path: str, fallback: str = "") -> str:
    """Return one line on what was asked for at `path`, that Stateroom answers here, and what to use instead."""
    parts = path.split(".")
    prefixes = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    reason = next((_ABSENT[prefix] for prefix in prefixes if prefix in _ABSENT), fallback)
    text = f"{NAME}.{path}: Stateroom answers for {NAME} in this process (stateroom.hf.enable) and has nothing under this name"
    return f"{text}; {reason}" if reason else text


def _ours(path: str) -> str:
    return f"{PACKAGE}.{path}" if path else PACKAGE


def _exists(fullname: str) -> bool:
    try:
        return importlib.util.find_spec(fullname) is not None
    except ModuleNotFoundError:  # a parent of it is no package, or not there
        return False
