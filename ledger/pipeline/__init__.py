"""Pipelines: bubbles and activations by formula, instructions of each schedule, and their simulation."""

from .formulas import SCHEDULES, Schedule, activation_factor, bubble_share, bubble_time, microbatches
from .instructions import Instruction, instructions
from .simulate import Simulation, simulate

__all__ = [
    "SCHEDULES",
    "Instruction",
    "Schedule",
    "Simulation",
    "activation_factor",
    "bubble_share",
    "bubble_time",
    "instructions",
    "microbatches",
    "simulate",
]
