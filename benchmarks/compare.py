"""Compares two files that steps.py wrote with --json: what became faster or slower, and whether that is more than the noise.

    python benchmarks/compare.py OLD NEW

The noise of a figure is the spread of its rounds, (largest - smallest) / median, the larger of the two files'. Exit status 1
when a variant became slower by more than that.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def rows_of(path: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return variant -> row, and the options of the run."""
    content = json.loads(Path(path).read_text())
    return {row["variant"]: row for row in content["rows"]}, [*content["options"], "ranks", str(content["ranks"])]


def main() -> int:
    """Print the comparison."""
    if len(sys.argv) != 3:
        print(__doc__)
        return 2
    (old, before), (new, now) = rows_of(sys.argv[1]), rows_of(sys.argv[2])
    if before != now:
        print(f"these are different measurements: {' '.join(before)} and {' '.join(now)}")
        return 2
    slower = False
    print(f"{'variant':14} {'old ms':>9} {'new ms':>9} {'change':>8} {'noise':>7} {'peak':>7}")
    for name in [name for name in old if name in new]:
        a, b = old[name], new[name]
        change, noise = b["step_s"] / a["step_s"] - 1, max(a["spread"], b["spread"])
        slower |= change > noise
        verdict = "slower" if change > noise else "faster" if -change > noise else ""
        peak = b["peak_bytes"] / max(a["peak_bytes"], 1) - 1
        print(f"{name:14} {1000 * a['step_s']:9.1f} {1000 * b['step_s']:9.1f} {change:+8.1%} {noise:7.1%} {peak:+7.1%}  {verdict}")
    return int(slower)


if __name__ == "__main__":
    raise SystemExit(main())
