"""Orders in which scripts call forward, backward and step: the same numbers as in plain PyTorch, at every stage."""

from __future__ import annotations

import pytest
import torch
from patterns import PATTERNS, data

SEQUENCES = {}


def sequence(function):
    """Register a way to run one step; it gets a caller for the model, a backward, the step number and the rank."""
    SEQUENCES[function.__name__] = function
    return function


@sequence
def two_forwards_one_backward(call, backward, model, step, rank):
    loss = call(*data(step, rank)) + call(*data(step + 50, rank))
    backward(loss)
    return loss


@sequence
def a_forward_without_backward(call, backward, model, step, rank):
    call(*data(step + 30, rank))
    loss = call(*data(step, rank))
    backward(loss)
    return loss


@sequence
def evaluation_between_forward_and_backward(call, backward, model, step, rank):
    loss = call(*data(step, rank))
    model.eval()
    with torch.no_grad():
        call(*data(step + 30, rank))
    model.train()
    backward(loss)
    return loss


@sequence
def inference_mode_before_training(call, backward, model, step, rank):
    with torch.inference_mode():
        call(*data(step + 30, rank))
    loss = call(*data(step, rank))
    backward(loss)
    return loss


@sequence
def the_graph_is_kept_and_used_twice(call, backward, model, step, rank):
    loss = call(*data(step, rank))
    backward(loss, retain_graph=True)
    backward(loss * 0.5)
    return loss


@sequence
def several_backwards_of_several_forwards(call, backward, model, step, rank):
    losses = [call(*data(step + shift, rank)) for shift in (0, 20, 40)]
    for loss in reversed(losses):
        backward(loss)
    return sum(losses)


@sequence
def gradient_of_an_input_first(call, backward, model, step, rank):
    x, ids, y = data(step, rank)
    x.requires_grad_()
    loss = call(x, ids, y)
    (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    loss = loss + 0.1 * grad.detach().square().sum()
    backward(loss)
    return loss


@sequence
def a_loop_of_decoding_between_steps(call, backward, model, step, rank):
    model.eval()
    with torch.no_grad():
        x, ids, y = data(step + 60, rank)
        for _ in range(3):
            x = x + call(x, ids, y)
    model.train()
    loss = call(*data(step, rank))
    backward(loss)
    return loss


MODELS = ("Plain", "ReadsOthersWeight", "TiedEmbedding", "LoRAInside", "Checkpointed")


def make(name):
    torch.manual_seed(5)
    return PATTERNS[name]()


def engine_run(name, way):
    import stateroom

    found = []
    for stage in range(4):
        config = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": stage}, "units": {"min_numel": 0}}
        config |= {"gradient_clipping": 0, "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}}
        engine, *_ = stateroom.initialize(make(name), config=config)
        losses = []
        for step in range(4):
            loss = SEQUENCES[way](engine, engine.backward, engine, step, engine.global_rank)
            engine.step()
            losses.append(engine.comm.gather_rows(loss.detach().double().reshape(1)).mean().item())
        found.append((losses, {k: v.clone() for k, v in engine.module_state_dict().items()}))
        engine.destroy()
    return found


def plain_run(name, way, ranks):
    model = make(name)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    losses = []
    for step in range(4):
        total, sums = 0.0, {}
        for rank in range(ranks):
            optimizer.zero_grad()
            loss = SEQUENCES[way](model, lambda value, **options: value.backward(**options), model, step, rank)
            total += loss.item() / ranks
            for p in model.parameters():
                if p.grad is not None:
                    sums[p] = sums.get(p, 0) + p.grad / ranks
        for p in model.parameters():
            p.grad = sums.get(p)
        optimizer.step()
        losses.append(total)
    return losses, model.state_dict()


CASES = [(name, way) for name in MODELS for way in SEQUENCES if (name, way) != ("TiedEmbedding", "gradient_of_an_input_first")]


@pytest.mark.parametrize(("name", "way"), CASES)  # that one model does not use the input x
def test_sequence(pools, name, way):
    losses, weights = plain_run(name, way, 2)
    for stage, (seen, whole) in enumerate(pools(2).run(engine_run, name, way)[0]):
        assert max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(seen, losses, strict=True)) < 2e-5, (stage, seen, losses)
        for key, expected in weights.items():
            assert torch.allclose(whole[key], expected, rtol=1e-4, atol=3e-6), (stage, key)
