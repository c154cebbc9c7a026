"""Optimizers built from config names mean what DeepSpeed means, follow their papers, and are elementwise where they say so."""

from __future__ import annotations

import copy
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stateroom.engine.optim.muon import muon_direction
from stateroom.engine.optimizers import (
    ELEMENTWISE,
    REFUSED,
    Lamb,
    Lion,
    Muon,
    SwitchedAdam,
    build_optimizer,
    is_elementwise,
    split_muon_groups,
)
from stateroom.errors import ConfigError, LayoutError
from stateroom.ops.adagrad import DeepSpeedCPUAdagrad
from stateroom.ops.adam import DeepSpeedCPUAdam, FusedAdam
from stateroom.ops.lamb import FusedLamb
from stateroom.ops.lion import DeepSpeedCPULion, FusedLion
from torch import Tensor
from torch.optim import Optimizer

SHAPES = [(7, 5), (13,), (3, 4, 2, 2)]
NUM_STEPS = 6


def random_tensors(seed: int, shapes: list[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def as_parameters(tensors: list[Tensor]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(t.clone()) for t in tensors]


def run(optimizer: Optimizer, params: list[torch.nn.Parameter], steps: range = range(NUM_STEPS)) -> list[Tensor]:
    shapes = [tuple(p.shape) for p in params]
    for step in steps:
        for param, grad in zip(params, random_tensors(100 + step, shapes, params[0].dtype), strict=True):
            param.grad = grad
        optimizer.step()
    return [p.detach().clone() for p in params]


def trained(build: Callable[[list[Any]], Optimizer], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    params = as_parameters(random_tensors(0, dtype=dtype))
    return run(build(params), params)


def recipe(update: Callable[[Tensor, Tensor, dict[str, Any], int], Tensor]) -> list[Tensor]:
    """Train with a formula: `update(p, g, state, t)` returns the new p."""
    params, states = random_tensors(0), [{} for _ in SHAPES]
    for t in range(1, NUM_STEPS + 1):
        grads = random_tensors(99 + t)
        params = [update(p, g, s, t) for p, g, s in zip(params, grads, states, strict=True)]
    return params


def adam_recipe(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, wd=0.0, decoupled=True, correct=True, amsgrad=False) -> list[Tensor]:
    def update(p: Tensor, g: Tensor, s: dict[str, Any], t: int) -> Tensor:
        g = g if decoupled else g + wd * p
        s["m"] = betas[0] * s.get("m", 0) + (1 - betas[0]) * g
        s["v"] = betas[1] * s.get("v", 0) + (1 - betas[1]) * g * g
        s["top"] = torch.maximum(s.get("top", s["v"]), s["v"]) if amsgrad else s["v"]
        c1, c2 = (1 - betas[0] ** t, 1 - betas[1] ** t) if correct else (1.0, 1.0)
        direction = (s["m"] / c1) / ((s["top"] / c2).sqrt() + eps)
        return p - lr * (direction + (wd * p if decoupled else 0))

    return recipe(update)


def assert_close(got: list[Tensor], expected: list[Tensor], tolerance: float = 1e-12) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "params", "expected", "cls"),
    [
        ("Adam", {}, {}, torch.optim.AdamW),
        ("adam", {"weight_decay": 0.3}, {"wd": 0.3}, torch.optim.AdamW),
        ("Adam", {"weight_decay": 0.3, "adam_w_mode": False}, {"wd": 0.3, "decoupled": False}, torch.optim.Adam),
        ("AdamW", {"weight_decay": 0.3, "adam_w_mode": False, "lr": 0.1}, {"wd": 0.3, "lr": 0.1}, torch.optim.AdamW),
        ("AdamW", {"betas": [0.8, 0.95], "eps": 1e-4}, {"betas": (0.8, 0.95), "eps": 1e-4}, torch.optim.AdamW),
        ("AdamW", {"torch_adam": True}, {"wd": 0.01}, torch.optim.AdamW),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, {}, torch.optim.Adam),
        ("AdamW", {"amsgrad": True, "lr": 0.1, "betas": [0.5, 0.5]}, {"amsgrad": True, "lr": 0.1, "betas": (0.5, 0.5)}, torch.optim.AdamW),
        ("Adam", {"bias_correction": False, "weight_decay": 0.3}, {"wd": 0.3, "correct": False}, SwitchedAdam),
        ("Adam", {"bias_correction": False, "amsgrad": True, "fused": False}, {"amsgrad": True, "correct": False}, SwitchedAdam),
        (
            "Adam",
            {"bias_correction": False, "weight_decay": 0.3, "adam_w_mode": False},
            {"wd": 0.3, "correct": False, "decoupled": False},
            SwitchedAdam,
        ),
    ],
)
def test_adam_of_a_config_means_what_deepspeed_means(name: str, params: dict[str, Any], expected: dict[str, Any], cls: type) -> None:
    built: list[Optimizer] = []
    got = trained(lambda p: built.append(build_optimizer(name, params, p)) or built[0])
    assert type(built[0]) is cls
    assert_close(got, adam_recipe(**expected))


