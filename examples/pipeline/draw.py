"""Draw every schedule for some stages and micro-batches, each as an SVG, and print how they compare.

python examples/pipeline/draw.py --stages 4 --micro_batches 8 --folder schedules

What is drawn are the instruction lists that run. `stateroom pipe show` does the same for one schedule.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from stateroom import ConfigError
from stateroom.pipe.schedules import KINDS, schedule
from stateroom.pipe.timeline import as_svg


def main() -> None:
    """Draw and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--micro_batches", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("schedules"), help="where the drawings go (default: %(default)s)")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in KINDS:
        try:
            plan = schedule(name, args.stages, args.micro_batches)
        except ConfigError as error:
            print(f"{name}: {error}")
            continue
        ran = plan.run(*(1 / plan.chunks,) * 3)  # the chunks of a stage share its work
        path = args.folder / f"{name}.svg"
        path.write_text(as_svg(plan, ran))
        held = ", ".join(f"{count / plan.chunks:g}" for count in plan.activations())
        print(f"{name}: bubble {100 * ran.share('total'):.1f} %, activations by stage {held} (in micro-batches of a whole stage), {path}")


if __name__ == "__main__":
    main()
