"""From figures that somebody has to the figure they want: relations between quantities, and the chain of them that was used."""

from .quantities import QUANTITIES, Quantity, quantity
from .solve import Answer, derive

__all__ = ["QUANTITIES", "Answer", "Quantity", "derive", "quantity"]
