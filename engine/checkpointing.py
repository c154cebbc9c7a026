"""`stateroom.checkpointing`: activation checkpointing in the form that Megatron-style scripts call it, over torch.utils.checkpoint.

DeepSpeed's interface is a module: a script configures it once and calls `checkpoint` from anywhere. So the configuration
is kept here, in the one `_settings` object of this file, which nothing else in the package reads. For an unmodified
model the config's `activation_checkpointing.policy` does the same without calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as _torch_checkpoint

from ..config_schemas import Config, load
from ..parallel.comm import get_rank
from .progress import get_logger

# argument of configure -> (key of the config's section, what becomes of it here)
_WITHOUT_EFFECT = {
    "partition_activations": ("partition_activations", "no ranks share a matrix in this version"),
    "contiguous_checkpointing": ("contiguous_memory_optimization", "torch's allocator keeps what is saved"),
    "num_checkpoints": ("number_checkpoints", "it sizes the buffer of contiguous_checkpointing"),
    "synchronize": ("synchronize_checkpoint_boundary", "recomputation is ordered by its stream"),
    "profile": ("profile", "use wall_clock_breakdown or torch.profiler"),
}


@dataclass
class _Settings:
    """What configure() was told."""

    configured: bool = False
    in_cpu: bool = False


_settings = _Settings()


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Take the options from a config's `activation_checkpointing` section; arguments that are given win over it.

    Args:
        mpu_: accepted; the random state is saved and restored for every rank alike.
        deepspeed_config: a path, dict, JSON string or a resolved config.
        checkpoint_in_cpu: keep what a checkpointed function saves in host memory. The other options have no effect here;
            one line names those that were asked for.

    Raises:
        ConfigError: the config is not valid.
    """
    given = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "num_checkpoints": num_checkpoints,
        "synchronize": synchronize,
        "profile": profile,
    }
    section = _section(deepspeed_config)
    _settings.configured = True
    _settings.in_cpu = bool(getattr(section, "cpu_checkpointing", False) if checkpoint_in_cpu is None else checkpoint_in_cpu)
    asked = [name for name, (key, _) in _WITHOUT_EFFECT.items() if _chosen(given[name], section, key)]
    if asked and get_rank() == 0:
        reasons = "; ".join(f"{name}: {_WITHOUT_EFFECT[name][1]}" for name in asked)
        get_logger().info(f"checkpointing.configure: without effect here: {reasons}")


def _section(config: Any) -> Any:
    if config is None:
        return None
    resolved = config if isinstance(config, Config) else load(config, ranks=None)
    return resolved.activation_checkpointing


def _chosen(given: Any, section: Any, key: str) -> Any:
    return getattr(section, key, None) if given is None else given


def is_configured() -> bool:
    """Return whether configure() has been called."""
    return _settings.configured


def reset() -> None:
    """Drop what is kept between iterations: nothing is, so this only exists for scripts that call it."""


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `function(*args, **kwargs)` now and again in backward, instead of keeping what it computes in between.

    Random numbers and autocast are the same both times. Outside of grad mode it just runs.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    saved: AbstractContextManager[Any] = torch.autograd.graph.save_on_cpu() if _settings.in_cpu else nullcontext()
    with saved:
        return _torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


non_reentrant_checkpoint = checkpoint


# ---- random state, for scripts written for Megatron


@dataclass
class RngTracker:
    """Named random states: `fork(name)` draws from one of them and leaves the default state as it was."""

    states: dict[str, torch.Tensor] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget all states."""
        self.states.clear()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return a copy of the names and states."""
        return dict(self.states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Go on from saved states."""
        self.states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Start a state from a seed.

        Raises:
            ValueError: the name is taken.
        """
        if name in self.states:
            raise ValueError(f"random state {name!r} exists already; reset() the tracker first")
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.states[name] = _rng_state()

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw from the named state inside the context.

        Raises:
            ValueError: there is no such state.
        """
        if name not in self.states:
            raise ValueError(f"no random state {name!r}; call model_parallel_cuda_manual_seed(seed) or add(name, seed) first")
        outside = _rng_state()
        _set_rng_state(self.states[name])
        try:
            yield
        finally:
            self.states[name] = _rng_state()
            _set_rng_state(outside)


_SEED_OFFSET = 2718  # DeepSpeed's and Megatron's, so that the same numbers are drawn
_tracker = RngTracker()


def get_cuda_rng_tracker() -> RngTracker:
    """Return the tracker that model_parallel_cuda_manual_seed() fills."""
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the default random state, the same on every rank, and the tracker's "model-parallel-rng" apart from it."""
    _tracker.reset()
    torch.manual_seed(seed)
    _tracker.add("model-parallel-rng", seed + _SEED_OFFSET)


def _rng_state() -> torch.Tensor:
    """Return the state of the generator that the accelerator (or the CPU) draws from."""
    return _generator_module().get_rng_state()


def _set_rng_state(state: torch.Tensor) -> None:
    _generator_module().set_rng_state(state)


def _generator_module() -> Any:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.random if device is None else torch.get_device_module(device)
