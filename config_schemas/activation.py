"""Activations: which are recomputed, and the switches of the older checkpoint function; and which modules form units."""

from __future__ import annotations

from typing import Literal

from .fields import HONOURED, Bool, Int, IntOrAuto, Section, Str, key, later

_CALLS = later("only checkpointing.checkpoint reads it; use activation_checkpointing.policy for an unmodified model")


class ActivationCheckpointing(Section):
    """Which activations are recomputed in backward instead of kept."""

    policy: Literal["none", "full", "selective"] = key(
        "none", "none keeps all, full recomputes every chosen unit, selective keeps the costly results.", effect=HONOURED
    )
    every: Int = key(1, "Recompute one unit in so many.", effect=HONOURED, ge=1)
    partition_activations: Bool = key(False, "Slice kept activations over the ranks that share a matrix.", effect=_CALLS)
    cpu_checkpointing: Bool = key(False, "Keep the inputs of recomputed units in host memory.", effect=HONOURED)
    contiguous_memory_optimization: Bool = key(False, "Keep activations in one buffer.", effect=_CALLS)
    number_checkpoints: Int | None = key(None, "Number of kept activations, for that buffer.", effect=_CALLS, ge=1)
    synchronize_checkpoint_boundary: Bool = key(False, "Wait for the device at each boundary.", effect=_CALLS)
    profile: Bool = key(False, "Time forward and backward of each checkpoint.", effect=_CALLS)


class Units(Section):
    """Which parameters are gathered, reduced and released together."""

    classes: list[Str] = key([], "Classes whose instances are units; empty means the repeated children of ModuleList and Sequential.")
    min_numel: IntOrAuto = key("auto", 'Units smaller than this are merged; "auto" lets the unit picker choose.')
    max_numel: Int | None = key(None, "Units larger than this are cut at module borders.", ge=1)
