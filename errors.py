"""The errors that Stateroom raises for its users: each message says what is wrong, where, and what to do."""

from __future__ import annotations


class StateroomError(Exception):
    """Base of every error that Stateroom raises on purpose."""


class ConfigError(StateroomError, ValueError):
    """A config cannot be honoured; the message lists every problem found, one a line."""


class CheckpointError(StateroomError):
    """A checkpoint cannot be written or read as asked."""


class LayoutError(StateroomError, ValueError):
    """Parameters, shards or optimizer states do not fit the layout that they are used with."""


class RankError(StateroomError, RuntimeError):
    """Ranks disagree, or the process group cannot do what is asked; the message names ranks."""


class EngineError(StateroomError, RuntimeError):
    """The engine was called in an order or with values that would train wrongly."""