def test_adam_recipes_tell_the_variants_apart() -> None:
    variants = [{}, {"wd": 0.01}, {"wd": 0.01, "decoupled": False}, {"correct": False}, {"amsgrad": True, "betas": (0.9, 0.5)}]
    results = [torch.cat([t.flatten() for t in adam_recipe(**v)]) for v in variants]
    for i, a in enumerate(results):
        assert all((a - b).abs().max() > 1e-6 for b in results[i + 1 :])


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "sgd", "Adagrad", "ADAGRAD"])
def test_the_fused_kernel_is_taken_unless_the_config_chooses(name: str) -> None:
    params = as_parameters(random_tensors(0))
    assert build_optimizer(name, {"lr": 0.1}, params).defaults["fused"] is True
    assert not build_optimizer(name, {"lr": 0.1, "foreach": True}, params).defaults["fused"]
    assert not build_optimizer(name, {"lr": 0.1, "fused": False}, params).defaults["fused"]
    meta = [torch.nn.Parameter(torch.empty(3, device="meta"))]
    assert not build_optimizer(name, {"lr": 0.1}, meta).defaults["fused"]


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "RMSprop", "NAdam"])
def test_torch_classes_keep_torch_defaults(name: str) -> None:
    assert_close(trained(lambda p: build_optimizer(name, {}, p)), trained(lambda p: getattr(torch.optim, name)(p)))


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.95, 0.98)])
def test_lion_follows_the_paper(betas: tuple[float, float]) -> None:
    def update(p: Tensor, g: Tensor, s: dict[str, Any], t: int) -> Tensor:
        m = s.get("m", torch.zeros_like(p))
        s["m"] = betas[1] * m + (1 - betas[1]) * g
        return p * (1 - 0.01 * 0.3) - 0.01 * torch.sign(betas[0] * m + (1 - betas[0]) * g)

    options = {"lr": 0.01, "betas": list(betas), "weight_decay": 0.3}
    assert_close(trained(lambda p: build_optimizer("lion", options, p)), recipe(update))


def test_lion_leaves_an_element_without_gradient_alone() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.tensor([0.0, 1.0, -1.0])
    Lion([param], lr=0.5).step()
    assert param.tolist() == [1.0, 0.5, 1.5]


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.3}, {"bias_correction": False}, {"eps_inside_sqrt": True, "eps": 1e-2}])
@pytest.mark.parametrize("bounds", [(0.01, 10.0), (0.5, 0.6)])
def test_lamb_scales_by_the_bounded_trust_ratio(options: dict[str, Any], bounds: tuple[float, float]) -> None:
    eps, ratios = options.get("eps", 1e-8), []

    def update(p: Tensor, g: Tensor, s: dict[str, Any], t: int) -> Tensor:
        s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
        s["v"] = 0.999 * s.get("v", 0) + 0.001 * g * g
        root = (s["v"] + eps).sqrt() if options.get("eps_inside_sqrt") else s["v"].sqrt() + eps
        u = s["m"] / root + options.get("weight_decay", 0.0) * p
        ratios.append(min(max((p.norm() / u.norm()).item(), bounds[0]), bounds[1]))
        corrected = math.sqrt(1 - 0.999**t) / (1 - 0.9**t) if options.get("bias_correction", True) else 1.0
        return p - 0.01 * corrected * ratios[-1] * u

    built: list[Any] = []
    params = {"lr": 0.01, "min_coeff": bounds[0], "max_coeff": bounds[1], **options}
    got = trained(lambda p: built.append(build_optimizer("Lamb", params, p)) or built[0])
    assert_close(got, recipe(update))
    assert built[0].get_lamb_coeffs() == pytest.approx(ratios[-len(SHAPES) :], rel=1e-9)
    if bounds == (0.01, 10.0):
        assert len(set(ratios)) == len(ratios)


