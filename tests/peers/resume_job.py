"""Train, save and go on with one engine package, or load what the other one saved and go on: started by torchrun."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import batch, build
from parity_job import DTYPES, config_for
from uncompiled import switch_off_compiling

STEPS = 3  # before the save, and after it


def losses_of(engine: Any, case: dict[str, Any], first: int) -> list[float]:
    """Return the mean loss over ranks and micro-batches of some steps."""
    losses = []
    for step in range(first, first + STEPS):
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(case["accumulation"]):
            inputs, targets = batch(case["model"], step, micro, dist.get_rank())
            loss = engine(inputs.to(DTYPES[case["dtype"]]) if inputs.is_floating_point() else inputs, targets)
            engine.backward(loss)
            engine.step()
            total += loss.detach().double() / case["accumulation"]
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def run(package: Any, case: dict[str, Any], folder: Path, resumes: bool) -> dict[str, Any]:
    """Train from the start and save in the middle, or load and train the second half; return its losses and rates."""
    torch.manual_seed(99 if resumes else 3)
    model = build(case["model"])
    if resumes:
        for param in model.parameters():
            torch.nn.init.normal_(param)  # nothing may be left of this
    config = config_for({**case, "stage": case["there"] if resumes else case["stage"]})
    engine, *_ = package.initialize(model=model, model_parameters=model.parameters(), config=config)
    if resumes:
        path, client = engine.load_checkpoint(str(folder))
        assert path is not None and client["note"] == "mine", client
    else:
        losses_of(engine, case, 0)
        engine.save_checkpoint(str(folder), client_state={"note": "mine"})
    losses = losses_of(engine, case, STEPS)
    found = {"losses": losses, "lr": [float(lr) for lr in engine.get_lr()], "steps": engine.global_steps}
    engine.destroy()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--package", choices=["stateroom", "deepspeed"], required=True)
    parser.add_argument("--cases", required=True, help="file with name -> case")
    parser.add_argument("--folder", required=True, help="where each case has its checkpoint")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    package = importlib.import_module(args.package)
    if args.package == "deepspeed":
        switch_off_compiling(package)
    package.init_distributed()
    folder = Path(args.folder)
    results = {name: run(package, case, folder / name, args.resume) for name, case in json.loads(Path(args.cases).read_text()).items()}
    if dist.get_rank() == 0:
        (folder / f"{args.package}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
