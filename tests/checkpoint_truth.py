"""What the checkpoints of tests/peers/checkpoint_job.py must mean, against what a source says of them."""

from __future__ import annotations

import contextlib
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

MOMENTS = ("exp_avg", "exp_avg_sq")
CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
)


@contextlib.contextmanager
def deepspeed_names() -> Iterator[None]:
    """Let DeepSpeed's class names resolve to empty classes for a while."""
    if "deepspeed" in sys.modules:  # the real one
        yield
        return
    for full in CLASSES:
        module, _, name = full.rpartition(".")
        parts = module.split(".")
        for depth in range(len(parts)):
            path = ".".join(parts[: depth + 1])
            sys.modules.setdefault(path, types.ModuleType(path))

        def remember(self: Any, *args: Any) -> None:
            self.args = args

        setattr(sys.modules[module], name, type(name, (), {"__init__": remember, "__module__": module}))
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
            del sys.modules[name]


def raw(path: Path) -> Any:
    """Everything in a file, as torch itself reads it."""
    with deepspeed_names():
        return torch.load(path, weights_only=False, map_location="cpu")


def truth_of(folder: Path) -> list[dict[str, Any]]:
    """What each rank left behind."""
    return torch.load(folder / "truth.pt", weights_only=True)


def folder_of_tag(folder: Path) -> Path:
    return folder / (folder / "latest").read_text()


def problems_of_net(source: Any, truth: dict[str, Any], dtype: str) -> list[str]:
    """Every weight exactly; every state as a plain torch run in fp32 has it, which 16-bit runs only come near to."""
    found, names = [], source.names()
    for name, weight in truth["module"].items():
        if name not in names:
            found.append(f"{name} is not there")
            continue
        one = source.parameters[names[name]]
        held = source.states(one.name)
        if one.shape != tuple(weight.shape) or one.dtype != weight.dtype:
            found.append(f"{name} has shape {one.shape}, dtype {one.dtype}")
        if one.trainable != (name != "frozen.weight"):
            found.append(f"{name} is{'' if one.trainable else ' not'} trainable")
        if "fp32" in held and not torch.equal(source.tensor(one.name, "fp32").to(weight.dtype), weight):
            found.append(f"the master of {name} is not its weight")
        if "param" in held and not torch.equal(source.tensor(one.name, "param"), weight):
            found.append(f"{name} differs")
        if one.trainable and "fp32" not in held:
            found.append(f"{name} has no master: {source.gaps().get((name, 'fp32'))}")
        if not held:
            found.append(f"{name} has no elements")
    for name, buffer in truth["buffers"].items():
        if name not in source.buffers() or not torch.equal(source.buffers()[name], buffer):
            found.append(f"buffer {name} differs")
    if [sorted(group["params"]) for group in source.groups()] != [sorted(group) for group in truth["groups"]]:
        found.append(f"groups hold {[group['params'] for group in source.groups()]}")
    return found + _states(source, truth["states"], dtype)


def _states(source: Any, states: dict[str, dict[str, Any]], dtype: str) -> list[str]:
    found = []
    for name, held in states.items():
        for key, value in held.items():
            if not torch.is_tensor(value) or value.ndim == 0:
                # at stage 0 DeepSpeed's 16-bit wrappers begin with a step of their own
                if dtype == "fp32" and float(source.scalars(name).get(key, -1)) != float(value):
                    found.append(f"{key} of {name} is {source.scalars(name).get(key)}, not {value}")
            elif key == "corner":  # of another shape than the parameter
                found += _corner(source, name, value)
            elif key not in source.states(name):
                found.append(f"{key} of {name} is not there: {source.gaps().get((name, key))}")
            elif not (dtype != "fp32" and "sq" in key) and not _near(source.tensor(name, key), value, dtype):
                found.append(f"{key} of {name} is another one")
    return found


def _corner(source: Any, name: str, value: torch.Tensor) -> list[str]:
    if "corner" in source.states(name):
        same = source.shape_of(name, "corner") == (2, 2) and torch.equal(source.tensor(name, "corner"), value)
        return [] if same else [f"corner of {name} differs"]
    return [] if (name, "corner") in source.gaps() else [f"corner of {name} is neither there nor named as missing"]


