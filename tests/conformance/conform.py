"""Train a case with plain PyTorch in one process and with the engine on every rank, and measure how far they are apart."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from case import Call, Case
from catalogue import CASES, COMBINATIONS
from torch import nn

STEPS = 20
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1),
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.9),
    "nadam": partial(torch.optim.NAdam, lr=1e-3),
    "adamax": partial(torch.optim.Adamax, lr=1e-3),
}
SMALLEST = {"min_numel": 0}  # each layer its own unit, so that tiny models are really cut up
DTYPES = {"fp32": None, "bf16": torch.bfloat16}
TINY = 1e-30


@dataclass
class Run:
    """What training leaves: the mean loss over ranks of every phase of every step, and the final state by name."""

    losses: list[float] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    moved: float = 0.0  # how far the weights went, as difference() measures it
    parameters: int = 0
    units: int = 0
    held: list[str] = field(default_factory=list)  # units that were still gathered at the end


def parts_of(case: Case, dtype: torch.dtype | None) -> dict[str, nn.Module]:
    """Build the case's models, the same on every rank and in every run."""
    torch.manual_seed(5)
    built = case.build()
    parts = built if isinstance(built, dict) else {"": built}
    for module in parts.values():
        module.train()
        if case.cast_first and dtype is not None:
            module.to(dtype)
    return parts


def shown(case: Case, calls: dict[str, Any]) -> Any:
    """Return what the case's functions get: the one part, or the dict of them."""
    return calls if set(calls) != {""} else calls[""]


# ---- plain PyTorch


class Masters:
    """One plain optimizer over fp32 copies of what is kept in 16 bits, with the mean over ranks collected by hand."""

    def __init__(self, module: nn.Module, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], dtype: torch.dtype | None) -> None:
        cast_parameters(module, dtype)
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.masters = [nn.Parameter(p.detach().float()) if p.element_size() == 2 else p for p in self.params]
        self._sums: list[torch.Tensor | None] = [None] * len(self.params)
        self._optimizer = make(self.masters) if self.params else None

    def collect(self, factor: float) -> None:
        """Add what a backward left, times `factor`, and clear it."""
        for index, (param, master) in enumerate(zip(self.params, self.masters, strict=True)):
            if param.grad is None:
                continue
            grad = param.grad.detach().to(master.dtype) * factor
            grad = grad.to_dense() if grad.is_sparse else grad
            before = self._sums[index]
            self._sums[index] = grad if before is None else before + grad
            param.grad = None

    def follow(self) -> None:
        """Take over what was written into 16-bit parameters between steps."""
        with torch.no_grad():
            for param, master in zip(self.params, self.masters, strict=True):
                if param is not master:
                    master.copy_(torch.where(master.to(param.dtype) == param, master, param.to(master.dtype)))

    def step(self) -> None:
        """Update from the sums."""
        if self._optimizer is None:
            return
        for index, master in enumerate(self.masters):
            master.grad, self._sums[index] = self._sums[index], None
        self._optimizer.step()
        with torch.no_grad():
            for param, master in zip(self.params, self.masters, strict=True):
                master.grad = None
                if param is not master:
                    param.copy_(master)


def cast_parameters(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Put floating parameters into the compute dtype as the documentation says: BatchNorm's and all buffers keep theirs."""
    if dtype is None:
        return
    kept = {id(p) for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) for p in m.parameters(recurse=False)}
    for param in module.parameters():
        if param.is_floating_point() and id(param) not in kept:
            param.data = param.data.to(dtype)


class OwnBuffers:
    """Buffers that change in a forward are a rank's own: one process that plays several ranks swaps them."""

    def __init__(self, parts: Mapping[str, nn.Module], ranks: int) -> None:
        self._buffers = [buffer for module in parts.values() for buffer in module.buffers()]
        self._kept = [[b.detach().clone() for b in self._buffers] for _ in range(ranks)]

    def put(self, rank: int) -> None:
        with torch.no_grad():
            for buffer, value in zip(self._buffers, self._kept[rank], strict=True):
                buffer.copy_(value)

    def keep(self, rank: int) -> None:
        self._kept[rank] = [b.detach().clone() for b in self._buffers]


def plain(case: Case, dtype: torch.dtype | None, optimizer: str, steps: int, ranks: int) -> Run:
    """Train in one process on the mean of all ranks' losses; ends with the buffers of rank 0."""
    parts = parts_of(case, dtype)
    masters = {name: Masters(module, OPTIMIZERS[optimizer], dtype) for name, module in parts.items()}
    buffers = OwnBuffers(parts, ranks)
    calls = shown(case, {name: Call(module, module, dtype) for name, module in parts.items()})
    start = whole_state({name: module.state_dict() for name, module in parts.items()})
    run = Run()
    for step in range(steps):
        for phase in case.phases:
            total = 0.0
            for rank in range(ranks):
                buffers.put(rank)
                torch.manual_seed(1009 * step + rank)
                loss = phase.way(calls, lambda value, **options: value.backward(**options), step, rank)
                total += loss.detach().double().item() / ranks
                for name, each in masters.items():
                    each.collect(1.0 / ranks)
                    if name != phase.part:
                        each._sums = [None] * len(each.params)
                buffers.keep(rank)
            masters[phase.part].step()
            run.losses.append(total)
        if case.follow is not None:
            case.follow(shown(case, dict(parts)), lambda params: nullcontext())
            for each in masters.values():
                each.follow()
    buffers.put(0)
    run.state = whole_state({name: module.state_dict() for name, module in parts.items()})
    run.moved = max(relative(start[key], value) for key, value in run.state.items())
    return run


