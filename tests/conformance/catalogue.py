"""All cases by name: the rows of the table in their order."""

from __future__ import annotations

import itertools

import models_other
import models_text
import models_vision
import patterns_apart
import patterns_graph
import patterns_shape
import patterns_sharing
import patterns_state
import patterns_values
import ways
from case import Case

GROUPS: dict[str, list[Case]] = {
    "Language models": models_text.CASES,
    "Images, sound, several kinds at once": models_vision.CASES,
    "Diffusion, adapters, adversaries, torch's layers": models_other.CASES,
    "Patterns: who uses a parameter": patterns_sharing.CASES,
    "Patterns: ranks that do not run the same": patterns_apart.CASES,
    "Patterns: what a parameter is": patterns_state.CASES,
    "Patterns: autograd": patterns_graph.CASES,
    "Patterns: how modules are built": patterns_shape.CASES,
    "Patterns: what travels between modules": patterns_values.CASES,
    "Orders of forward and backward": ways.CASES,
}


def by_name(groups: dict[str, list[Case]]) -> dict[str, Case]:
    """Return the cases of all groups; a name may stand for one case only."""
    found: dict[str, Case] = {}
    for case in itertools.chain(*groups.values()):
        if case.name in found:
            raise ValueError(f"two cases are called {case.name!r}")
        found[case.name] = case
    return found


CASES = by_name(GROUPS)
# run in full in every test run: one or two of each kind; the others for a few steps, and in full with the exhaustive matrix
CORE = """
    ALBERT; GPT-2; Llama recomputed; Mixtral; T5; ResNet; LoRA on Llama; GAN
    TiedAcrossUnits; CalledTwice; ReadsOthersWeight; Unused; ExpertsInBlocks; LoRAInside; MixedDtypes; EmptyAndScalar; SparseEmbedding
    BatchNorm; ComplexParameter; CheckpointedReentrant; CheckpointedTwice; InputGradient; OddOutputs
    two forwards one backward; two losses with a backward each
"""
CORE_NAMES = [name.strip() for line in CORE.strip().splitlines() for name in line.split(";")]


def combinations(models: list[str]) -> dict[str, Case]:
    """Return every way of calling forward and backward on each of the models, by name; not rows of the table."""
    found = {}
    for model in models:
        for name, how in ways.WAYS.items():
            if not cannot(model, name):
                case = ways.on(CASES[model].build, f"{ways.words(name)}, on {model}", how)
                found[case.name] = case
    return found


def cannot(model: str, way: str) -> bool:
    """Tell what plain PyTorch cannot do: that loss does not depend on x; reentrant recompute knows no autograd.grad."""
    of_an_input = "of_an_input" in way or "adversarial" in way
    return (model == "TiedEmbedding" and of_an_input) or (model == "CheckpointedReentrant" and (of_an_input or "penalty" in way))


COMBINATIONS = combinations(["ReadsOthersWeight", "TiedEmbedding", "LoRAInside", "Checkpointed", "CheckpointedReentrant"])
