"""What can go wrong with a script in a dry run."""

from __future__ import annotations

from ..problems import LedgerError


class ScriptProblem(LedgerError):
    """The script cannot be run to its first steps; the message says where it stops and what to do."""


class NoValues(LedgerError):
    """The script's course depends on values, and a dry run has none."""
