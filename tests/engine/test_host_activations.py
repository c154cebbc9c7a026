"""activation_checkpointing.cpu_checkpointing: inputs of recomputed units wait in host memory, and the bits are the same."""

from __future__ import annotations

import pytest
import torch
from offload_jobs import go_on, same, start, states_of, train, with_lines
from stateroom.engine.host_activations import HostActivations
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import config_for, master_weights


def test_backward_gets_what_forward_saved_one_ahead():
    """Every tensor is moved here, although it is in host memory, so that the way there and back is taken."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def run(host):
        x, seen = torch.ones(3, 8, requires_grad=True), []
        out = x
        for layer in layers:
            with host.keeping():
                out = checkpoint(layer, torch.tanh(out), use_reentrant=False)
        seen.append(len(host._order))
        out.sum().backward()
        return x.grad, seen, len(host._order)

    moved = HostActivations(moves=lambda tensor: True)
    (wanted, none, _), (found, some, left) = run(HostActivations()), run(moved)
    assert torch.equal(wanted, found)
    assert none == [0] and some[0] >= 4
    assert left == 0 and moved.held_bytes == 0


def test_all_but_the_first_are_under_way_before_they_are_asked_for():
    ahead = []

    class Watched(HostActivations):
        def _unpack(self, packed):
            if not isinstance(packed, torch.Tensor):
                ahead.append(packed.back is not None)
            return super()._unpack(packed)

    host, out = Watched(moves=lambda tensor: True), torch.ones(3, 8, requires_grad=True)
    for layer in [nn.Linear(8, 8) for _ in range(4)]:
        with host.keeping():
            out = checkpoint(layer, torch.tanh(out), use_reentrant=False)
    out.sum().backward()
    assert ahead == [False] + [True] * (len(ahead) - 1) and len(ahead) >= 4


def test_a_graph_that_is_kept_is_served_again():
    host = HostActivations(moves=lambda tensor: True)
    x = torch.ones(3, 8, requires_grad=True)
    layer = nn.Linear(8, 8)
    with host.keeping():
        out = checkpoint(lambda t: torch.tanh(layer(t)), x * 2, use_reentrant=False).sum()
    (first,) = torch.autograd.grad(out, x, retain_graph=True)
    (second,) = torch.autograd.grad(out, x)
    assert torch.equal(first, second)


def test_a_forward_without_a_backward_leaves_nothing():
    host = HostActivations(moves=lambda tensor: True)
    layer = nn.Linear(8, 8)
    for _ in range(3):
        with host.keeping():
            out = checkpoint(layer, torch.ones(3, 8, requires_grad=True) * 2, use_reentrant=False)
        assert host.held_bytes == 3 * 8 * 4
        del out
    assert host.held_bytes == 0


def moved_everywhere(zero, policy):
    """Train with every input moved, which on this device must be asked for."""
    section = {"policy": policy, "cpu_checkpointing": True}
    engine = start("gpt", zero, activation_checkpointing=section)
    engine.regions.host._moves = lambda tensor: True
    counts = []
    block = engine.module.blocks[-1]
    block.register_forward_hook(lambda *_: counts.append(engine.regions.host.held_bytes))
    losses, norms = go_on(engine, "gpt", 3)
    states, weights = states_of(engine), master_weights(engine)
    left = engine.regions.host.held_bytes
    engine.destroy()
    return (losses, norms, weights, states), max(counts), left


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("stage", [0, 3])
def test_training_is_bit_identical(pools, policy, stage):
    wanted = pools(2).run(train, "gpt", {"stage": stage}, activation_checkpointing={"policy": policy})
    for (found, most, left), plain in zip(pools(2).run(moved_everywhere, {"stage": stage}, policy), wanted, strict=True):
        same(found, plain)
        assert most > 0 and left == 0


def verdict_lines(section):
    import stateroom
    from models import build

    engine, *_ = stateroom.initialize(build("gpt"), config=config_for(0, "fp32", 1, activation_checkpointing=section))
    engine.destroy()


def test_without_a_policy_one_line_says_that_nothing_goes(pools):
    ((_, lines),) = pools(1).run(with_lines, verdict_lines, {"cpu_checkpointing": True})
    assert any("cpu_checkpointing" in line and "policy is none" in line for line in lines)
    ((_, lines),) = pools(1).run(with_lines, verdict_lines, {"cpu_checkpointing": True, "policy": "full"})
    assert not any("cpu_checkpointing" in line for line in lines)
