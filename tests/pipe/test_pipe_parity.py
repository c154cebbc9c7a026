"""A model in stages trains as the same layers in one process do: every schedule, cut, payload and precision."""

from __future__ import annotations

import math
from typing import Any

import pipe_jobs as jobs
import pytest
import torch
from stateroom.pipe import LayerSpec, TiedLayerSpec
from torch import nn

full = pytest.mark.full


def quick(*chosen: Any, rest: tuple[Any, ...]) -> list[Any]:
    """Return parameters of which only the chosen run in the quick suite."""
    return [*(pytest.param(*each) for each in chosen), *(pytest.param(*each, marks=full) for each in rest)]


SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zero-bubble", "zbv", "dualpipev")


def check(got: list[dict[str, Any]], want: dict[str, Any], tolerance: float = 1e-5) -> None:
    """Losses and norms on every rank, weights on the rank that holds them, and the activations that were held."""
    for rank in got:
        assert rank["losses"] == pytest.approx(want["losses"], rel=tolerance)
        assert rank["norms"] == pytest.approx(want["norms"], rel=max(tolerance, 5e-5))
        assert rank["held"] == rank["predicted"]
        for name, value in rank["weights"].items():
            torch.testing.assert_close(
                value.float(), want["weights"][name], rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
            )
    names = {name for rank in got for name in rank["weights"]}
    assert names == set(want["weights"])


def run(pools: Any, ranks: int, specs: list[Any], data: Any, cfg: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    return pools(ranks).run(jobs.piped_run, specs, data, cfg, **more)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_trains_like_plain_pytorch(pools, name):
    data = jobs.batches(20, 4, 1)
    specs = jobs.layers()
    check(run(pools, 2, specs, data, jobs.config(4, pipeline={"schedule": name})), jobs.plain_run(specs, data))


def runs(name: str, stages: int, count: int) -> bool:
    """Whether a schedule takes so many micro-batches; test_pipe_errors has what it says where it does not."""
    return name != "dualpipev" or count >= 2 * stages


POINTS = [
    (name, stages, copies, count)
    for name in SCHEDULES
    for stages, copies in ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2))
    for count in (1, 2, 4, 8)
    if runs(name, stages, count)
]


@full
@pytest.mark.parametrize(("name", "stages", "copies", "count"), POINTS)
def test_stages_copies_and_micro_batches(pools, name, stages, copies, count):
    data = jobs.batches(20, count, copies)
    specs = jobs.layers(blocks=7)
    check(run(pools, stages * copies, specs, data, jobs.config(count, stages, pipeline={"schedule": name})), jobs.plain_run(specs, data))


@full
@pytest.mark.parametrize(("name", "count"), [(name, count) for name in SCHEDULES for count in (4, 8) if runs(name, 4, count)])
def test_zero_1_over_four_stages_of_two_copies(pools, name, count):
    data = jobs.batches(20, count, 2)
    specs = jobs.layers(blocks=7)
    cfg = jobs.config(count, 4, pipeline={"schedule": name}, zero_optimization={"stage": 1}, gradient_clipping=0.5)
    check(run(pools, 8, specs, data, cfg), jobs.plain_run(specs, data, clip=0.5))


@pytest.mark.parametrize(("name", "stage"), quick(("1f1b", 2), rest=(("1f1b", 1), ("zbv", 1), ("zbv", 2))))
def test_zero_inside_stages(pools, name, stage):
    data = jobs.batches(4, 4, 2)
    specs = jobs.layers()
    cfg = jobs.config(4, pipeline={"schedule": name}, zero_optimization={"stage": stage}, gradient_clipping=0.5)
    check(run(pools, 4, specs, data, cfg), jobs.plain_run(specs, data, clip=0.5))


@pytest.mark.parametrize("name", quick(("1f1b",), rest=(("gpipe",), ("interleaved-1f1b",))))
def test_zero_3_inside_stages(pools, name):
    data = jobs.batches(4, 4, 2)
    specs = jobs.layers()
    cfg = jobs.config(4, pipeline={"schedule": name}, zero_optimization={"stage": 3}, gradient_clipping=0.5)
    check(run(pools, 4, specs, data, cfg), jobs.plain_run(specs, data, clip=0.5))


