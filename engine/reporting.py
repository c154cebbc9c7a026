"""What the engine hands to the ledger: plain records of its units, its optimizer and its counted traffic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import Engine


def ledger_of(engine: Engine) -> Any:
    """Return the account of this engine."""
    raise NotImplementedError
