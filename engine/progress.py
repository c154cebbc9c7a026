"""What a user sees while training: a line every few steps, timers, memory, and one JSON object a step in the run directory."""

from __future__ import annotations

import json
import logging
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from ..parallel.accelerator import local_device
from ..parallel.clock import Mark, StepClock
from ..parallel.comm import get_rank
from ..parallel.imagined import imagined_world

LOGGER = "stateroom"


def get_logger(level: str | None = None) -> logging.Logger:
    """Return the package's logger, with a plain handler to standard output unless the script configured one."""
    logger = logging.getLogger(LOGGER)
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("[stateroom] %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    if level:
        logger.setLevel(level.upper())
    return logger


class Timers:
    """Seconds per phase since the last reading; waits for the device only when `exact`. Each phase is booked on the step's clock too."""

    def __init__(self, exact: bool, device: torch.device, clock: StepClock) -> None:
        self._exact = exact and device.type != "cpu"
        self._clock = clock
        self.seconds: dict[str, float] = {}
        self.peak = Peak(device)
        world = imagined_world()
        self.watchers: list[Callable[[str], None]] = [] if world is None else [world.watcher.phase]  # called when a phase ends

    def now(self) -> tuple[float, Mark]:
        """Return the moment, after the device has caught up where exact times are wanted."""
        if self._exact:
            torch.accelerator.synchronize()
        return time.perf_counter(), self._clock.mark()

    def add(self, phase: str, since: tuple[float, Mark]) -> None:
        """Add the time since `since` to a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + self.now()[0] - since[0]
        self._clock.phase(phase, since[1])
        self.peak.look(phase)
        for watcher in self.watchers:
            watcher(phase)

    def take(self) -> dict[str, float]:
        """Return the seconds per phase and start again."""
        taken, self.seconds = self.seconds, {}
        return taken


class Peak:
    """The most memory so far, and the phase in which it was reached; the counters of the allocator are not reset for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.before_bytes = memory_bytes(device)  # when the engine was built
        self.num_bytes = highest_memory_bytes(device)
        self.phase = "before the first step"

    def look(self, phase: str) -> None:
        """Take note of a phase that has ended."""
        highest = highest_memory_bytes(self._device)
        if highest > self.num_bytes:
            self.num_bytes, self.phase = highest, phase


class Progress:
    """Prints and records steps; only the first rank prints, and only it writes metrics."""

    def __init__(self, rank: int, every: int | None, run_dir: Path | None, device: torch.device, breakdown: bool, memory: bool) -> None:
        self._logger = get_logger()
        self._rank = rank
        self._every = every or (10 if breakdown or memory else None)  # a breakdown without a line to stand under is lost
        self._device = device
        self._breakdown = breakdown
        self._memory = memory
        self._last = time.perf_counter()
        self._since = (self._last, 0, 0)  # time, samples, tokens at the last line
        self._samples = self._tokens = 0
        self._spent: dict[str, float] = {}
        self._file = None
        if run_dir is not None and rank == 0:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._file = (run_dir / "metrics.jsonl").open("a")

    def say(self, text: str) -> None:
        """Print one line from the first rank."""
        if self._rank == 0:
            self._logger.info(text)

    def warn(self, text: str) -> None:
        """Print one warning from the first rank."""
        if self._rank == 0:
            self._logger.warning(text)

    def step(self, record: dict[str, Any], tokens: int, phases: dict[str, float]) -> None:
        """Take note of one optimizer step; `record` has step, loss, lr, grad_norm, samples, skipped, loss_scale."""
        now = time.perf_counter()
        is_accounted = record.get("account_step") == record["step"]  # an accelerator's step is accounted one step later
        step_s, self._last = record["account_s"] if is_accounted else now - self._last, now
        self._samples += record["samples"]
        self._tokens += tokens
        for phase, seconds in phases.items():
            self._spent[phase] = self._spent.get(phase, 0.0) + seconds
        if self._file is not None:
            memory = memory_bytes(self._device)
            self._file.write(json.dumps({**record, "tokens": tokens, "step_s": step_s, "memory_bytes": memory}) + "\n")
            self._file.flush()
        if self._every and record["step"] % self._every == 0:
            self._line(record, now)

    def _line(self, record: dict[str, Any], now: float) -> None:
        since, samples, tokens = self._since
        seconds = max(now - since, 1e-9)
        parts = [f"step {record['step']}"]
        if record["loss"] is not None:
            parts.append(f"loss {record['loss']:.4f}")
        parts.append("lr " + ", ".join(f"{lr:.3g}" for lr in record["lr"]))
        if record["grad_norm"] is not None:
            parts.append(f"grad norm {record['grad_norm']:.3f}")
        if record["loss_scale"] != 1:
            parts.append(f"loss scale {record['loss_scale']:g}")
        if record["skipped"]:
            parts.append(f"skipped {record['skipped']}")
        parts.append(f"{(self._samples - samples) / seconds:.1f} samples/s")
        if self._tokens > tokens:
            parts.append(f"{(self._tokens - tokens) / seconds:,.0f} tokens/s")
        parts.append(f"memory {memory_bytes(self._device) / 2**30:.2f} GiB")
        self.say(" | ".join(parts))
        if self._breakdown and self._spent:
            total = sum(self._spent.values())
            shares = ", ".join(f"{name} {1e3 * s / self._every:.1f} ms ({100 * s / total:.0f} %)" for name, s in self._spent.items())  # type: ignore[operator]
            self.say(f"  per step: {shares}")
        if self._memory:
            self.say(f"  memory: {memory_report(self._device)}")
        self._spent = {}
        self._since = (now, self._samples, self._tokens)

    def keep(self, name: str, text: str) -> None:
        """Write a file of the run directory, whole or not at all; without run_dir nothing is written."""
        if self._file is None:
            return
        target = Path(self._file.name).with_name(name)
        partial = target.with_suffix(".partial")
        partial.write_text(text)
        partial.replace(target)

    def close(self) -> None:
        """Close the metrics file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def memory_bytes(device: torch.device) -> int:
    """Return bytes held on the accelerator, or the resident set of this process on CPU."""
    if device.type == "cpu":
        return int(psutil.Process().memory_info().rss)
    return int(torch.accelerator.memory_allocated())


def highest_memory_bytes(device: torch.device) -> int:
    """Return the most bytes that were ever held on the accelerator, or the largest resident set of this process on CPU."""
    if device.type == "cpu":
        unit = 1 if sys.platform == "darwin" else 1024  # what the system counts ru_maxrss in
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return int(torch.accelerator.max_memory_allocated())


def memory_report(device: torch.device) -> str:
    """Return current and highest memory in words."""
    if device.type == "cpu":
        host = psutil.virtual_memory()
        return f"resident {memory_bytes(device) / 2**30:.2f} GiB, host used {host.used / 2**30:.1f} of {host.total / 2**30:.1f} GiB"
    peak = torch.accelerator.max_memory_allocated()
    return f"allocated {memory_bytes(device) / 2**30:.2f} GiB, highest {peak / 2**30:.2f} GiB"


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print the message and the memory in use, from rank 0; nothing unless `force`, as in DeepSpeed."""
    if force and get_rank() == 0:
        get_logger().info(f"{message}: {memory_report(local_device())}")