# ---- the engine


def sharded(case: Case, stage: int, dtype_name: str, optimizer: str, steps: int) -> Run:
    """Train the same with the engine; every rank runs its own micro-batches."""
    import stateroom
    from stateroom.zero import GatheredParameters

    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "gradient_clipping": 0, "units": SMALLEST}
    if dtype_name != "fp32":
        config[dtype_name] = {"enabled": True}
    parts = parts_of(case, DTYPES[dtype_name])
    engines = {
        name: stateroom.initialize(module, config=config, optimizer=lambda params: OPTIMIZERS[optimizer](list(params)))[0]
        for name, module in parts.items()
    }
    first = next(iter(engines.values()))
    calls = shown(case, {name: Call(engine, parts[name], DTYPES[dtype_name]) for name, engine in engines.items()})
    run, losses = Run(), []
    for step in range(steps):
        for phase in case.phases:
            torch.manual_seed(1009 * step + first.global_rank)
            losses.append(phase.way(calls, engines[phase.part].backward, step, first.global_rank).detach().double().reshape(1))
            engines[phase.part].step()
            for name, engine in engines.items():
                if name != phase.part:
                    engine.zero_grad()
        if case.follow is not None:
            case.follow(shown(case, dict(parts)), lambda params: GatheredParameters(params, modifier_rank=0))
    run.losses = first.comm.gather_rows(torch.cat(losses)).mean(0).tolist()
    run.parameters = sum(p.numel() for engine in engines.values() for p in engine.module.parameters())
    run.units = sum(len(engine.sharded.units) for engine in engines.values())
    run.held = [unit.name for engine in engines.values() for unit in engine.sharded.units if unit.sharded and unit.gathered]
    run.state = whole_state({name: engine.module_state_dict() for name, engine in engines.items()})
    for engine in engines.values():
        engine.destroy()
    return run


def whole_state(states: Mapping[str, Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Return copies of all tensors of several state dicts under one name each."""
    return {
        f"{part}.{key}".lstrip("."): value.detach().clone()
        for part, state in states.items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }


# ---- how far apart


def conform(name: str, stages: Sequence[int], dtype: str = "fp32", optimizer: str = "", steps: int = STEPS) -> dict[str, Any]:
    """Run on every rank: rank 0 trains plainly first, then all ranks at each stage. Returns figures (rank 0) for each stage.

    A stage's figures: `loss` and `weights` (largest relative differences), `worst` (the tensor), `moved`, `held`; or `refused`.
    """
    case = CASES.get(name) or COMBINATIONS[name]
    chosen = optimizer or case.optimizer
    found: dict[str, Any] = {"stages": {}, "parameters": 0, "units": 0}
    wanted = (
        None if case.refused.keys() >= set(stages) else first_rank(lambda: plain(case, DTYPES[dtype], chosen, steps, dist.get_world_size()))
    )
    for stage in stages:
        if stage in case.refused:
            found["stages"][stage] = {"refused": refusal(case, stage, dtype, chosen)}
            continue
        run = sharded(case, stage, dtype, chosen, steps)
        found["parameters"], found["units"] = run.parameters, run.units
        if wanted is not None:
            found["stages"][stage] = {**difference(run, wanted), "held": run.held}
    return found


def first_rank(action: Callable[[], Any]) -> Any:
    """Return on rank 0 what `action` returns, None elsewhere; where it raises, every rank does."""
    result, error = None, None
    if dist.get_rank() == 0:
        try:
            result = action()
        except Exception as raised:
            error = raised
    failed = torch.tensor([int(error is not None)])
    dist.broadcast(failed, 0)
    if failed.item():
        raise RuntimeError("the plain run failed on rank 0") from error
    return result


def refusal(case: Case, stage: int, dtype: str, optimizer: str) -> str:
    """Return the error with which the engine refuses a case, or what came instead."""
    try:
        sharded(case, stage, dtype, optimizer, 2)
    except Exception as error:
        if not type(error).__module__.startswith("stateroom"):
            return f"not refused, but broken: {traceback.format_exc(limit=-3)}"
        return f"{type(error).__name__}: {error}"
    return "not refused"


def difference(run: Run, wanted: Run) -> dict[str, Any]:
    """Return the largest relative differences of losses, and of weights and buffers (to the largest value of the tensor)."""
    if run.state.keys() != wanted.state.keys():
        return {"loss": math.inf, "weights": math.inf, "worst": f"other names: {sorted(run.state.keys() ^ wanted.state.keys())[:4]}"}
    losses = max(abs(a - b) / max(abs(b), TINY) for a, b in zip(run.losses, wanted.losses, strict=True))
    losses = losses if all(map(math.isfinite, [*run.losses, *wanted.losses])) else math.inf
    apart = {key: relative(run.state[key], value) for key, value in wanted.state.items()}
    worst = max(apart, key=apart.__getitem__, default="")
    return {"loss": losses, "weights": apart.get(worst, 0.0), "worst": worst if apart.get(worst) else "", "moved": wanted.moved}


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference over the largest value; infinite where shapes differ or a value is not finite."""
    if found.shape != wanted.shape:
        return math.inf
    if not wanted.numel() or torch.equal(found, wanted):
        return 0.0
    apart = (found.double() - wanted.double()).abs().max().item()
    return apart / max(wanted.double().abs().max().item(), TINY) if math.isfinite(apart) else math.inf
