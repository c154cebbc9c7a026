"""Instruction lists: complete, without a circle, torch's own where torch has them, and drawn as they run."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections import Counter
from types import SimpleNamespace

import pytest
from stateroom.pipe.cli import main
from stateroom.pipe.routes import messages
from stateroom.pipe.schedules import KINDS, schedule

TRAINING = tuple(name for name in KINDS if name != "inference")
SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 4, 8, 24)]


def plans():
    for name in KINDS:
        for stages, count in SIZES:
            if name == "dualpipev" and count < 2 * stages:
                continue
            if name == "interleaved-1f1b" and count > stages and count % stages:
                continue
            yield schedule(name, stages, count)
            if name == "interleaved-1f1b":
                yield schedule(name, stages, count, 3)


def test_every_part_runs_every_micro_batch_once_and_nothing_waits_for_ever():
    for plan in plans():
        seen = Counter((each.kind, plan.part(stage, each.chunk), each.microbatch) for stage, row in enumerate(plan.rows) for each in row)
        assert set(seen.values()) == {1}
        for part in range(plan.parts):
            for m in range(plan.micro_batches):
                assert ("F", part, m) in seen
                if plan.name != "inference":
                    whole, halves = ("B", part, m) in seen, (("I", part, m) in seen, ("W", part, m) in seen)
                    assert (whole, halves) in ((True, (False, False)), (False, (True, True))), (plan.name, part, m)
        plan.run()  # raises where instructions wait for each other


def test_parts_lie_where_they_are_looked_for():
    for plan in plans():
        homes = {plan.part(stage, chunk): (stage, chunk) for stage in range(plan.stages) for chunk in range(plan.chunks)}
        assert sorted(homes) == list(range(plan.parts))
        assert all((plan.home(part), plan.chunk(part)) == home for part, home in homes.items())


@pytest.mark.parametrize(("stages", "count"), [(p, m) for p, m in SIZES if m >= p])
def test_1f1b_holds_no_more_than_stages_less_rank(stages, count):
    assert schedule("1f1b", stages, count).activations() == tuple(stages - rank for rank in range(stages))
    assert schedule("gpipe", stages, count).activations() == (count,) * stages


def test_every_message_that_a_part_needs_is_sent_once():
    for plan in plans():
        sent = Counter(message for found in messages(plan).values() for message in found)
        assert not sent or set(sent.values()) == {1}
        for part in range(1, plan.parts):
            if plan.home(part) != plan.home(part - 1):
                for m in range(plan.micro_batches):
                    assert any(each.kind == "F" and (each.part, each.micro_batch) == (part, m) for each in sent)


def torch_rows(kind, stages, count, chunks):
    """Return what torch's own schedule class orders, by stage: (kind, part, micro-batch)."""
    import torch.distributed.pipelining.schedules as theirs

    facts = SimpleNamespace(
        pp_group_size=stages, _n_microbatches=count, n_local_stages=chunks, _num_stages=stages * chunks, num_stages=stages * chunks,
        microbatches_per_round=count // max(1, count // stages), number_of_rounds=max(1, count // stages),
    )  # fmt: skip
    cls = getattr(theirs, kind)
    if kind in ("ScheduleGPipe", "Schedule1F1B"):
        orders = cls._get_pipeline_order(facts)
    else:
        orders = {stage: cls._calculate_single_rank_operations(facts, stage) for stage in range(stages)}
    wanted = {"F": "F", "B": "B", "I": "I", "W": "W"}
    return [
        [
            (wanted[a.computation_type.value], a.stage_index, a.microbatch_index)
            for a in orders[stage]
            if a and a.computation_type.value in wanted
        ]
        for stage in range(stages)
    ]


@pytest.mark.parametrize(
    ("name", "kind", "chunks"),
    [("gpipe", "ScheduleGPipe", 1), ("1f1b", "Schedule1F1B", 1), ("interleaved-1f1b", "ScheduleInterleaved1F1B", 2)],
)
@pytest.mark.parametrize(("stages", "count"), [(2, 4), (4, 8), (4, 4), (3, 9), (8, 16)])
def test_the_order_is_torchs(name, kind, chunks, stages, count):
    plan = schedule(name, stages, count, chunks)
    theirs = torch_rows(kind, stages, count, chunks)
    if name == "1f1b":  # torch 2.13 only draws this list, and counts the last stage's forwards from 1 in it
        theirs[-1] = [(k, part, m - 1 if k == "F" else m) for k, part, m in theirs[-1]]
    ours = [[(each.kind, plan.part(stage, each.chunk), each.microbatch) for each in row] for stage, row in enumerate(plan.rows)]
    assert ours == theirs


def test_less_bubble_the_more_elaborate():
    shares = {name: schedule(name, 4, 8).run(*(1 / schedule(name, 4, 8).chunks,) * 3).share("total") for name in TRAINING}
    assert shares["gpipe"] == shares["1f1b"] > shares["interleaved-1f1b"] > shares["zero-bubble"] > shares["zbv"]
    assert shares["1f1b"] == pytest.approx(3 / 11)


@pytest.mark.parametrize("name", TRAINING)
def test_show_prints_draws_and_tells_what_runs(name, tmp_path, capsys):
    words = ["show", "--schedule", name, "--stages", "2", "--micro-batches", "4", "--svg", str(tmp_path / "x.svg")]
    assert main(words) == 0
    text = capsys.readouterr().out
    plan = schedule(name, 2, 4)
    assert text.count("stage  ") == 2 and "bubble:" in text and "most activations held at once" in text
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    order = [[(each["kind"], each["chunk"], each["micro_batch"]) for each in row] for row in told["timeline"]]
    assert order == [[(each.kind, each.chunk, each.microbatch) for each in row] for row in plan.rows]
    assert told["activations"] == list(plan.activations())
    drawn = ElementTree.parse(tmp_path / "x.svg").getroot()
    titles = [found.text for found in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == sum(map(len, plan.rows))


def test_show_says_what_is_wrong(capsys):
    assert main(["show", "--schedule", "2f2b", "--stages", "2", "--micro-batches", "4"]) == 1
    assert "there is no schedule '2f2b'; known: gpipe" in capsys.readouterr().err
    assert main(["show", "--stages", "2"]) == 2
    assert main(["show", "--help"]) == 0 and "example" in capsys.readouterr().out


def test_measured_costs_take_the_place_of_assumed_ones():
    """Two stages of which the second takes three times as long: the first waits for it, and it for the first forward alone."""
    plan = schedule("1f1b", 2, 8)
    cost = {"F": 1.0, "B": 2.0}
    ran = plan.run(cost_of=lambda stage, each: cost[each.kind] * (3 if stage else 1))
    assert ran.busy == (24.0, 72.0) and ran.spans[1][-1][1] == 1.0 + 72.0
    same = plan.run(cost_of=lambda stage, each: cost[each.kind])
    assert same == plan.run(1.0, 1.0, 1.0)