@pytest.mark.parametrize("method", quick(("memory",), ([7, 2],), rest=(("uniform",), ("type:block",), ("flops",), ([1, 8],))))
def test_uneven_cuts(pools, method):
    data = jobs.batches(3, 2, 1)
    specs = jobs.layers()
    check(run(pools, 2, specs, data, jobs.config(2), partition_method=method), jobs.plain_run(specs, data))


@full
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stages", (2, 4))
def test_uneven_cuts_under_every_schedule(pools, name, stages):
    count, parts = 2 * stages, stages * (1 if name in ("gpipe", "1f1b", "zero-bubble") else 2)
    data = jobs.batches(20, count, 1)
    specs = jobs.layers(blocks=parts + 1)
    sizes = [len(specs) - parts - 1, *[1] * (parts - 2), 3]
    cfg = jobs.config(count, stages, pipeline={"schedule": name, "partition": sizes})
    check(run(pools, stages, specs, data, cfg), jobs.plain_run(specs, data))


@pytest.mark.parametrize(
    ("name", "frozen"),
    quick(
        ("1f1b", (0, 1, 2, 3, 4)),
        ("zbv", (5, 6)),
        rest=(
            ("1f1b", (1, 2, 3)),
            ("1f1b", (5, 6)),
            ("zbv", (1, 2, 3)),
            ("zbv", (0, 1, 2, 3, 4)),
            *((name, frozen) for name in SCHEDULES if name not in ("1f1b", "zbv") for frozen in ((0, 1, 2, 3, 4), (5, 6))),
        ),
    ),
)
def test_a_frozen_stage(pools, name, frozen):
    data = jobs.batches(3, 4, 1)
    specs = jobs.layers(tied=False)
    cfg = jobs.config(4, pipeline={"schedule": name, "partition": "uniform"})
    got = run(pools, 2, specs, data, cfg, freeze=frozen)
    want = jobs.plain_run(specs, data, freeze=frozen)
    for rank in got:
        rank["held"] = rank["predicted"]  # what is frozen needs less than predicted
    check(got, want)


def test_shapes_change_between_batches_and_micro_batches(pools):
    data = jobs.batches(6, 4, 1, lengths=(3, 5, 4, 6))
    specs = jobs.layers()
    check(run(pools, 2, specs, data, jobs.config(4)), jobs.plain_run(specs, data))


@pytest.mark.parametrize(("name", "interval"), quick(("1f1b", 2), ("zero-bubble", 1), rest=(("1f1b", 1), ("zero-bubble", 2), ("zbv", 1))))
def test_recomputation_changes_nothing(pools, name, interval):
    data = jobs.batches(3, 4, 1, lengths=(3, 5, 4, 6))
    specs = jobs.layers()
    cfg = jobs.config(4, pipeline={"schedule": name})
    check(run(pools, 2, specs, data, cfg, activation_checkpoint_interval=interval), jobs.plain_run(specs, data))


class Embed(nn.Module):
    """Starts a payload of several tensors."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.table = nn.Embedding(jobs.VOCABULARY, jobs.WIDTH)

    def forward(self, ids: torch.Tensor) -> Any:
        x, mask = self.table(ids), ids > 2
        return {"x": x, "mask": mask, "scale": 0.5, "skip": x} if self.kind == "dict" else (x, mask, x * 2)


class Mix(nn.Module):
    """Takes and gives the payload."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = jobs.Block()

    def forward(self, held: Any) -> Any:
        if self.kind == "dict":
            x = self.inner(held["x"]) * held["mask"].unsqueeze(-1) + held["scale"] * held["skip"]
            return {**held, "x": x, "skip": held["skip"] * 1.5}
        x, mask, skip = held
        return self.inner(x) * mask.unsqueeze(-1) + skip, mask, skip


def first_of(held: Any) -> torch.Tensor:
    return held["x"] if isinstance(held, dict) else held[0]


