"""The ledger gives the published and executed figures, and those of sister cases, through its public functions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from answers.case import Case  # noqa: E402
from known_answers import miss, run  # noqa: E402


def cases(name):
    return [Case.read(data) for data in json.loads((HERE / "data" / name).read_text())]


@pytest.mark.parametrize("name, least", [("known_answers.json", 312), ("siblings.json", 180)])
def test_every_case_is_answered_within_its_tolerance(name, least):
    passed, misses = run(HERE / "data" / name)
    assert not misses, "\n".join(misses)
    assert passed >= least


def test_a_wrong_expectation_is_a_miss():
    """Negative control: every case with another expectation is missed, so no answer comes from the expectation."""
    for case in cases("known_answers.json"):
        doubled = case.expected * 2 if case.expected else 1.0
        assert miss(Case(case.id, case.kind, case.inputs, doubled, case.unit, case.rel_tol, case.formula, case.note, case.source)), case.id


def test_answers_do_not_depend_on_which_case_is_asked():
    """Only words such as `active` or `cpu` of a name are read: a case under another number keeps its answer."""
    kept = {"total", "active", "cpu", "gpu", "hfu", "mfu", "true", "sp", "nosp", "daly", "young", "exact", "opt", "goodput"}
    for number, case in enumerate(cases("known_answers.json")):
        words = [word for word in case.words if word in kept]
        renamed = Case(
            f"case{number}/" + "_".join(words),
            case.kind,
            case.inputs,
            case.expected,
            case.unit,
            case.rel_tol,
            case.formula,
            case.note,
            case.source,
        )
        assert miss(renamed) is None, (case.id, renamed.id, miss(renamed))


def test_the_script_ends_with_the_tally(tmp_path):
    bad = {"id": "cost/x", "kind": "cost", "inputs": {"gpu_hours": 2, "usd_per_h": 2}, "expected": 5, "unit": "USD", "rel_tol": 1e-9}
    good = {**bad, "expected": 4}
    unknown = {**bad, "kind": "weather"}
    (tmp_path / "file.json").write_text(json.dumps([bad, good, unknown]))
    done = subprocess.run([sys.executable, str(HERE / "known_answers.py"), str(tmp_path / "file.json")], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "1 passed, 2 failed"
    assert done.returncode == 1 and "expected 5" in done.stdout and "weather" in done.stdout
