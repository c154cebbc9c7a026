"""One rank of one variant: builds it, then runs as many steps as it is told to, and reports seconds and memory.

Started by steps.py. Commands come by standard input ("run N", "quit"), answers leave by a file descriptor of their own,
so that what a library prints cannot be taken for one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent))
import step_models

LR = 1e-4
Step = Callable[[], Any]


def adamw(params: Any) -> torch.optim.Optimizer:
    """Return the optimizer that all variants use."""
    return torch.optim.AdamW([param for param in params if param.requires_grad], lr=LR, fused=True)


class Job:
    """What a variant is built from."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.kind = step_models.KINDS[args.model]
        self.dtype = torch.bfloat16 if args.bf16 else torch.float32
        batch = self.kind.batch(args.rows)
        self.batch = tuple(x.to(self.dtype) if x.is_floating_point() else x for x in batch)

    def model(self, recompute: bool = True) -> torch.nn.Module:
        """Return the model in the dtype in which it computes."""
        return self.with_blocks(step_models.build(self.args.model).to(self.dtype), recompute)

    def with_blocks(self, model: torch.nn.Module, recompute: bool = True) -> torch.nn.Module:
        """Return the model with its blocks compiled, and recomputed in backward, where that is asked for."""
        for block in self.kind.blocks(model):
            if self.args.compile:
                block.forward = torch.compile(block.forward)  # type: ignore[method-assign]
            if self.args.recompute and recompute:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
        return model

    def config(self, stage: int) -> dict[str, Any]:
        """Return the config that engines read."""
        return {
            "train_micro_batch_size_per_gpu": self.args.rows,
            "gradient_accumulation_steps": self.args.accumulation,
            "gradient_clipping": self.args.clip,
            "bf16": {"enabled": self.args.bf16},
            "zero_optimization": {"stage": stage},
            "steps_per_print": 10**9,
        }

    def update(self, params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """Clip, step, forget."""
        if self.args.clip:
            torch.nn.utils.clip_grad_norm_(params, self.args.clip)
        optimizer.step()
        optimizer.zero_grad()

    def accumulate(self, forward: Callable[..., torch.Tensor], sync: Callable[[bool], Any]) -> None:
        """Run forward and backward of each micro-batch; `sync` is told before each whether it is the last."""
        for micro in range(self.args.accumulation):
            sync(micro + 1 == self.args.accumulation)
            (forward(*self.batch) / self.args.accumulation).backward()


# ---- engines


def stateroom_step(job: Job, stage: int, hold: bool = False) -> Step:
    """Return a step through Stateroom; with `hold` whole gradients stay on each rank from micro-batch to micro-batch."""
    import stateroom

    config = job.config(stage) | {"log_level": "error"}
    if job.args.recompute:
        config["activation_checkpointing"] = {"policy": "full"}
    return _engine_step(job, stateroom.initialize(model=job.model(recompute=False), optimizer=adamw, config=config)[0], hold)


def deepspeed_step(job: Job, stage: int) -> Step:
    """Return a step through DeepSpeed with torch's fused optimizer."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    model = job.model()
    config = job.config(stage) | {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return _engine_step(job, deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=config)[0])


def _engine_step(job: Job, engine: Any, hold: bool = False) -> Step:
    def step() -> None:
        for micro in range(job.args.accumulation):
            with engine.no_sync() if hold and micro + 1 < job.args.accumulation else nullcontext():
                engine.backward(engine(*job.batch))
                engine.step()

    return step


# ---- torch's own


def ddp_step(job: Job) -> Step:
    """Return a step through DistributedDataParallel; in bf16 with fp32 weights under autocast, since it keeps no masters."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(job.with_blocks(step_models.build(job.args.model)))
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = adamw(params)

    def sync(last: bool) -> None:
        model.require_backward_grad_sync = last

    def step() -> None:
        job.accumulate(_autocast(job, model), sync)
        job.update(params, optimizer)

    return step


def fsdp2_step(job: Job, reshard: bool, local: bool = False) -> Step:
    """Return a step through fully_shard, unit by unit; in bf16 with fp32 masters by its mixed precision policy.

    With `local` clipping and optimizer see plain tensors, this rank's parts: over 10,000 DTensors they take minutes.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = job.with_blocks(step_models.build(job.args.model))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if job.args.bf16 else MixedPrecisionPolicy()
    for block in job.kind.blocks(model):
        fully_shard(block, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mp_policy=policy, reshard_after_forward=reshard)
    params = [param for param in model.parameters() if param.requires_grad]
    parts = [torch.nn.Parameter(param.to_local()) for param in params] if local else params  # type: ignore[operator]
    optimizer = adamw(parts)

    def step() -> None:
        job.accumulate(model, model.set_requires_gradient_sync)  # type: ignore[attr-defined]
        if local:
            update_parts(job, params, parts, optimizer)
        else:
            job.update(params, optimizer)

    return step


def update_parts(job: Job, params: list[Any], parts: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Clip, step, forget, with the optimizer over this rank's parts of DTensor parameters."""
    for param, part in zip(params, parts, strict=True):
        part.grad, param.grad = param.grad.to_local(), None
    if job.args.clip:
        square = torch.nn.utils.get_total_norm([part.grad for part in parts if part.grad is not None]).square()
        dist.all_reduce(square)
        torch.nn.utils.clip_grads_with_norm_(parts, job.args.clip, square.sqrt())
    optimizer.step()
    optimizer.zero_grad()


def _autocast(job: Job, model: torch.nn.Module) -> Callable[..., torch.Tensor]:
    def forward(*batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=job.args.bf16):
            return model(*batch)

    return forward


# ---- what no engine can be faster than


def compute_step(job: Job) -> Step:
    """Return forward and backward alone, without ranks, clipping and optimizer."""
    model = job.model()
    model(*job.batch).backward()

    def step() -> None:
        for _ in range(job.args.accumulation):
            model(*job.batch).backward()

    return step


def adam_step(job: Job, share: int) -> Step:
    """Return the update alone, of 1/share of the trained elements as one tensor, with fp32 masters in bf16."""
    numel = sum(param.numel() for param in step_models.build(job.args.model).parameters() if param.requires_grad) // share
    master = torch.nn.Parameter(torch.zeros(numel))
    master.grad = torch.full((numel,), 1e-3)
    optimizer = adamw([master])

    def step() -> None:
        if job.args.clip:
            torch.nn.utils.clip_grad_norm_([master], job.args.clip)
        optimizer.step()

    return step


def exchange_step(job: Job, trained: bool, dtype: torch.dtype) -> Step:
    """Return what the ranks must at least send each other to gather all elements once, or those trained, as one message to each peer."""
    params = step_models.build(job.args.model).parameters()
    numel = sum(param.numel() for param in params if param.requires_grad or not trained) // dist.get_world_size()
    own, rank, world = torch.zeros(numel, dtype=dtype), dist.get_rank(), dist.get_world_size()
    others = {peer: torch.zeros(numel, dtype=dtype) for peer in range(world) if peer != rank}

    def step() -> None:
        works = [dist.irecv(theirs, peer) for peer, theirs in others.items()]
        works += [dist.isend(own, peer) for peer in others]
        for work in works:
            work.wait()  # type: ignore[union-attr]

    return step


VARIANTS: dict[str, Callable[[Job], Step]] = {
    **{f"stateroom-{stage}": lambda job, stage=stage: stateroom_step(job, stage) for stage in range(4)},  # type: ignore[misc]
    **{f"stateroom-{stage}-hold": lambda job, stage=stage: stateroom_step(job, stage, hold=True) for stage in (2, 3)},  # type: ignore[misc]
    **{f"deepspeed-{stage}": lambda job, stage=stage: deepspeed_step(job, stage) for stage in range(1, 4)},  # type: ignore[misc]
    "ddp": ddp_step,
    "fsdp2": lambda job: fsdp2_step(job, True),
    "fsdp2-keep": lambda job: fsdp2_step(job, False),
    "fsdp2-local": lambda job: fsdp2_step(job, True, local=True),
    "compute": compute_step,
    "adam": lambda job: adam_step(job, 1),
    "adam-share": lambda job: adam_step(job, dist.get_world_size()),
    "exchange": lambda job: exchange_step(job, False, job.dtype),
    "exchange-trained": lambda job: exchange_step(job, True, job.dtype),
    "exchange-fp32": lambda job: exchange_step(job, True, torch.float32),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is measured."""
    parser.add_argument("--model", choices=tuple(step_models.KINDS), default="block")
    parser.add_argument("--rows", type=int, default=1, help="samples of 128 tokens in a micro-batch")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--compile", action="store_true", help="compile block by block")
    parser.add_argument("--recompute", action="store_true", help="recompute each block in backward")


def peak_bytes() -> int:
    """Return the most memory that this process has had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Answer commands until told to quit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variant", choices=tuple(VARIANTS))
    parser.add_argument("report", type=int, help="file descriptor for answers")
    arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    before = peak_bytes()
    began = time.perf_counter()
    with os.fdopen(args.report, "w", buffering=1) as answers:
        step = VARIANTS[args.variant](Job(args))
        built = time.perf_counter() - began
        for _ in range(2):
            step()
        print(json.dumps({"ready": True, "build_s": built}), file=answers)
        for line in sys.stdin:
            command, _, count = line.partition(" ")
            if command.strip() == "quit":
                break
            dist.barrier()
            seconds = []
            for _ in range(int(count)):
                start = time.perf_counter()
                step()
                seconds.append(time.perf_counter() - start)
            print(json.dumps({"seconds": seconds, "peak_bytes": peak_bytes() - before}), file=answers)
    os._exit(0)  # engines of several makers leave threads that disagree about how a process ends


if __name__ == "__main__":
    main()
