"""torch.compile in every place where users put it: same numbers at every stage, and compilations counted."""

from __future__ import annotations

import pytest
import torch
from models import TiedGPT, batch
from oracle import adamw, assert_close, drive, engine_for, plain

LAYERS, STEPS = 12, 4
WAYS = (
    "none",
    "whole model",
    "whole model in place",
    "each block replaced",
    "each block in place",
    "each forward",
    "a part of each block",
    "method",
    "config",
)


class CountingBackend:
    """Runs what it is given as it is, and counts the graphs."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph_module, example_inputs):
        self.graphs += 1
        return graph_module.forward


def build():
    torch.manual_seed(3)
    return TiedGPT(LAYERS)


def gpt_loss(model, step, micro, rank):
    return model(*batch("gpt", step, micro, rank))


def prepare(model, way, backend):
    """What a script does before initialize."""
    if way == "whole model":
        return torch.compile(model, backend=backend)
    if way == "whole model in place":
        model.compile(backend=backend)
    for index, block in enumerate(model.blocks):
        if way == "each block replaced":
            model.blocks[index] = torch.compile(block, backend=backend)
        if way == "each block in place":
            block.compile(backend=backend)
        if way == "each forward":
            block.forward = torch.compile(block.forward, backend=backend)
        if way == "a part of each block":
            block.up = torch.compile(block.up, backend=backend)
    return model


def compiled(stage, way):
    torch._dynamo.reset()
    backend = CountingBackend()
    keys = {"compile": {"enabled": True, "backend": "eager"}} if way == "config" else {}
    engine = engine_for(prepare(build(), way, backend), stage, adamw(), **keys)
    if way == "method":
        engine.compile(backend=backend)
    first = drive(engine, gpt_loss, 2)
    after_two = backend.graphs
    run = drive(engine, gpt_loss, STEPS - 2, first=2)
    with torch.no_grad():
        engine.eval()
        engine(*batch("gpt", 9, 0, 0))
        engine.train()
    after_eval = backend.graphs
    weights = {name.replace("_orig_mod.", ""): value for name, value in run.weights.items()}
    engine.destroy()
    return first.losses + run.losses, weights, after_two, after_eval


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_compiled_in_any_place_trains_like_plain_and_compiles_a_bounded_number_of_times(pools, way, stage):
    """P34. Twelve equal blocks are a handful of graphs, and none is added once two steps have passed but for evaluation."""
    wanted = plain(build(), gpt_loss, STEPS, adamw())
    for _, weights, after_two, after_eval in pools(2).run(compiled, stage, way):
        assert_close(weights, wanted.weights, atol=1e-5, what=(way, stage))
        if way not in ("none", "config"):
            assert 1 <= after_two <= 4, (way, stage, after_two)
            assert after_eval - after_two <= 2, (way, stage, after_eval)
