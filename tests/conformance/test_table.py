"""The published table has a row for every case and for nothing else, and says of each what the tests ask."""

from __future__ import annotations

import table
from catalogue import CASES


def test_every_case_has_its_row():
    assert list(table.published()) == list(CASES), f"write the page anew: {table.COMMAND}"


def test_rows_say_what_the_cases_say():
    for name, (about, _, _, *cells) in table.published().items():
        case = CASES[name]
        assert about.startswith(case.about), name
        assert len(cells) == 8
        for index, cell in enumerate(cells):
            stage, dtype = index % 4, table.DTYPES[index // 4]
            if stage in case.refused:
                assert cell == "refused", (name, cells)
            elif not table.needs(case, dtype):
                assert cell == "-", (name, cells)
            else:
                assert cell == "=" or float(cell) <= {"fp32": 1e-5, "bf16": 2e-2}[dtype], (name, cells)


def test_the_list_has_what_was_asked_for():
    """At least 40 that train, more than 25 of them models as people use them."""
    trained = [name for name, case in CASES.items() if len(case.refused) < 4]
    assert len(trained) >= 40
    groups = list(table.GROUPS.values())
    assert sum(len(cases) for cases in groups[:3]) >= 50
