"""`stateroom env`: what this machine and installation are, for bug reports."""

from __future__ import annotations

import argparse
import json

from .report import collect


def main(argv: list[str]) -> int:
    """Print the report and return 0."""
    parser = argparse.ArgumentParser(
        prog="stateroom env",
        description="Report versions, devices, network, disks and the variables that steer them; values of secrets are left out.",
        epilog="example: stateroom env --json > env.json",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    report = collect()
    if args.json:
        print(json.dumps(report, indent=2))
        return 0
    for section, rows in report.items():
        print(section)
        width = max((len(name) for name in rows), default=0)
        for name, value in rows.items():
            print(f"  {name:<{max(width, 18)}} {value}")
    return 0
