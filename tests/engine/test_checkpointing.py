"""`stateroom.checkpointing`: less is kept, gradients and random numbers are the same, options without effect are named."""

from __future__ import annotations

import logging

import pytest
import stateroom
import torch
from stateroom.engine import checkpointing
from stateroom.engine.checkpointing import RngTracker
from torch import nn


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(checkpointing, "_settings", checkpointing._Settings())
    yield
    checkpointing.get_cuda_rng_tracker().reset()


def block():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 8))


def gradients(run):
    module, x = block(), torch.ones(4, 8, requires_grad=True)
    torch.manual_seed(1)
    run(module, x).square().sum().backward()
    return [x.grad, *(p.grad for p in module.parameters())]


def kept_bytes(run):
    """Bytes that autograd packs outside of a checkpoint's own bookkeeping."""
    sizes = []
    module, x = block(), torch.ones(4, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
        run(module, x)
    return sum(sizes)


@pytest.mark.parametrize("in_cpu", [False, True])
@pytest.mark.parametrize("function", [checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint])
def test_gradients_are_the_same_with_dropout_in_between(function, in_cpu):
    checkpointing.configure(None, checkpoint_in_cpu=in_cpu)
    plain = gradients(lambda module, x: module(x))
    assert all(torch.equal(a, b) for a, b in zip(gradients(function), plain, strict=True))


def test_only_the_inputs_are_kept():
    assert kept_bytes(checkpointing.checkpoint) <= 4 * 8 * 4 < kept_bytes(lambda module, x: module(x))


def test_without_grad_it_only_runs():
    with torch.no_grad():
        assert not checkpointing.checkpoint(lambda x, scale: x * scale, torch.ones(2), scale=3).requires_grad


def test_configure_reads_the_config_and_arguments_win():
    assert not stateroom.checkpointing.is_configured()
    config = {"train_batch_size": 1, "activation_checkpointing": {"cpu_checkpointing": True}}
    checkpointing.configure(None, deepspeed_config=config)
    assert checkpointing.is_configured() and checkpointing._settings.in_cpu
    checkpointing.configure(None, deepspeed_config=config, checkpoint_in_cpu=False)
    assert not checkpointing._settings.in_cpu


def test_options_without_effect_are_named_in_one_line(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("stateroom"), "propagate", True)
    config = {"train_batch_size": 1, "activation_checkpointing": {"partition_activations": True, "number_checkpoints": 4}}
    with caplog.at_level(logging.INFO, "stateroom"):
        checkpointing.configure(None, deepspeed_config=config, profile=True)
    (line,) = [record.getMessage() for record in caplog.records]
    assert all(name in line for name in ("partition_activations", "num_checkpoints", "profile")) and "synchronize" not in line
    caplog.clear()
    checkpointing.configure(None)
    assert not caplog.records


def test_a_forked_state_goes_on_where_it_was_and_leaves_the_default_alone():
    checkpointing.model_parallel_cuda_manual_seed(7)
    tracker = checkpointing.get_cuda_rng_tracker()
    default = torch.get_rng_state()
    with tracker.fork():
        first = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), default)
    with tracker.fork():
        second = torch.rand(3)
    torch.manual_seed(7 + 2718)
    assert torch.equal(torch.rand(3), first) and torch.equal(torch.rand(3), second)


def test_a_tracker_refuses_unknown_and_repeated_names():
    tracker = RngTracker()
    tracker.add("a", 1)
    with pytest.raises(ValueError, match="exists already"):
        tracker.add("a", 2)
    with pytest.raises(ValueError, match="no random state 'b'"), tracker.fork("b"):
        pass
