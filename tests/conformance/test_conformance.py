"""Every case trains as in plain PyTorch: 20 steps, stages 0 to 3, on 2 ranks; or it is refused as documented."""

from __future__ import annotations

from typing import Any

import pytest
from case import OUT_OF_STEP
from catalogue import CASES, CORE_NAMES, GROUPS
from lanes import Job

TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2}
OTHERS = [name for name in CASES if name not in CORE_NAMES]
MODELS = {case.name for cases in list(GROUPS.values())[:3] for case in cases}
IN_BF16 = [name for name, case in CASES.items() if not case.no_bf16]
OTHER_OPTIMIZERS = ("sgd", "adagrad", "rmsprop", "nadam", "adamax")
SOME = ["TiedEmbedding", "AlternatingHeads", "LoRAInside", "SparseEmbedding", "EmptyAndScalar", "BatchNorm", "GPT-2", "Mixtral", "ResNet"]
ON_FOUR_RANKS = [
    "TiedAcrossUnits",
    "ExpertsInBlocks",
    "CheckpointedTwice",
    "InputGradient",
    "GPT-2",
    "Switch",
    "T5",
    "ResNet",
    "GAN",
    "DINO",
]


def stages(name: str) -> tuple[int, ...]:
    """Return the stages that a pool of ranks survives: where ranks end each other, test_cases.py (C09, P04) runs them as a job."""
    return tuple(stage for stage in range(4) if CASES[name].refused.get(stage) != OUT_OF_STEP)


def check(name: str, dtype: str, found: dict[str, Any]) -> None:
    for stage, figures in found["stages"].items():
        wanted = CASES[name].refused.get(stage)
        if wanted:
            assert wanted in figures["refused"], (stage, figures)
            continue
        worst = max(figures["loss"], figures["weights"])
        assert worst <= TOLERANCES[dtype], (stage, figures)
        assert figures["moved"] > 5 * TOLERANCES["fp32"], (stage, figures)  # equal to a model that does not train says nothing
        assert not figures["held"], (stage, figures)


IN_FULL = [
    *(pytest.param(Job(name, stages(name))) for name in CORE_NAMES),
    *(pytest.param(Job(name, stages(name)), marks=pytest.mark.full) for name in OTHERS),
]


@pytest.mark.parametrize("job", IN_FULL, ids=str)
def test_equal_to_plain(lanes, figures, job):
    found = lanes.result(job)
    figures[job.name, "fp32"] = found
    check(job.name, "fp32", found)


@pytest.mark.parametrize("job", [Job(name, stages(name)[-1:], steps=3) for name in OTHERS if name not in MODELS], ids=str)
def test_equal_to_plain_shortly(lanes, job):
    """Patterns that run in full with the exhaustive matrix only, for a few steps where states are sharded most: each in every run."""
    check(job.name, "fp32", lanes.result(job))


@pytest.mark.full
@pytest.mark.parametrize("job", [Job(name, stages(name), "bf16") for name in IN_BF16], ids=str)
def test_equal_to_plain_in_bf16(lanes, figures, job):
    """The reference keeps fp32 masters of bfloat16 weights, as the engine does."""
    found = lanes.result(job)
    figures[job.name, "bf16"] = found
    check(job.name, "bf16", found)


WITH_OTHERS = [
    pytest.param(
        Job(name, stages(name), "fp32", optimizer),
        # Adagrad has states before its first step, one number among them where the parameter is one.
        marks=[] if (name, optimizer) == ("EmptyAndScalar", "adagrad") else pytest.mark.full,
    )
    for optimizer in OTHER_OPTIMIZERS
    for name in SOME
]


@pytest.mark.parametrize("job", WITH_OTHERS, ids=str)
def test_equal_to_plain_with_other_optimizers(lanes, job):
    check(job.name, "fp32", lanes.result(job))


@pytest.mark.full
@pytest.mark.parametrize("job", [Job(name, stages(name), ranks=4) for name in ON_FOUR_RANKS], ids=str)
def test_equal_to_plain_on_four_ranks(lanes, job):
    check(job.name, "fp32", lanes.result(job))