@pytest.mark.parametrize(
    ("name", "kind"),
    quick(
        ("1f1b", "dict"),
        ("zbv", "tuple"),
        rest=(("1f1b", "tuple"), ("interleaved-1f1b", "dict"), ("zero-bubble", "tuple"), ("zero-bubble", "dict"), ("zbv", "dict")),
    ),
)
def test_tuples_and_dicts_travel(pools, name, kind):
    specs = [LayerSpec(Embed, kind), *(LayerSpec(Mix, kind) for _ in range(4)), first_of, LayerSpec(nn.Linear, jobs.WIDTH, jobs.VOCABULARY)]
    data = jobs.batches(4, 4, 1)
    check(run(pools, 2, specs, data, jobs.config(4, pipeline={"schedule": name})), jobs.plain_run(specs, data))


def flatten(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, 1)


def sideways(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1)


@pytest.mark.parametrize("name", quick(("zbv",), rest=(("1f1b",), ("zero-bubble",))))
def test_views_and_in_place_layers_at_the_cut(pools, name):
    specs = [
        LayerSpec(nn.Embedding, jobs.VOCABULARY, jobs.WIDTH), LayerSpec(jobs.Block), sideways,
        LayerSpec(nn.ReLU, inplace=True), LayerSpec(jobs.Block), sideways, LayerSpec(nn.Linear, jobs.WIDTH, jobs.VOCABULARY),
    ]  # fmt: skip
    data = jobs.batches(3, 4, 1)
    got = run(pools, 2, specs, data, jobs.config(4, pipeline={"schedule": name, **({} if name == "zbv" else {"partition": [3, 4]})}))
    check(got, jobs.plain_run(specs, data))


@pytest.mark.parametrize("clip", (0.0, 0.1))
def test_two_tied_keys_count_once(pools, clip):
    """C37: both copies stay equal, and the norm has each weight once."""
    tie = lambda key, **more: TiedLayerSpec(key, nn.Linear, jobs.WIDTH, jobs.WIDTH, **more)  # noqa: E731
    specs = [
        *jobs.layers(blocks=1)[:1],
        tie("a"),
        tie("b"),
        LayerSpec(jobs.Block),
        LayerSpec(jobs.Block),
        tie("b"),
        tie("a"),
        *jobs.layers(blocks=0)[1:],
    ]
    data = jobs.batches(4, 4, 1)
    got = run(pools, 2, specs, data, jobs.config(4, gradient_clipping=clip, pipeline={"partition": [4, 5]}))
    check(got, jobs.plain_run(specs, data, clip=clip))
    for layer in (0, 1, 2):
        assert torch.equal(got[0]["weights"][f"{layer}.weight"], got[1]["weights"][f"{layer}.weight"])


@full
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_same_run_twice_is_bit_identical(pools, name):
    specs, data = jobs.layers(), jobs.batches(3, 4, 2)
    cfg = jobs.config(4, pipeline={"schedule": name}, zero_optimization={"stage": 1})
    first, second = (run(pools, 4, specs, data, cfg) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one["losses"] == other["losses"]
        assert all(torch.equal(one["weights"][name], other["weights"][name]) for name in one["weights"])


@pytest.mark.parametrize("name", quick(("zbv",), rest=(("1f1b",),)))
def test_bf16(pools, name):
    specs, data = jobs.layers(), jobs.batches(8, 4, 1)
    cfg = {**jobs.config(4, pipeline={"schedule": name}), "bf16": {"enabled": True}}
    got, want = run(pools, 2, specs, data, cfg), jobs.plain_run(specs, data)
    for rank in got:
        assert rank["losses"] == pytest.approx(want["losses"], rel=0.03)


def test_fp16_has_one_loss_scale_over_all_stages(pools):
    """The first scale overflows on the stage that has the loss; every stage must skip the same steps."""
    specs, data = jobs.layers(), jobs.batches(8, 4, 1)
    cfg = {**jobs.config(4), "fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}}
    got = pools(2).run(jobs.fp16_run, specs, data, cfg)
    assert got[0]["scales"] == got[1]["scales"] and got[0]["skipped"] == got[1]["skipped"] > 0
    assert all(math.isfinite(loss) for loss in got[0]["losses"])
    plain = jobs.plain_run(specs, data[got[0]["skipped"] :])
    assert got[0]["losses"][got[0]["skipped"] :] == pytest.approx(plain["losses"], rel=0.02)
