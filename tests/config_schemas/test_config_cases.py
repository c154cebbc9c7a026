"""The example configs get the verdict that is written beside them, from the function and from the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from stateroom.config_schemas import load
from stateroom.config_schemas.cli import main
from stateroom.errors import ConfigError

SHIPPED = Path(__file__).parent / "cases"
SHARED = Path(__file__).parents[3] / "shared" / "cases" / "configs"


def cases() -> list[tuple[Path, str, tuple[str, ...]]]:
    found = []
    for folder in (SHIPPED, SHARED):
        if (folder / "verdicts.json").exists():
            for name, expected in json.loads((folder / "verdicts.json").read_text()).items():
                found.append((folder / name, expected["verdict"], tuple(expected["report_mentions"])))
    return found


CASES = cases()


def test_every_shipped_config_has_a_verdict() -> None:
    judged = {path.name for path, _, _ in CASES if path.parent == SHIPPED}
    assert judged == {path.name for path in SHIPPED.iterdir()} - {"verdicts.json"}


@pytest.mark.parametrize(("path", "verdict", "mentions"), CASES, ids=lambda value: value.name if isinstance(value, Path) else "")
def test_command_gives_the_verdict_and_mentions_what_matters(
    path: Path, verdict: str, mentions: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    for ranks in ([], ["--ranks", "2"]):
        status = main(["check", str(path), *ranks])
        printed = capsys.readouterr().out
        assert status == (0 if verdict == "ok" else 1), printed
        for text in mentions:
            assert text in printed


@pytest.mark.parametrize(("path", "verdict", "mentions"), CASES, ids=lambda value: value.name if isinstance(value, Path) else "")
def test_load_agrees_with_the_command(path: Path, verdict: str, mentions: tuple[str, ...]) -> None:
    if verdict == "ok":
        config = load(path, dp_world=2)
        assert load(config.to_dict(), dp_world=2).to_dict() == config.to_dict()
    else:
        with pytest.raises(ConfigError) as caught:
            load(path, dp_world=2)
        assert all(text in str(caught.value) for text in mentions)
