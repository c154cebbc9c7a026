"""The error that the launcher raises for a job that cannot be started as asked."""

from __future__ import annotations

from ..errors import StateroomError


class LaunchError(StateroomError, ValueError):
    """A job cannot be started as asked; the message says what, where and what to do."""
