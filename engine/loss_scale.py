"""Loss scales for fp16: a fixed one, and one that halves on overflow and doubles after quiet steps."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

HISTORY_LENGTH = 64
SCALE_FACTOR = 2.0


class LossScale(Protocol):
    """What the engine asks of a loss scale; one `update` per optimizer step, skipped steps included."""

    dynamic: bool

    @property
    def scale(self) -> float:
        """The factor on the loss of the coming step."""

    @property
    def at_minimum(self) -> bool:
        """True when one more overflow would have to go below the minimum."""

    @property
    def history(self) -> list[tuple[int, float]]:
        """The latest changes as (number of updates done, scale since then), oldest first."""

    def update(self, overflow: bool) -> None:
        """Count one step, which overflowed on some rank or did not."""

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs to go on from here."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""


class StaticLossScale:
    """A loss scale that never changes; an overflow only skips its step."""

    dynamic = False
    at_minimum = False

    def __init__(self, scale: float) -> None:
        """Raise ValueError when `scale` is not positive."""
        if not scale > 0:
            raise ValueError(f"loss_scale must be positive, got {scale}; use DynamicLossScale for a scale that adapts")
        self.scale = float(scale)

    @property
    def history(self) -> list[tuple[int, float]]:
        """The one scale there is."""
        return [(0, self.scale)]

    def update(self, overflow: bool) -> None:
        """Change nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return the kind and the scale."""
        return {"kind": "static", "scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the configured scale: a fixed scale belongs to the config, not to the run."""


class DynamicLossScale:
    """The loss scale of mixed-precision training that follows overflows (Micikevicius et al., 2018, arXiv:1710.03740).

    Args:
        initial_scale_power: the run starts at 2 to this power.
        window: steps without overflow after which the scale doubles.
        hysteresis: the scale halves at this overflow, counted since the last growth, and at each later one; 0 counts as 1.
        consecutive_hysteresis: start counting again after every step without overflow.
        min_scale: the scale never shrinks below this.
    """

    dynamic = True

    def __init__(
        self,
        initial_scale_power: int = 16,
        window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_scale: float = 1,
    ) -> None:
        """Raise ValueError for a window below 1 or a minimum that is not positive."""
        if window < 1:
            raise ValueError(f"loss_scale_window must be at least 1, got {window}")
        if not min_scale > 0:
            raise ValueError(f"min_loss_scale must be positive, got {min_scale}")
        self.window = window
        self.hysteresis = max(1, hysteresis)
        self.consecutive_hysteresis = consecutive_hysteresis
        self.min_scale = float(min_scale)
        self._scale = 2.0**initial_scale_power
        self._updates = 0
        self._quiet_since = 0  # number of updates done when the last overflow had been counted
        self._overflows_left = self.hysteresis
        self._history: deque[tuple[int, float]] = deque([(0, self._scale)], maxlen=HISTORY_LENGTH)

    @property
    def scale(self) -> float:
        """The factor on the loss of the coming step."""
        return self._scale

    @property
    def at_minimum(self) -> bool:
        """True when one more overflow would have to go below the minimum."""
        return self._overflows_left == 1 and self._scale == self.min_scale

    @property
    def history(self) -> list[tuple[int, float]]:
        """The latest changes as (number of updates done, scale since then), oldest first, 64 at most."""
        return list(self._history)

    def update(self, overflow: bool) -> None:
        """Count one step; at the minimum an overflow leaves the scale where it is."""
        quiet_steps = self._updates - self._quiet_since
        self._updates += 1
        if overflow:
            self._quiet_since = self._updates
            if self._overflows_left > 1:
                self._overflows_left -= 1
            else:
                self._set(max(self._scale / SCALE_FACTOR, self.min_scale))
            return
        # The first quiet step after an overflow opens the window and is not counted in it.
        grows = quiet_steps > 0 and quiet_steps % self.window == 0
        if grows or self.consecutive_hysteresis:
            self._overflows_left = self.hysteresis
        if grows:
            self._set(self._scale * SCALE_FACTOR)

    def state_dict(self) -> dict[str, Any]:
        """Return scale, counters and history; the settings stay with the config."""
        return {
            "kind": "dynamic",
            "scale": self._scale,
            "updates": self._updates,
            "quiet_since": self._quiet_since,
            "overflows_left": self._overflows_left,
            "history": self.history,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; one of a fixed scale is ignored, since the config has changed the kind since."""
        if state["kind"] != "dynamic":
            return
        self._scale = float(state["scale"])
        self._updates = int(state["updates"])
        self._quiet_since = int(state["quiet_since"])
        # A smaller hysteresis in the new config must not wait for more overflows than it allows.
        self._overflows_left = min(int(state["overflows_left"]), self.hysteresis)
        self._history = deque(((int(step), float(scale)) for step, scale in state["history"]), maxlen=HISTORY_LENGTH)

    def _set(self, scale: float) -> None:
        if scale != self._scale:
            self._scale = scale
            self._history.append((self._updates, scale))