def _near(found: torch.Tensor, wanted: torch.Tensor, dtype: str) -> bool:
    if found.shape != wanted.shape:
        return False
    if dtype == "fp32":
        return torch.allclose(found, wanted, rtol=2e-4, atol=1e-6 + 1e-4 * float(wanted.abs().max()))
    cosine = torch.nn.functional.cosine_similarity(found.flatten().double(), wanted.flatten().double(), dim=0)
    return not wanted.any() or float(cosine) > 0.7


def problems_of_pipe(source: Any, ranks: list[dict[str, Any]]) -> list[str]:
    """Every rank's weights and buffers exactly, under the names of the pipeline's module."""
    found, names, buffers = [], source.names(), source.buffers()
    for held in ranks:
        for name, weight in held["params"].items():
            # without ZeRO no file says how a tied module is called
            known = name if name in names else re.sub(r"^tied_modules\.embed", "0", name)
            if known not in names:
                found.append(f"{name} is not there")
                continue
            states = source.states(names[known])
            lost = any("only data-parallel rank 0" in note for note in source.facts()["notes"])
            if "param" in states and not torch.equal(source.tensor(names[known], "param"), weight):
                found.append(f"{name} differs")
            if "fp32" in states and not torch.equal(source.tensor(names[known], "fp32").to(weight.dtype), weight):
                found.append(f"the master of {name} is not its weight")
            found += [
                f"{state} of {name} is neither there nor named as missing"
                for state in ("fp32", *MOMENTS)
                if state not in states and (names[known], state if state == "fp32" or not lost else "fp32") not in source.gaps()
            ]
        found += [f"buffer {name} differs" for name, buffer in held["buffers"].items() if not torch.equal(buffers[name], buffer)]
    return found


def problems_of_moe(source: Any, ranks: list[dict[str, Any]]) -> list[str]:
    """Every rank's weights exactly; expert e of rank r is expert (r mod ep) * local + e of the model."""
    found, names = [], source.names()
    for rank, held in enumerate(ranks):
        local = 4 // held["ep"]
        for name, weight in held["params"].items():
            first = rank % held["ep"] * local
            known = re.sub(r"deepspeed_experts\.(\d+)", lambda match, first=first: f"deepspeed_experts.{first + int(match[1])}", name)
            if known not in names:
                found.append(f"{known} is not there")
                continue
            if not torch.equal(source.tensor(known, "param"), weight):
                found.append(f"{known} differs")
            if not torch.equal(source.tensor(known, "fp32").to(weight.dtype), weight):
                found.append(f"the master of {known} is not its weight")
            found += [f"{state} of {known} is not there" for state in MOMENTS if state not in source.states(known)]
    return found


def problems_of_tensor(source: Any, states: dict[str, dict[str, Any]], dtype: str) -> list[str]:
    """Whole tensors out of slices, as the run without slices has them."""
    found = []
    for name, held in states.items():
        if name not in source.parameters:
            found.append(f"{name} is not there")
            continue
        for state in ("fp32", *MOMENTS):
            if state not in source.states(name):
                found.append(f"{state} of {name} is not there: {source.gaps().get((name, state))}")
            elif not _near(source.tensor(name, state), held[state], dtype):
                found.append(f"{state} of {name} is another one")
        if "param" in source.states(name) and not torch.equal(
            source.tensor(name, "fp32").to(source.parameters[name].dtype), source.tensor(name, "param")
        ):
            found.append(f"the master of {name} is not its weight")
    return found


def problems(name: str, folder: Path) -> list[str]:
    """What a source says wrongly of the checkpoint of one case."""
    from stateroom.checkpoint import open_source

    source, ranks = open_source(folder), truth_of(folder)
    if source.client_state() != {"my_epoch": 3} or source.counters()["global_steps"] != 3:
        return [f"client state {source.client_state()}, counters {source.counters()}"]
    if name.startswith("z"):
        return problems_of_net(source, ranks[0], name.split("_")[1])
    if name.startswith("t"):
        return problems_of_tensor(source, ranks[0]["states"], name.split("_")[1])
    return problems_of_pipe(source, ranks) if name.startswith("p") else problems_of_moe(source, ranks)
