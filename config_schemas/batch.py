"""Batch sizes: train batch = micro batch x accumulation x data-parallel ranks, solved for what is missing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from ..errors import ConfigError

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


class Batch(NamedTuple):
    """A consistent triple."""

    train: int
    micro: int
    steps: int


def solve_batch(train: int | None, micro: int | None, gas: int | None, dp_world: int, *, origin: Mapping[str, str] | None = None) -> Batch:
    """Return the consistent batch sizes of which up to two are missing.

    With only `train` accumulation is 1, with only `micro` too. `origin` says where each given number was written, for the
    message.

    Raises:
        ConfigError: neither train nor micro is given, a number is below 1, or the numbers contradict each other; the
            message shows the three numbers, where each came from, and the nearest legal triples.
    """
    given = {TRAIN: train, MICRO: micro, STEPS: gas}
    if dp_world < 1:
        raise ConfigError(f"the number of data-parallel ranks is {dp_world}; it must be at least 1")
    for name, number in given.items():
        if number is not None and number < 1:
            raise ConfigError(f"{name} is {number}; it must be at least 1")
    if train is None and micro is None:
        extra = f" ({STEPS} {gas} alone says nothing about the batch)" if gas is not None else ""
        raise ConfigError(f"no batch size is given{extra}; set {MICRO} (samples of one forward on one rank) or {TRAIN}")
    if train is None:
        assert micro is not None
        steps = gas or 1
        return Batch(micro * steps * dp_world, micro, steps)
    if micro is not None:
        steps = gas if gas is not None else train // (micro * dp_world)
        solved = Batch(train, micro, steps)
    else:
        steps = gas or 1
        solved = Batch(train, train // (steps * dp_world), steps)
    if solved.micro * solved.steps * dp_world != train:
        raise ConfigError(_contradiction(train, micro, gas, dp_world, origin or {}))
    return solved


def nearest_legal(train: int, micro: int | None, gas: int | None, dp_world: int, count: int = 3) -> list[Batch]:
    """Return legal triples that are closest to the numbers given, closest first; missing numbers are free."""
    candidates: set[Batch] = set()
    per_rank = train / dp_world
    for total in _around(per_rank):
        for small in _divisors(total):
            candidates.add(Batch(total * dp_world, small, total // small))
    if micro is not None:
        for steps in _around(per_rank / micro):
            candidates.add(Batch(micro * steps * dp_world, micro, steps))
    if gas is not None:
        for small in _around(per_rank / gas):
            candidates.add(Batch(small * gas * dp_world, small, gas))
    if micro is not None and gas is not None:
        candidates.add(Batch(micro * gas * dp_world, micro, gas))

    def distance(batch: Batch) -> tuple[float, int, Batch]:
        pairs = ((batch.train, train), (batch.micro, micro), (batch.steps, gas if gas is not None or micro is not None else 1))
        wanted = [(have, want) for have, want in pairs if want is not None]
        return sum(abs(math.log(have / want)) for have, want in wanted), sum(have != want for have, want in wanted), batch

    ranked = sorted(candidates, key=distance)
    nearest = ranked[:count]
    same_train = next((batch for batch in ranked if batch.train == train), None)
    if same_train is not None and same_train not in nearest:
        nearest[-1] = same_train  # one that keeps the global batch is what most runs want
    return nearest


def _contradiction(train: int, micro: int | None, gas: int | None, dp_world: int, origin: Mapping[str, str]) -> str:
    def shown(name: str, number: int | None, derived: float) -> str:
        if number is None:
            return f"{name} {derived:g} (derived)"
        return f"{name} {number} ({origin.get(name, 'given')})"

    micro_derived = train / ((gas or 1) * dp_world)
    steps_derived = train / (micro * dp_world) if micro is not None else 1
    ranks = f"{dp_world} data-parallel rank{'' if dp_world == 1 else 's'}"
    if micro is not None and gas is not None:
        outcome = f"that product is {micro * gas * dp_world}, not {train}"
    else:
        outcome = "the derived number is not a whole one"
    triples = ", ".join(f"({legal.train}, {legal.micro}, {legal.steps})" for legal in nearest_legal(train, micro, gas, dp_world))
    return (
        f"{shown(TRAIN, train, 0)} must equal {shown(MICRO, micro, micro_derived)} x {shown(STEPS, gas, steps_derived)} x {ranks}; "
        f"{outcome}; nearest legal (train, micro, accumulation): {triples}"
    )


def _around(number: float) -> set[int]:
    return {max(1, math.floor(number)), max(1, math.ceil(number))}


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})
