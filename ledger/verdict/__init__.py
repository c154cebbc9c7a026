"""What a measured figure is worth: beside published ones, beside the prediction, and beside another run's."""

from .bands import Band, Verdict, verdict
from .compare import Comparison, compare_run
from .diff import Difference, diff_runs

__all__ = ["Band", "Comparison", "Difference", "Verdict", "compare_run", "diff_runs", "verdict"]
