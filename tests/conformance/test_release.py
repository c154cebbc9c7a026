"""At stage 3 no more units are gathered in a backward than the current one, the next one and the root, however the loss was made."""

from __future__ import annotations

import pytest
import torch
from base import Base, Block
from catalogue import CASES
from oracle import engine_for, sgd
from torch import nn
from ways import WAYS

DEPTH = 6


class Deep(Base):
    """Blocks enough to see whether they pile up."""

    depth = DEPTH


class DeepFrozen(Deep):
    """Blocks with a frozen layer, of which the backward needs the weight."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.up.requires_grad_(False)


class DeepUnused(Deep):
    """Blocks with a layer that no forward uses, so that a unit never has all its gradients."""

    def block(self):
        block = Block()
        block.never = nn.Linear(4, 4)
        return block


MODELS = {"plain": Deep, "frozen": DeepFrozen, "unused": DeepUnused, "detached": CASES["DetachedWeight"].build}
USED = ("plain_backward", "two_forwards_one_backward", "a_forward_without_backward", "evaluation_between_forward_and_backward")


def most_gathered(model, way):
    """Return the largest number of blocks whose memory was there at once while gradients landed, and how many are left."""
    torch.manual_seed(5)
    engine = engine_for(MODELS[model](), 3, sgd(0.1))
    blocks = [unit for unit in engine.sharded.units if unit.sharded and unit.name.startswith("blocks.")]
    seen = []

    def count(_):
        seen.append(len({unit.name.split("[")[0] for unit in blocks if unit.full.untyped_storage().nbytes()}))

    for param in engine.module.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(count)
    for step in range(2):
        WAYS[way](engine, engine.backward, step, engine.global_rank)
        engine.step()
    left = sum(bool(unit.full.untyped_storage().nbytes()) for unit in blocks)
    engine.destroy()
    return max(seen), left


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("way", USED)
def test_blocks_do_not_pile_up_in_a_backward(pools, model, way):
    for most, left in pools(2).run(most_gathered, model, way):
        assert most <= 3, most  # what was just used, what is used, what comes next
        assert left == 0


def test_the_count_sees_blocks_that_pile_up(pools):
    """Negative control: with a graph that is differentiated twice the blocks have to stay."""
    for most, _ in pools(2).run(most_gathered, "plain", "penalty_on_the_gradient_of_an_input"):
        assert most == DEPTH
