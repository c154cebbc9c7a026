"""The time of a step as a closed account, the constants it needs, and the published runs they were fitted on."""

from .constants import Constants, constants_of
from .time import StepTime, step_time

__all__ = ["Constants", "StepTime", "constants_of", "step_time"]
