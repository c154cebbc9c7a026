"""Training with the engine equals plain single-process PyTorch on the same global batch, at every stage alike."""

from __future__ import annotations

import itertools

import pytest
import torch
from training import config_for, train_engine, train_plain

STEPS = 20
MODELS = ("mlp", "gpt", "transformer", "llama")
FUSED = lambda params: torch.optim.AdamW(params, lr=2e-3, weight_decay=0.1, fused=True)  # noqa: E731
SGD = lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)  # noqa: E731

# (losses, weights over the whole model, norms), relative. Low precision: one last bit of a weight that rounds the other
# way changes losses in the 4th digit; what a missing master weight or a bf16 accumulation does is ten times larger.
TOLERANCE = {"fp32": (1e-5, 1e-5, 1e-4), "bf16": (6e-3, 2e-2, 5e-2), "fp16": (2e-3, 1e-2, 5e-2)}


def all_stages(model, precision, gas, steps, extra):
    """Return what train_engine does, for stages 0 to 3."""
    return [train_engine(model, stage, precision, gas, steps, extra) for stage in range(4)]


def optimizer_of(model):
    """Return (config section, plain optimizer). nn.Transformer's key biases have no gradient but rounding noise, which Adam
    would turn into steps of full size, so it is trained with SGD."""
    if model == "transformer":
        return {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}, SGD
    return {}, FUSED


def relative(a, b):
    return max(abs(x - y) / max(abs(y), 1e-12) for x, y in zip(a, b, strict=True))


def relative_weights(a, b):
    difference = sum(float((a[name].double() - b[name].double()).square().sum()) for name in b)
    return (difference / sum(float(w.double().square().sum()) for w in b.values())) ** 0.5


def same_bits(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def check(pools, model, precision, gas, ranks):
    extra, plain_optimizer = optimizer_of(model)
    plain = train_plain(model, precision, gas, STEPS, ranks, optimizer=plain_optimizer)
    per_rank = pools(ranks).run(all_stages, model, precision, gas, STEPS, extra)
    for stage in range(4):
        losses, weights, norms = per_rank[0][stage]
        measured = relative(losses, plain[0]), relative_weights(weights, plain[1]), relative(norms, plain[2])
        allowed = TOLERANCE[precision]
        assert all(m <= a for m, a in zip(measured, allowed, strict=True)), (stage, measured, allowed)
        for other in per_rank[1:]:
            assert other[stage][0] == losses and other[stage][2] == norms, "ranks disagree"
            assert same_bits(other[stage][1], weights), "ranks disagree"
    if precision == "fp32" and gas == 1:
        for stage in (1, 2, 3):
            assert per_rank[0][stage][0] == per_rank[0][0][0], f"stage {stage} differs from stage 0 in its losses"
            assert same_bits(per_rank[0][stage][1], per_rank[0][0][1]), f"stage {stage} differs from stage 0 in its bits"


def is_quick(model, precision, gas, ranks):
    """On two ranks every model in fp32 and one in less; with accumulation three and four too, where orders of summation show."""
    if ranks == 2:
        return (precision == "fp32" and (gas == 3 or model == "llama")) or (gas == 3 and model == "gpt")
    return precision == "fp32" and (ranks, gas, model) in ((1, 1, "gpt"), (3, 3, "gpt"), (4, 3, "mlp"))


CASES = [
    pytest.param(*case, id="-".join(map(str, case)), marks=[] if is_quick(*case) else pytest.mark.full)
    for case in itertools.product(MODELS, ("fp32", "bf16", "fp16"), (1, 3), (1, 2, 3, 4))
]


@pytest.mark.parametrize(("model", "precision", "gas", "ranks"), CASES)
def test_equals_plain_pytorch(pools, model, precision, gas, ranks):
    check(pools, model, precision, gas, ranks)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_deterministic_makes_stages_equal_under_accumulation(pools, model, ranks):
    """Stages 0 and 1 reduce once a step by default; with `deterministic` they reduce as often as 2 and 3, in one order."""
    per_rank = pools(ranks).run(all_stages, model, "fp32", 3, 6, {"deterministic": True})
    for stage in (1, 2, 3):
        assert per_rank[0][stage][0] == per_rank[0][0][0]
        assert same_bits(per_rank[0][stage][1], per_rank[0][0][1])


def test_a_wrong_factor_is_seen(pools):
    """Negative control: summing instead of averaging over ranks must fail the comparison."""
    extra = {"gradient_allreduce_op": "sum", "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, "gradient_clipping": 0}
    plain = train_plain("mlp", "fp32", 1, 5, 2, optimizer=SGD, clip=0)
    losses, weights, _ = pools(2).run(train_engine, "mlp", 2, "fp32", 1, 5, extra)[0]
    assert relative(losses, plain[0]) > 1e-3 and relative_weights(weights, plain[1]) > 1e-3


def no_prefetch_and_budget(model):
    """Return weights for different prefetch settings at stage 3."""
    base = config_for(3, "fp32", 1)["zero_optimization"]
    settings = ({}, {"overlap_comm": False}, {"stage3_prefetch_bucket_size": 0}, {"stage3_prefetch_bucket_size": 1_000_000})
    return [train_engine(model, 3, "fp32", 1, 4, {"zero_optimization": {**base, **setting}})[1] for setting in settings]


def test_prefetch_does_not_change_results(pools):
    first, *others = pools(2).run(no_prefetch_and_budget, "gpt")[0]
    for other in others:
        assert same_bits(first, other)
