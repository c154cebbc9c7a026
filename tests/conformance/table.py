"""Writes docs/conformance.md from what the tests measured, and reads the names back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from case import Case
from catalogue import CASES, GROUPS

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
COMMAND = 'python -m pytest tests/conformance -m "full or not full" --write-table'
DTYPES = ("fp32", "bf16")
Found = Mapping[tuple[str, str], Mapping[str, Any]]

HEAD = """# Conformance: models and patterns that train as in plain PyTorch

{trained} models and patterns, each trained for 20 steps on 2 ranks at ZeRO stages 0 to 3, against plain PyTorch: one process
that takes each rank's micro-batch in turn, adds the gradients divided by the number of ranks, and steps the same optimizer.
Generated from the tests by

    {command}

which is the only way to change this page; a test compares its rows with the list of cases.

- A cell is the largest relative difference over all losses of the 20 steps and all tensors of the final state dict (the largest difference
  in a tensor over its largest value, running statistics included). `=` means no difference in any bit. In fp32 the tests allow 1e-5.
- In bf16 the reference keeps fp32 masters of bfloat16 weights and fp32 sums of gradients, as the engine does. The tests allow 2e-2: where a
  case has several backwards in a step, the order of their sums shows in the last bits of a bfloat16 weight.
- Both sides seed torch with the same number for each step and rank, so dropout and other random draws are equal.
- The optimizer is AdamW, or SGD with momentum (marked SGD) where several backwards fall into a step: Adam does not care about a factor that
  all gradients share, and turns the rounding noise of a gradient that is zero into a full step.
- Layers and blocks are units of their own however small they are (`units.min_numel: 0`), so that small models are really cut up.
"""


def write(found: Found) -> None:
    """Write the page; the run must have covered every case in both dtypes.

    Raises:
        ValueError: names cases without figures.
    """
    missing = [f"{name} ({dtype})" for name, case in CASES.items() for dtype in DTYPES if needs(case, dtype) and (name, dtype) not in found]
    if missing:
        raise ValueError(f"the table needs a run of everything ({COMMAND}); no figures for {', '.join(missing[:5])}")
    trained = sum(len(case.refused) < 4 for case in CASES.values())
    lines = [HEAD.format(command=COMMAND, trained=trained)]
    for title, cases in GROUPS.items():
        lines += [f"## {title}", "", "| case | what it is | parameters | units | fp32: stage 0 | 1 | 2 | 3 | bf16: stage 0 | 1 | 2 | 3 |"]
        lines += ["|---|---|" + "--:|" * 10]
        lines += [row(case, found) for case in cases]
        lines += ["", *notes(cases, found)]
    PAGE.write_text("\n".join(lines).rstrip() + "\n")


def needs(case: Case, dtype: str) -> bool:
    return dtype == "fp32" or not case.no_bf16


def row(case: Case, found: Found) -> str:
    plain = found[case.name, "fp32"]
    about = case.about + (" (SGD)" if case.optimizer == "sgd" else "")
    counts = [f"{plain['parameters']:,}", str(plain["units"])] if len(case.refused) < 4 else ["", ""]
    cells = [cell(case, found.get((case.name, dtype)), stage) for dtype in DTYPES for stage in range(4)]
    return "| " + " | ".join([case.name, about, *counts, *cells]) + " |"


def cell(case: Case, figures: Mapping[str, Any] | None, stage: int) -> str:
    if stage in case.refused:
        return "refused"
    if figures is None:
        return "-"
    worst = max(figures["stages"][stage]["loss"], figures["stages"][stage]["weights"])
    return f"{worst:.0e}" if worst else "="


def notes(cases: list[Case], found: Found) -> list[str]:
    """Return a line for each refusal, for each case without bfloat16, and for each that the script has to cast."""
    lines = []
    for case in cases:
        if case.refused:
            at = "at every stage" if len(case.refused) == 4 else "at stage " + ", ".join(map(str, case.refused))
            lines.append(f"- **{case.name}** is refused {at}: {refusal(case, found[case.name, 'fp32'])}")
        if case.no_bf16 and len(case.refused) < 4:
            lines.append(f"- **{case.name}** has no bf16 run: {case.no_bf16}.")
        if case.cast_first:
            lines.append(
                f"- **{case.name}** is cast by the script in bf16, `model.to(torch.bfloat16)` before `initialize`: {case.cast_first}."
            )
    return [*lines, ""] if lines else []


def refusal(case: Case, figures: Mapping[str, Any]) -> str:
    """Return the error's first clause; that of ranks out of step depends on which rank is ahead."""
    said = [stage["refused"] for stage in figures["stages"].values() if "refused" in stage]
    if not said:
        return (
            f"`RankError: {next(iter(case.refused.values()))}: …`, with the unit that each rank waits for; every rank ends within seconds."
        )
    return f"`{said[0].split(';')[0].split(': its')[0]}`."


def published() -> dict[str, list[str]]:
    """Return the rows of the page as it is: name -> its cells."""
    rows = [re.split(r"\s*\|\s*", line.strip("| \n")) for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in rows if cells[0] != "case"}
