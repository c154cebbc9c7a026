"""Record golden values from a real DeepSpeed; writes *.json beside this file.

Run it as `TORCHDYNAMO_DISABLE=1 python record.py` in an environment that has DeepSpeed, ninja and a C++ compiler.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import types
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.fp16 import loss_scaler
from deepspeed.runtime.zero.muon.original_muon import muon_update

HERE = Path(__file__).parent
NUM_STEPS = 32


def grid(**options: list[Any]) -> list[dict[str, Any]]:
    return [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]


def schedule_cases() -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = []

    def add(name: str, params: list[dict[str, Any]], **more: Any) -> None:
        cases.extend({"name": name, "params": p, "groups": 1, "optimizer": "AdamW", **more} for p in params)

    kinds = ["log", "linear"]
    add("WarmupLR", [{}, {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_num_steps": 4, "warmup_type": "linear"}], optimizer="SGD")
    add("WarmupLR", grid(warmup_min_lr=[0.0, 1e-4], warmup_max_lr=[1e-2], warmup_num_steps=[1, 2, 10], warmup_type=kinds))
    add("WarmupLR", [{"warmup_num_steps": 7}, {"warmup_min_lr": [0.0, 1e-3], "warmup_max_lr": [0.1, 0.2], "warmup_num_steps": 5}], groups=2)
    add("WarmupDecayLR", grid(total_num_steps=[12, 30], warmup_num_steps=[1, 6, 20], warmup_type=kinds, warmup_min_lr=[0.0, 1e-4]))
    two = {"warmup_max_lr": [0.1, 0.2], "warmup_min_lr": [0.0, 0.01]}
    add("WarmupDecayLR", [{"total_num_steps": 25, **two, "warmup_num_steps": 5}], groups=2)
    add(
        "WarmupCosineLR",
        grid(total_num_steps=[5, 30], warmup_min_ratio=[0.0, 0.1], warmup_num_steps=[1, 8], cos_min_ratio=[1e-4, 0.2], warmup_type=kinds),
        groups=2,
    )
    add("LRRangeTest", grid(lr_range_test_step_size=[1, 5], lr_range_test_step_rate=[1.0, 0.3], lr_range_test_staircase=[False, True]))
    add("LRRangeTest", [{"lr_range_test_min_lr": [1e-3, 5e-3], "lr_range_test_step_size": 3}], groups=2)
    bounds = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2}
    for step_sizes in ((7, None), (5, 9), (9, 4), (10, 0)):
        stairs = grid(cycle_first_stair_count=[0, 3], cycle_second_stair_count=[None, 0, 4])
        decays = [{}, {"decay_step_size": 3, "decay_lr_rate": 0.5, "decay_mom_rate": 0.01}, {"decay_step_size": 3, "decay_mom_rate": 0.02}]
        decays.append({"decay_lr_rate": 0.5, "decay_mom_rate": 0.01})
        sizes = {"cycle_first_step_size": step_sizes[0], "cycle_second_step_size": step_sizes[1]}
        add("OneCycle", [{**bounds, **sizes, **s, **d} for s in stairs for d in decays])
    two = {"cycle_min_lr": [1e-3, 2e-3], "cycle_max_lr": [1e-2, 3e-2], "cycle_min_mom": [0.7, 0.8], "cycle_max_mom": [0.9, 0.95]}
    add("OneCycle", [{**two, "cycle_first_step_size": 6}, {**two, "cycle_first_step_size": 6, "cycle_momentum": False}], groups=2)
    add("OneCycle", [{**bounds, "cycle_first_step_size": 6}], optimizer="SGD")
    return cases


def make_optimizer(case: dict[str, Any]) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.01 * (i + 1)} for i in range(case["groups"])]
    return getattr(torch.optim, case["optimizer"])(groups, lr=0.01)


def record_schedules() -> list[dict[str, Any]]:
    """The rates, and for OneCycle the betas, of each group before the first step and after each."""
    cases = schedule_cases()
    for case in cases:
        optimizer = make_optimizer(case)
        scheduler = getattr(lr_schedules, case["name"])(optimizer, **case["params"])
        keys = ["lr", "betas"] if case["name"] == "OneCycle" and case["optimizer"] != "SGD" else ["lr"]
        case.update({key: [] for key in keys})
        for step in range(NUM_STEPS + 1):
            if step:
                scheduler.step()
            for key in keys:
                case[key].append([group[key] for group in optimizer.param_groups])
    return cases


def record_loss_scales() -> list[dict[str, Any]]:
    loss_scaler.dist = types.SimpleNamespace(get_rank=lambda: 0)
    rng = random.Random(24)
    cases = []
    for power, window, hysteresis, consecutive, minimum in itertools.product([4, 16], [1, 2, 5], [1, 2, 3], [False, True], [1, 4]):
        overflows = [rng.random() < rng.choice([0.1, 0.4]) for _ in range(60)]
        scaler = loss_scaler.DynamicLossScaler(2**power, window, minimum, hysteresis, consecutive, raise_error_at_min_scale=False)
        scales, fatal = [], []
        for overflow in overflows:
            # What the real scaler raises on, asked of a copy of its condition's inputs.
            probe = loss_scaler.DynamicLossScaler(2**power, window, minimum, hysteresis, consecutive)
            probe.__dict__.update(scaler.__dict__, raise_error_at_min_scale=True)
            try:
                probe.update_scale(True)
                fatal.append(False)
            except Exception:
                fatal.append(True)
            scaler.update_scale(overflow)
            scales.append(float(scaler.cur_scale))
        settings = {"initial_scale_power": power, "window": window, "hysteresis": hysteresis}
        settings |= {"consecutive_hysteresis": consecutive, "min_scale": minimum}
        cases.append({"settings": settings, "overflows": overflows, "scales": scales, "fatal": fatal})
    return cases


def tensor(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def record_optimizers() -> list[dict[str, Any]]:
    """Weights of 21 elements after 5 steps, and Muon's direction for one gradient and momentum of each shape."""
    decays = [{}, {"weight_decay": 0.1}]
    switches = [{"weight_decay": 0.1, "adamw_mode": False}, {"weight_decay": 0.1, "bias_correction": False}]
    cases = [{"name": "DeepSpeedCPUAdam", "options": options} for options in decays + switches]
    cases += [{"name": name, "options": options} for name in ("DeepSpeedCPULion", "DeepSpeedCPUAdagrad") for options in decays]
    classes = {cls.__name__: cls for cls in (DeepSpeedCPUAdam, DeepSpeedCPULion, DeepSpeedCPUAdagrad)}
    for case in cases:
        start, grads = tensor(0, (21,)), [tensor(1 + step, (21,)) for step in range(5)]
        param = torch.nn.Parameter(start.clone())
        optimizer = classes[case["name"]]([param], lr=0.01, **case["options"])
        for grad in grads:
            param.grad = grad.clone()
            optimizer.step()
        case.update(start=start.tolist(), grads=[grad.tolist() for grad in grads], end=param.tolist())
    for shape in ((6, 6), (4, 11), (11, 4), (2, 3, 5)):
        grad, momentum = tensor(5, shape), tensor(6, shape)
        case = {"name": "muon", "grad": grad.tolist(), "momentum": momentum.tolist()}
        cases.append({**case, "direction": muon_update(grad, momentum, ns_method="gram").tolist()})
    return cases


def write(name: str, cases: list[dict[str, Any]]) -> None:
    versions = {"deepspeed": deepspeed.__version__, "torch": torch.__version__}
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    (HERE / name).write_text(f'{{"versions": {json.dumps(versions)}, "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    write("schedules.json", record_schedules())
    write("loss_scales.json", record_loss_scales())
    write("optimizers.json", record_optimizers())
