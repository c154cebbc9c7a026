"""Orders in which scripts call forward, backward and autograd within one step, each as a case on one model or on any."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from base import Base, Block, D, data
from case import Case, Phase, Way
from torch import nn

WAYS: dict[str, Way] = {}


def way(function: Way) -> Way:
    """Add a way under its name."""
    WAYS[function.__name__] = function
    return function


@way
def plain_backward(call, backward, step, rank):
    """loss.backward() instead of engine.backward(loss)."""
    loss = call(*data(step, rank))
    loss.backward()
    return loss


@way
def two_forwards_one_backward(call, backward, step, rank):
    """The losses of two forwards are added."""
    loss = call(*data(step, rank)) + call(*data(step + 50, rank))
    backward(loss)
    return loss


@way
def a_forward_without_backward(call, backward, step, rank):
    """A training forward whose loss is thrown away."""
    call(*data(step + 30, rank))
    loss = call(*data(step, rank))
    backward(loss)
    return loss


@way
def evaluation_between_forward_and_backward(call, backward, step, rank):
    """An evaluation without gradients comes in between."""
    loss = call(*data(step, rank))
    call.eval()
    with torch.no_grad():
        call(*data(step + 30, rank))
    call.train()
    backward(loss)
    return loss


@way
def inference_mode_before_training(call, backward, step, rank):
    """An evaluation in inference mode comes first."""
    with torch.inference_mode():
        call(*data(step + 30, rank))
    loss = call(*data(step, rank))
    backward(loss)
    return loss


@way
def the_graph_is_kept_and_used_twice(call, backward, step, rank):
    """retain_graph, then a second backward over the same graph."""
    loss = call(*data(step, rank))
    backward(loss, retain_graph=True)
    backward(loss * 0.5)
    return loss


@way
def several_backwards_of_several_forwards(call, backward, step, rank):
    """Three forwards, then their backwards from the last to the first."""
    losses = [call(*data(step + shift, rank)) for shift in (0, 20, 40)]
    for loss in reversed(losses):
        backward(loss)
    return sum(losses)


@way
def backwards_in_the_order_of_the_forwards(call, backward, step, rank):
    """Two forwards, then their backwards from the first to the last, the first graph kept."""
    losses = [call(*data(step + shift, rank)) for shift in (0, 20)]
    backward(losses[0], retain_graph=True)
    backward(losses[1])
    backward(losses[0])
    return sum(losses)


@way
def gradient_of_an_input_first(call, backward, step, rank):
    """The gradient of an input is looked at before the backward."""
    x, ids, y = data(step, rank)
    x.requires_grad_()
    loss = call(x, ids, y)
    (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    loss = loss + 0.1 * grad.detach().square().sum()
    backward(loss)
    return loss


@way
def penalty_on_the_gradient_of_an_input(call, backward, step, rank):
    """A gradient penalty around the whole model, differentiated twice (WGAN-GP)."""
    x, ids, y = data(step, rank)
    x.requires_grad_()
    loss = call(x, ids, y)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    loss = loss + grad.square().sum()
    backward(loss)
    return loss


@way
def a_loop_of_decoding_between_steps(call, backward, step, rank):
    """Several forwards in evaluation mode, each on the output of the last."""
    call.eval()
    with torch.no_grad():
        x, ids, y = data(step + 60, rank)
        for _ in range(3):
            x = x + call(x, ids, y).float()
    call.train()
    loss = call(*data(step, rank))
    backward(loss)
    return loss


@way
def penalty_on_the_gradient_of_the_weights(call, backward, step, rank):
    """A penalty on the gradient of all weights, taken outside the model and differentiated twice."""
    loss = call(*data(step, rank))
    trained = [param for param in call.module.parameters() if param.requires_grad]
    grads = torch.autograd.grad(loss, trained, create_graph=True, allow_unused=True)
    loss = loss + 0.1 * sum(grad.square().sum() for grad in grads if grad is not None)
    backward(loss)
    return loss


@way
def an_adversarial_example_from_a_kept_graph(call, backward, step, rank):
    """The gradient of the input makes a second input; both losses then run backward together."""
    x, ids, y = data(step, rank)
    x.requires_grad_()
    loss = call(x, ids, y)
    (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    loss = loss + call((x + grad).detach(), ids, y)
    backward(loss)
    return loss


@way
def a_functional_call_of_the_whole_model(call, backward, step, rank):
    """torch.func.functional_call on the module with its own parameters."""
    loss = torch.func.functional_call(call.module, dict(call.module.named_parameters()), call.cast(data(step, rank)))
    backward(loss)
    return loss


# ---- as rows of the table


def submodules_one_by_one(call, backward, step, rank):
    """The script calls the blocks itself; the model's own forward never runs."""
    x, _, y = call.cast(data(step, rank))
    for block in call.module.blocks:
        x = block(x)
    loss = F.mse_loss(call.module.out(x), y)
    backward(loss)
    return loss


class TwoHeads(Base):
    """A trunk with two heads, whose losses come out beside each other."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(Block(), nn.Linear(D, D)) for _ in range(2))

    def forward(self, x, ids, y, step=0):
        h = self.trunk(x)
        return F.mse_loss(self.heads[0](h), y), F.mse_loss(self.heads[1](h), y.flip(1))


def two_losses(call, backward, step, rank):
    """Two losses of one forward, each with its own backward over the shared trunk."""
    first, second = call(*data(step, rank))
    backward(first, retain_graph=True)
    backward(second)
    return first + second


def one_loss_in_turn(call, backward, step, rank):
    """Of two losses only one is used, in turn."""
    loss = call(*data(step, rank))[step % 2]
    backward(loss)
    return loss


def on(model: Callable[[], nn.Module], name: str, how: Way) -> Case:
    """Return the case of training a model in a way; SGD, since a second backward of Adam's would hide a factor."""
    about = (how.__doc__ or "").strip()
    return Case(name, about, model, (Phase(how),), optimizer="sgd")


def words(name: str) -> str:
    return name.replace("_", " ")


CASES = [
    on(Base, "submodules one by one", submodules_one_by_one),
    *(on(Base, words(name), how) for name, how in WAYS.items()),
    on(TwoHeads, "two losses with a backward each", two_losses),
    on(TwoHeads, "one loss of two in turn", one_loss_in_turn),
]