def test_lamb_takes_ratio_one_for_a_zero_weight() -> None:
    param = torch.nn.Parameter(torch.zeros(4))
    param.grad = torch.ones(4)
    optimizer = Lamb([param], lr=0.1)
    optimizer.step()
    assert optimizer.get_lamb_coeffs() == [1.0]
    assert param.tolist() == pytest.approx([-0.1] * 4, rel=1e-4)


ELEMENTWISE_CASES: list[tuple[type, dict[str, Any]]] = [
    *((cls, {"lr": 0.1}) for cls in sorted(ELEMENTWISE, key=lambda c: c.__name__)),
    (SwitchedAdam, {"bias_correction": False, "weight_decay": 0.1, "fused": False}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "fused": True}),
    (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
    (torch.optim.Adagrad, {"fused": True}),
]


@pytest.mark.parametrize(("cls", "options"), ELEMENTWISE_CASES, ids=lambda v: v.__name__ if isinstance(v, type) else "")
def test_elementwise_optimizers_give_the_same_bits_on_slices(cls: type, options: dict[str, Any]) -> None:
    fused = options.get("fused") or cls in (FusedAdam, DeepSpeedCPUAdam, SwitchedAdam, DeepSpeedCPUAdagrad)
    fused = fused and options.get("fused") is not False
    size, cuts = (640, (64, 320)) if fused else (333, (5, 160))  # fused CPU kernels round a tensor's tail differently
    grads = [random_tensors(s, [(size,)], torch.float32)[0] for s in range(NUM_STEPS + 1)]
    for cut in cuts:
        whole = torch.nn.Parameter(grads[-1].clone())
        parts = as_parameters([grads[-1][:cut], grads[-1][cut:]])
        on_whole, on_parts = cls([whole], **options), cls(parts, **options)
        assert is_elementwise(on_whole)
        for grad in grads[:-1]:
            whole.grad, parts[0].grad, parts[1].grad = grad.clone(), grad[:cut].clone(), grad[cut:].clone()
            on_whole.step(), on_parts.step()
        assert torch.equal(whole, torch.cat([p.detach() for p in parts]))
        assert not torch.equal(whole, grads[-1])


def test_whole_parameter_optimizers_and_subclasses_are_not_elementwise() -> None:
    params = as_parameters(random_tensors(0))

    class Custom(torch.optim.AdamW):
        pass

    for optimizer in (Lamb(params), FusedLamb(params), torch.optim.Adafactor(params), Custom(params)):
        assert not is_elementwise(optimizer)


@pytest.mark.parametrize("cls", [SwitchedAdam, DeepSpeedCPUAdam, Lion, DeepSpeedCPULion, Lamb])
def test_half_precision_weights_are_updated_in_fp32_and_rounded_once(cls: type) -> None:
    start = [t.bfloat16() for t in random_tensors(0)]
    params, reference = as_parameters(start), as_parameters([t.float() for t in start])
    optimizer, exact = cls(params), cls(reference)
    for step in range(3):
        for p, r, g in zip(params, reference, random_tensors(7 + step, dtype=torch.bfloat16), strict=True):
            p.grad, r.grad = g, g.float()
        optimizer.step(), exact.step()
        for p, r in zip(params, reference, strict=True):
            assert torch.equal(p, r.bfloat16())
            r.data.copy_(p)  # the rounded weight is the master
            assert optimizer.state[p]["exp_avg"].dtype is torch.float32
            assert torch.equal(optimizer.state[p]["exp_avg"], exact.state[r]["exp_avg"])


def test_fp32_optimizer_states_false_keeps_them_small() -> None:
    for name in ("Adam", "Lion"):
        for wanted, dtype in ((True, torch.float32), (False, torch.bfloat16)):
            params = as_parameters(random_tensors(0, dtype=torch.bfloat16))
            optimizer = build_optimizer(name, {"fp32_optimizer_states": wanted}, params)
            run(optimizer, params, range(1))
            assert optimizer.state[params[0]]["exp_avg"].dtype is dtype


