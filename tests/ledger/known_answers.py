"""Runs every case of a known-answers file through the ledger's public functions: `python known_answers.py FILE.json`.

A case has kind, inputs, expected, unit and rel_tol; formula, note and source say under which convention the figure was made.
Cases are told apart by the names of their inputs, by their unit, by a word of their name where one set of inputs has two
figures (total or active, host or device), and by the convention that the formula states.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from answers import communication, memory, models, pipelines, recovery, throughput
from answers.case import Case, Unanswered
from stateroom.errors import StateroomError

KINDS: dict[str, Callable[[Case], float]] = {
    "params": models.answer_params,
    "flops": models.answer_flops,
    "memory_states": memory.answer_states,
    "memory_activation": memory.answer_activations,
    "mfu": throughput.answer,
    "cost": throughput.answer,
    "comm": communication.answer,
    "pipeline": pipelines.answer,
    "layout": memory.answer_layout,
    "checkpoint": recovery.answer_checkpoint,
    "fault_goodput": recovery.answer_faults,
}


def miss(case: Case) -> str | None:
    """Return what is wrong with the ledger's answer to a case, or None."""
    ask = KINDS.get(case.kind)
    if ask is None:
        return f"kind {case.kind!r} is not known; known: {', '.join(KINDS)}"
    try:
        found = ask(case)
    except (Unanswered, StateroomError) as error:
        return f"not answered: {error}"
    if abs(found - case.expected) <= case.rel_tol * abs(case.expected) * (1 + 1e-9):
        return None
    off = (found / case.expected - 1) * 100 if case.expected else float("inf")
    return f"{found:.9g} {case.unit}, expected {case.expected:.9g} ({off:+.3g} %, tolerance {case.rel_tol * 100:g} %)"


def run(path: str | Path) -> tuple[int, list[str]]:
    """Return how many cases passed, and a line for each that did not."""
    cases = [Case.read(data) for data in json.loads(Path(path).read_text())]
    found = [(case, miss(case)) for case in cases]
    return sum(text is None for _, text in found), [f"{case.id}: {text}" for case, text in found if text is not None]


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print("usage: python known_answers.py FILE.json", file=sys.stderr)
        return 2
    passed, misses = run(argv[0])
    for line in misses:
        print(line)
    print(f"{passed} passed, {len(misses)} failed")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
