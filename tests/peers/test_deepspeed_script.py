"""The script that the drop-in test runs is a DeepSpeed script: unchanged, under DeepSpeed, it gives the same figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from drop_in import SCRIPT, changed, config_for, run

UNCOMPILED = str(Path(__file__).with_name("uncompiled.py"))
REL = 1e-5


@pytest.mark.parametrize("stage", range(4))
def test_the_unchanged_script_gives_the_same_figures(tmp_path: Path, peer: str, stage: int) -> None:
    ours, _ = run(tmp_path / "ours", changed(), config_for(stage))
    theirs, _ = run(tmp_path / "theirs", SCRIPT.read_text(), config_for(stage), python=peer, through=(UNCOMPILED,))
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=REL)
    assert ours["lrs"] == pytest.approx(theirs["lrs"], rel=1e-9)
    for key in ("at_save", "after_load", "at_end"):
        assert ours[key] == pytest.approx(theirs[key], rel=REL), key
    assert (ours["index"], ours["steps_after_load"]) == (theirs["index"], theirs["steps_after_load"])
    assert ours["inside"]["gathered"] == pytest.approx(theirs["inside"]["gathered"], rel=REL, abs=REL)
    for mine, other in zip(ours["norms"], theirs["norms"], strict=True):
        assert other is None or mine == pytest.approx(other, rel=REL)
