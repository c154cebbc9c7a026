"""Pipelines: bubbles and activations by formula, instructions of each schedule, and their simulation."""

from .formulas import SCHEDULES, Schedule, activation_factor, bubble_share, bubble_time, microbatches
from .instructions import Instruction, home_of, instructions, virtual_stage
from .simulate import Simulation, held, simulate

__all__ = [
    "SCHEDULES",
    "Instruction",
    "Schedule",
    "Simulation",
    "activation_factor",
    "bubble_share",
    "bubble_time",
    "held",
    "home_of",
    "instructions",
    "microbatches",
    "simulate",
    "virtual_stage",
]