RESUME_CASES = [(SwitchedAdam, torch.bfloat16), (Lion, torch.bfloat16), (Lamb, torch.float32), (Muon, torch.float32)]


@pytest.mark.parametrize(("cls", "dtype"), RESUME_CASES)
def test_resume_from_a_state_dict_gives_the_same_bits(cls: type, dtype: torch.dtype) -> None:
    def build(params: list[Any]) -> Optimizer:
        if cls is Muon:
            return Muon([{"params": [p for p in params if (p.ndim >= 2) is m], "use_muon": m} for m in (True, False)], lr=0.1)
        return cls(params, lr=0.1)

    params = as_parameters(random_tensors(0, dtype=dtype))
    optimizer = build(params)
    middle = run(optimizer, params, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    expected = run(optimizer, params, range(3, 6))
    resumed = as_parameters(middle)
    fresh = build(resumed)
    file.seek(0)
    fresh.load_state_dict(torch.load(file))
    assert all(torch.equal(a, b) for a, b in zip(run(fresh, resumed, range(3, 6)), expected, strict=True))
    twin = copy.deepcopy(fresh)
    assert twin.state_dict()["param_groups"] == fresh.state_dict()["param_groups"]
    twin.step()


def orthogonal_factor(matrix: Tensor) -> Tensor:
    """The polynomial of Newton-Schulz applied to singular values, in float64 by an SVD: an independent formula."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / torch.linalg.vector_norm(s, dim=-1, keepdim=True)
    for _ in range(5):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    return u @ torch.diag_embed(s) @ vh


@pytest.mark.parametrize("shape", [(6, 6), (4, 20), (20, 4), (3, 4, 9), (5, 2, 3, 3), (40, 2, 3, 3)])
@pytest.mark.parametrize(("method", "tolerance"), [("gram", 1e-4), ("standard", 3e-2)])
def test_muon_orthogonalizes_nesterov_momentum(shape: tuple[int, ...], method: str, tolerance: float) -> None:
    (start,) = random_tensors(0, [shape], torch.float32)
    param = torch.nn.Parameter(start.clone())
    optimizer = build_optimizer("Muon", {"lr": 0.1, "weight_decay": 0.2, "ns_method": method}, [{"params": [param], "use_muon": True}])
    expected, buffer = start.double(), torch.zeros(shape, dtype=torch.float64)
    for step in range(3):
        (grad,) = random_tensors(50 + step, [shape], torch.float32)
        param.grad = grad.clone()
        optimizer.step()
        assert torch.equal(param.grad, grad)
        buffer = 0.95 * buffer + 0.05 * grad
        ahead = 0.05 * grad + 0.95 * buffer
        matrix = ahead.flatten(1) if ahead.ndim == 4 else ahead
        scale = math.sqrt(max(1, matrix.shape[-2] / matrix.shape[-1]))
        expected = expected * (1 - 0.1 * 0.2) - 0.1 * scale * orthogonal_factor(matrix).reshape(shape)
    torch.testing.assert_close(param.double(), expected, rtol=0, atol=tolerance * 0.3)
    assert (param - start).abs().max() > 0.05


def test_standard_muon_equals_torch_muon_on_a_matrix_up_to_bf16() -> None:
    for shape in ((6, 6), (4, 20), (20, 4)):
        ours, theirs = as_parameters(random_tensors(0, [shape, shape], torch.float32)[:1] * 2)
        a = Muon([{"params": [ours], "use_muon": True}], lr=0.05, weight_decay=0.1, ns_method="standard")
        b = torch.optim.Muon([theirs], lr=0.05, weight_decay=0.1)
        run(a, [ours], range(2)), run(b, [theirs], range(2))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3)
        torch.testing.assert_close(a.state[ours]["momentum_buffer"], b.state[theirs]["momentum_buffer"])


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(5, 4)
        self.body = torch.nn.Linear(4, 4)
        self.extra = torch.nn.Linear(4, 4, bias=False)
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)
        self.lm_head = torch.nn.Linear(4, 5, bias=False)


def test_muon_groups_follow_names_shapes_and_tags() -> None:
    net = Net()
    net.extra.weight.use_muon = False
    muon, adam = split_muon_groups(net.named_parameters(), {"lr": 0.1, "adam_lr": 0.2, "betas": [0.8, 0.9], "momentum": 0.5})
    assert [id(p) for p in muon["params"]] == [id(net.body.weight)]
    others = (net.embed_tokens.weight, net.body.bias, net.extra.weight, net.lm_head.weight)
    assert {id(p) for p in adam["params"]} == {id(p) for p in others}
    assert (muon["use_muon"], muon["lr"], muon["momentum"], muon["weight_decay"], muon["ns_method"]) == (True, 0.1, 0.5, 0.0, "gram")
    assert (adam["use_muon"], adam["lr"], tuple(adam["betas"]), adam["eps"]) == (False, 0.2, (0.8, 0.9), 1e-10)
    assert "betas" not in muon and "momentum" not in adam
    optimizer = build_optimizer("muon", {"lr": 0.1}, [muon, adam])
    assert type(optimizer) is Muon and not is_elementwise(optimizer)
    assert optimizer.param_groups[1]["lr"] == 0.2


def test_muon_groups_keep_the_options_of_the_users_groups() -> None:
    net = Net()
    body = {"params": [net.body.weight, net.body.bias], "weight_decay": 0.3, "betas": (0.1, 0.2)}
    groups = [body, {"params": net.extra.weight, "lr": 7.0}]
    split = split_muon_groups(net.named_parameters(), {"lr": 0.1, "weight_decay": 0.0}, groups)
    assert [(g["use_muon"], g["lr"], g["weight_decay"], g.get("betas")) for g in split] == [
        (True, 0.1, 0.3, None),
        (False, 0.1, 0.3, (0.1, 0.2)),
        (True, 7.0, 0.0, None),
    ]
    with pytest.raises(ConfigError, match="is not of the model"):
        split_muon_groups([], {}, groups)


def test_the_adam_half_of_muon_is_adam_with_its_own_defaults() -> None:
    got = trained(lambda p: build_optimizer("Muon", {"weight_decay": 0.3}, [{"params": p, "use_muon": False}]))
    assert_close(got, adam_recipe(lr=3e-4, betas=(0.9, 0.95), eps=1e-10, wd=0.3))
    got = trained(lambda p: build_optimizer("Muon", {"weight_decay": 0.3, "adam_w_mode": False}, [{"params": p, "use_muon": False}]))
    assert_close(got, adam_recipe(lr=3e-4, betas=(0.9, 0.95), eps=1e-10, wd=0.3, decoupled=False))


def test_muon_refuses_shards_of_matrices_and_untagged_groups() -> None:
    param = torch.nn.Parameter(torch.ones(8))
    with pytest.raises(ConfigError, match="split_muon_groups"):
        build_optimizer("Muon", {}, [param])
    param.grad = torch.ones(8)
    with pytest.raises(LayoutError, match=r"whole matrices, got a tensor of shape \(8,\)"):
        build_optimizer("Muon", {}, [{"params": [param], "use_muon": True}]).step()
    param.use_muon = True
    with pytest.raises(ConfigError, match=r"bias: use_muon is set"):
        split_muon_groups([("bias", param)], {})


@pytest.mark.parametrize("make", [FusedAdam, DeepSpeedCPUAdam, FusedLion, DeepSpeedCPULion, DeepSpeedCPUAdagrad, FusedLamb])
def test_deepspeed_names_match_the_config_types(make: type) -> None:
    kind = make.__name__.removeprefix("Fused").removeprefix("DeepSpeedCPU")
    got = trained(lambda p: make(p, lr=0.02, weight_decay=0.1))
    assert_close(got, trained(lambda p: build_optimizer(kind, {"lr": 0.02, "weight_decay": 0.1}, p)))


GOLDEN = json.loads((Path(__file__).parent / "golden" / "optimizers.json").read_text())["cases"]
MAKERS = {cls.__name__: cls for cls in (DeepSpeedCPUAdam, DeepSpeedCPULion, DeepSpeedCPUAdagrad)}


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['name']}{case.get('options', '')}")
def test_updates_equal_deepspeed_up_to_fp32_rounding(case: dict[str, Any]) -> None:
    if case["name"] == "muon":
        got = muon_direction(torch.tensor(case["grad"]), torch.tensor(case["momentum"]), 0.95, "gram")
        torch.testing.assert_close(got, torch.tensor(case["direction"]), rtol=0, atol=1e-5)
        return
    param = torch.nn.Parameter(torch.tensor(case["start"]))
    optimizer = MAKERS[case["name"]]([param], lr=0.01, **case["options"])
    for grad in case["grads"]:
        param.grad = torch.tensor(grad)
        optimizer.step()
    torch.testing.assert_close(param.detach(), torch.tensor(case["end"]), rtol=0, atol=5e-6)


def test_deepspeed_adam_names_have_their_switches() -> None:
    plain = adam_recipe(wd=0.3, decoupled=False, correct=False)
    assert_close(trained(lambda p: FusedAdam(p, 1e-3, False, (0.9, 0.999), 1e-8, False, 0.3)), plain)
    assert_close(trained(lambda p: DeepSpeedCPUAdam(p, 1e-3, False, (0.9, 0.999), 1e-8, 0.3, False, False)), plain)
    params = as_parameters(random_tensors(0))
    optimizer = FusedAdam(params, set_grad_none=False)
    run(optimizer, params, range(1))
    optimizer.zero_grad()
    assert params[0].grad is not None and not params[0].grad.any()
    with pytest.raises(ValueError, match="gradient_clipping"):
        FusedLamb(params, max_grad_norm=1.0)
    with pytest.raises(ValueError, match="fp32 parameters"):
        DeepSpeedCPUAdagrad([torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))])


def test_groups_keep_their_own_options_and_need_no_gradient() -> None:
    a, b, idle = as_parameters(random_tensors(0))
    for name in ("Adam", "Lion", "Lamb", "SGD"):
        optimizer = build_optimizer(name, {"lr": 0.1}, [{"params": [a], "lr": 0.5, "weight_decay": 0.2}, {"params": iter([b, idle])}])
        assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(0.5, 0.2), (0.1, 0)]
        a.grad = b.grad = None
        before = idle.detach().clone()
        optimizer.step()
        assert torch.equal(idle, before) and not optimizer.state


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("AdmaW", {}, "did you mean 'AdamW'"),
        ("rmsprop", {}, "did you mean 'RMSprop'"),
        ("Optimizer", {}, "is not one of"),
        *((name, {}, f"{name}: {reason[:20]}") for name, reason in REFUSED.items()),
        ("onebitadam", {}, "use Adam"),
        ("MuAdam", {}, "mup package"),
        ("AdamW", {"weight_decya": 0.1}, r"optimizer.params.weight_decya: unknown parameter; did you mean 'weight_decay'"),
        ("Adam", {"bias_corection": False}, "did you mean 'bias_correction'"),
        ("Adam", {"bias_correction": False, "foreach": True}, "foreach: not together"),
        ("Adam", {"max_grad_norm": 1.0}, "gradient_clipping"),
        ("SGD", {"momentun": 0.9}, "did you mean 'momentum'"),
        ("Lion", {"bets": [0.9, 0.99]}, "did you mean 'betas'"),
        ("Lamb", {"max_coef": 1}, "did you mean 'max_coeff'"),
        ("Lamb", {"amsgrad": True}, "AMSGrad"),
        ("Muon", {"ns_methd": "gram"}, "did you mean 'ns_method'"),
        ("Muon", {"ns_method": "qr"}, "is not one of gram, standard"),
        ("Muon", {"per_head_muon": True}, "per_head_muon"),
        ("Adam", {"lr": -1.0}, "optimizer Adam: Invalid learning rate"),
        ("Adam", {"lr": "auto"}, "optimizer Adam: "),
        ("Lion", {"betas": [0.9]}, "betas must be two numbers"),
        ("Lamb", {"min_coeff": 3, "max_coeff": 2}, "no bounds"),
    ],
)
def test_what_makes_no_optimizer_is_refused_with_the_way_out(name: str, params: dict[str, Any], message: str) -> None:
    groups = [{"params": as_parameters(random_tensors(0)), "use_muon": False}]
    with pytest.raises(ConfigError, match=message):
        build_optimizer(name, params, groups)


def test_no_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty parameter list"):
        build_optimizer("AdamW", {}, [])
