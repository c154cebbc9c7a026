"""Where a config may come from, and what its text may look like: lines are right, cut texts and double keys are refused."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stateroom.config_schemas import load
from stateroom.config_schemas.draft import walk
from stateroom.config_schemas.scanner import scan
from stateroom.config_schemas.source import read_source
from stateroom.errors import ConfigError

DATA: dict[str, Any] = {"train_batch_size": 8, "zero_optimization": {"stage": 2, "overlap_comm": True}}
TEXT = json.dumps(DATA, indent=2)
HJSON = """
// a comment
# another
/* and
   one more */
{
  train_batch_size: 8   # inline
  'zero_optimization': {
    "stage": 2, // inline too
    overlap_comm: true,
  },
}
"""


def test_every_form_of_a_config_gives_the_same(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(TEXT)
    marked = tmp_path / "bom.json"
    marked.write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    encoded = base64.urlsafe_b64encode(TEXT.encode()).decode()
    wanted = load(DATA, dp_world=2).to_dict()
    braceless = "train_batch_size: 8\nzero_optimization: {\n stage: 2\n overlap_comm: true }\n"
    for source in (file, str(file), marked, TEXT, HJSON, encoded, encoded.rstrip("="), braceless, wanted):
        assert load(source, dp_world=2).to_dict() == wanted


def test_loading_leaves_the_dict_of_the_caller_alone() -> None:
    source = {"train_batch_size": "auto", "bfloat16": {"enabled": True}, "zero_optimization": {"cpu_offload": True}}
    before = json.dumps(source)
    load(source, dp_world=1)
    assert json.dumps(source) == before


def test_a_config_object_loads_to_itself() -> None:
    config = load(DATA, dp_world=2)
    assert load(config, dp_world=2).to_dict() == config.to_dict()


@pytest.mark.parametrize("source", ["missing.json", "", "[1]", "runs/ds.json", "trainbatchsize", "aGVsbG8gd29ybGQ="])
def test_a_string_that_is_no_config_is_a_missing_file(source: str) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load(source)


@pytest.mark.parametrize("source", [3, None, b"{}", [DATA]])
def test_other_types_are_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match="a config is a path, a dict, or JSON text"):
        load(source)


@pytest.mark.parametrize(
    ("content", "text"), [(b"", "empty"), (b" \n", "empty"), (b"[1, 2]", "expected an object"), (b"\xff\xfe\x00{", "UTF-8")]
)
def test_files_that_hold_no_config(tmp_path: Path, content: bytes, text: str) -> None:
    file = tmp_path / "ds.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=text) as caught:
        load(file)
    assert "ds.json" in str(caught.value)


def test_a_folder_is_no_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)


def test_every_cut_of_a_file_names_the_file_and_a_line(tmp_path: Path) -> None:
    file = tmp_path / "cut.json"
    for end in range(len(TEXT)):
        file.write_text(TEXT[:end])
        with pytest.raises(ConfigError, match=r"cut\.json, line \d+"):
            load(file, dp_world=1)


@pytest.mark.parametrize(
    ("text", "path", "line", "first"),
    [
        ('{\n"a": 1,\n"a": 2}', "a", 3, 2),
        ('{"zero_optimization": {\n"stage": 1,\n\n"stage": 1}}', "zero_optimization.stage", 4, 2),
        ("{\nx: [\n{k: 1\nk: 2}]}", "x.0.k", 4, 3),
        ('{"a": 1, // a\n"\\u0061": 2}', "a", 2, 1),
        ("a: 1\nb: 2\na: 3", "a", 3, 1),
    ],
)
def test_duplicate_keys_are_refused_on_every_level(text: str, path: str, line: int, first: int) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert str(caught.value) == f"{path} (config text, line {line}): duplicate key, first given on line {first}; keep one"


def test_the_same_key_in_different_objects_is_no_duplicate() -> None:
    load('{"train_batch_size": 8, "fp16": {"enabled": false}, "bf16": {"enabled": false}}', dp_world=1)


def test_lines_survive_comments_strings_and_lists() -> None:
    text = '{\n"a": "x # { \\" //",\n// "b": 1\n/* "c": 2\n */ "d": [1,\n2, {"e": \'\'\'one\ntwo\'\'\'}], f: no , comma\n g: 3 }'
    lines = scan(text).lines
    assert {path: line for path, line in lines.items() if isinstance(path[-1], str)} == {
        ("a",): 2,
        ("d",): 5,
        ("d", 2, "e"): 6,
        ("f",): 7,
        ("g",): 8,
    }


NAMES = st.text(st.characters(codec="ascii"), min_size=1, max_size=6)
TREES = st.dictionaries(
    NAMES,
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)


def all_paths(value: Any, path: tuple[Any, ...] = ()) -> set[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {p for key, item in items for p in ({(*path, key)} | all_paths(item, (*path, key)))}


@settings(max_examples=100, deadline=None)
@given(tree=TREES, indent=st.sampled_from([None, 0, 2]))
def test_scanner_finds_every_key_on_its_line(tree: dict[str, Any], indent: int | None) -> None:
    text = json.dumps(tree, indent=indent)
    found = scan(text)
    assert set(found.lines) == all_paths(tree)
    assert not found.duplicates and not found.unclosed
    for path, line in found.lines.items():
        if isinstance(path[-1], str):
            assert json.dumps(path[-1]) in text.split("\n")[line - 1]


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="{}[]:,\"'#/* \nab1\\-", max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    scan(text)
    try:
        read_source("{" + text)
    except ConfigError as error:
        assert "line" in str(error) or "does not exist" in str(error)


def test_origin_holds_lines_of_text_sources() -> None:
    config = load(HJSON, dp_world=1)
    assert config.origin["train_batch_size"] == "line 7"
    assert config.origin["zero_optimization.overlap_comm"] == "line 10"
    assert config.origin["gradient_clipping"] == "default"
    assert all(config.origin[".".join(map(str, path))] for path, _ in walk(config.to_dict()))
