"""The three batch sizes always multiply out, and a contradiction shows where each number came from and what would be legal."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stateroom.config_schemas import load, nearest_legal, solve_batch
from stateroom.errors import ConfigError

NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
SMALL = st.integers(1, 64)


@pytest.mark.parametrize(
    ("given_sizes", "two_ranks", "four_ranks"),
    [
        ((16, None, None), (16, 8, 1), (16, 4, 1)),
        ((None, 4, None), (8, 4, 1), (16, 4, 1)),
        ((16, 2, None), (16, 2, 4), (16, 2, 2)),
        ((16, None, 4), (16, 2, 4), (16, 1, 4)),
        ((None, 2, 3), (12, 2, 3), (24, 2, 3)),
    ],
)
def test_table(given_sizes: tuple[int | None, ...], two_ranks: tuple[int, ...], four_ranks: tuple[int, ...], monkeypatch: Any) -> None:
    config = {name: size for name, size in zip(NAMES, given_sizes, strict=True) if size is not None}
    for ranks, expected in ((2, two_ranks), (4, four_ranks)):
        assert solve_batch(*given_sizes, ranks) == expected
        assert tuple(getattr(load(config, dp_world=ranks), name) for name in NAMES) == expected
        assert tuple(getattr(load(config, ranks=ranks), name) for name in NAMES) == expected
        assert solve_batch(*expected, ranks) == expected
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        assert tuple(getattr(load(config), name) for name in NAMES) == expected


@given(micro=SMALL, steps=SMALL, ranks=SMALL, hidden=st.sampled_from([(), (0,), (1,), (2,), (0, 2)]))
def test_what_is_left_out_is_solved(micro: int, steps: int, ranks: int, hidden: tuple[int, ...]) -> None:
    whole = (micro * steps * ranks, micro, steps)
    if hidden == (0, 2):
        whole = (micro * ranks, micro, 1)
    solved = solve_batch(*(None if place in hidden else size for place, size in enumerate(whole)), ranks)
    assert solved == whole


@given(train=st.none() | SMALL, micro=st.none() | SMALL, steps=st.none() | SMALL, ranks=st.integers(1, 9))
def test_solved_or_refused_but_never_inconsistent(train: int | None, micro: int | None, steps: int | None, ranks: int) -> None:
    try:
        solved = solve_batch(train, micro, steps, ranks)
    except ConfigError as error:
        if train is None and micro is None:
            assert "train_micro_batch_size_per_gpu" in str(error)
            return
        assert "nearest legal" in str(error)
        triples = re.findall(r"\((\d+), (\d+), (\d+)\)", str(error))
        assert triples
        assert all(int(a) == int(b) * int(c) * ranks and min(int(b), int(c)) >= 1 for a, b, c in triples)
    else:
        assert solved.train == solved.micro * solved.steps * ranks
        for wanted, have in zip((train, micro, steps), solved, strict=True):
            assert wanted in (None, have)


@given(train=SMALL, micro=st.none() | SMALL, steps=st.none() | SMALL, ranks=st.integers(1, 9))
def test_nearest_is_the_same_when_it_is_legal(train: int, micro: int | None, steps: int | None, ranks: int) -> None:
    if micro is not None and steps is not None and train == micro * steps * ranks:
        assert nearest_legal(train, micro, steps, ranks)[0] == (train, micro, steps)


def test_contradiction_shows_numbers_origins_and_alternatives() -> None:
    text = '{\n"train_batch_size": 30,\n"train_micro_batch_size_per_gpu": 4,\n"gradient_accumulation_steps": 4}'
    with pytest.raises(ConfigError) as caught:
        load(text, dp_world=2)
    message = str(caught.value)
    for part in ("train_batch_size 30 (line 2)", "train_micro_batch_size_per_gpu 4 (line 3)", "gradient_accumulation_steps 4 (line 4)"):
        assert part in message
    assert "2 data-parallel ranks" in message and "that product is 32" in message
    assert "(32, 4, 4)" in message and re.search(r"\(30, \d+, \d+\)", message)


def test_derived_fraction_is_shown_as_derived() -> None:
    with pytest.raises(ConfigError, match=r"train_micro_batch_size_per_gpu 7\.5 \(derived\).*nearest legal"):
        solve_batch(30, None, None, 4)


@pytest.mark.parametrize("sizes", [(0, None, None), (None, 0, None), (8, -1, None), (8, 2, 0)])
def test_sizes_below_one_are_refused(sizes: tuple[int | None, ...]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        solve_batch(*sizes, 2)


def test_ranks_that_share_a_model_do_not_count() -> None:
    config = {"train_micro_batch_size_per_gpu": 4, "mesh": {"tp": 2, "pp": 2}}
    assert load(config, ranks=8).train_batch_size == 8
    assert load({"train_micro_batch_size_per_gpu": 4, "sequence_parallel_size": 4}, ranks=8).train_batch_size == 8
    with pytest.raises(ConfigError, match="6 ranks cannot be divided by the 4 ranks"):
        load(config, ranks=6)


def test_launch_variable_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE='two'"):
        load({"train_batch_size": 8})


def test_three_numbers_without_ranks_imply_the_ranks() -> None:
    config = load(dict(zip(NAMES, (32, 4, 4), strict=True)))
    assert (config.train_batch_size, config.gradient_accumulation_steps) == (32, 4)
