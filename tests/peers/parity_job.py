"""Train the same cases with one engine package and write the losses: started by torchrun, once for each package."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import batch, build
from uncompiled import switch_off_compiling

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def config_for(case: dict[str, Any]) -> dict[str, Any]:
    """The config of one case; nothing in it is compiled, so that DeepSpeed runs without a compiler."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case["accumulation"],
        "gradient_clipping": 1.0,
        "steps_per_print": 1000000,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.99], "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 5, "warmup_type": "linear"}},
        "zero_optimization": {"stage": case["stage"]},
    }
    if case["dtype"] != "fp32":
        config[case["dtype"]] = {"enabled": True}
    if case["dtype"] == "fp16":
        config["fp16"].update(initial_scale_power=8, loss_scale_window=1000)
    return {**config, **case.get("config", {})}


def train(package: Any, case: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the mean loss over ranks and micro-batches and the gradient norm of each step (DeepSpeed has none at fp32 stage 0)."""
    model = build(case["model"])
    ours = {"units": {"min_numel": 0}} if package.__name__ == "stateroom" else {}
    engine, *_ = package.initialize(model=model, model_parameters=model.parameters(), config=config_for(case) | ours)
    losses, norms = [], []
    for step in range(case["steps"]):
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(case["accumulation"]):
            inputs, targets = batch(case["model"], step % case["period"], micro, dist.get_rank())
            if inputs.is_floating_point():
                inputs = inputs.to(DTYPES[case["dtype"]])
            loss = engine(inputs, targets)
            engine.backward(loss)
            engine.step()
            total += loss.detach().double() / case["accumulation"]
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
        norm = engine.get_global_grad_norm()
        norms.append(None if norm is None else float(norm))
    engine.destroy()
    return {"losses": losses, "norms": norms}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--package", choices=["stateroom", "deepspeed"], required=True)
    parser.add_argument("--cases", required=True, help="file with a list of cases")
    parser.add_argument("--out", required=True, help="file for the results, in the order of the cases")
    args = parser.parse_args()
    package = importlib.import_module(args.package)
    if args.package == "deepspeed":
        switch_off_compiling(package)
    package.init_distributed()
    results = [train(package, case) for case in json.loads(Path(args.cases).read_text())]
    if dist.get_rank() == 0:
        Path(args.out).write_text(json.dumps({"version": package.__version__, "results": results}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
