"""Golden plans, their reasons, the config that comes out of them, and plans that cannot be made."""

from __future__ import annotations

import json
import re
import time
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
from stateroom.config_schemas import load
from stateroom.errors import ConfigError
from stateroom.ledger.hardware import read_cluster
from stateroom.ledger.job import Job, Layout, problems
from stateroom.ledger.plan import Request, make_plan
from stateroom.ledger.plan.config import config_of, job_of_config, layout_of, notes_of
from stateroom.ledger.plan.explain import explain
from stateroom.ledger.plan.html import page
from stateroom.ledger.plan.reasons import neighbours
from stateroom.ledger.plan.search import TIE
from stateroom.ledger.problems import LedgerError
from stateroom.ledger.shapes import read_shape
from stateroom.ledger.step.time import step_time


def request(model="llama3-70b", on="128x8 h100", seq=8192, batch=512, **more):
    return Request(read_shape(model), read_cluster(on), seq, batch, **more)


@pytest.fixture(scope="module")
def golden():
    began = time.process_time()
    plan = make_plan(request())
    return plan, time.process_time() - began


def test_the_golden_plan_of_70b_on_1024(golden):
    """70 B dense, 128 x 8 H100, 8,192 tokens, 4 M tokens a step: in under 10 s, tensor parallelism inside a node, no bubble."""
    plan, seconds = golden
    assert seconds < 10
    best = plan.best
    assert (best.layout.tp, best.layout.pp, best.layout.cp, best.layout.zero) == (4, 1, 1, 3)
    assert best.layout.ranks == 1024 and best.layout.sequences == 512
    assert best.memory_bytes <= plan.request.limit < 85.1e9
    assert 0.40 < best.mfu < 0.55
    lost = {term.name: term.value / best.seconds for term in best.time.parts.terms}
    assert sum(lost.values()) == pytest.approx(1) and lost["ideal compute"] == pytest.approx(best.mfu)
    assert {flow.axis for flow in best.time.flows} == {"tp", "dp"}


def test_every_candidate_is_legal_fits_and_none_is_clearly_faster_than_the_best(golden):
    plan, _ = golden
    assert len(plan.candidates) + plan.full <= plan.tried
    for each in plan.candidates:
        assert not problems(each.job) and each.memory_bytes <= plan.request.limit
        assert each.seconds >= plan.best.seconds / (1 + TIE) * (1 - 1e-9)
    front = plan.pareto()
    assert all(one.seconds <= other.seconds and one.memory_bytes > other.memory_bytes for one, other in pairwise(front))


def test_the_published_layout_of_405b_is_not_rejected_and_close_to_the_best():
    plan = make_plan(request("llama3-405b", "2048x8 h100", 8192, 2048))
    published = plan.find(tp=8, pp=16, dp_shard=128, dp_replicate=1)
    assert published is not None
    assert published.seconds <= 1.10 * plan.best.seconds


def test_a_million_ranks_are_planned_in_half_a_minute():
    began = time.process_time()
    plan = make_plan(request("llama3-405b", "125000x8 h100", 8192, 125000))
    assert time.process_time() - began < 30
    assert plan.best.layout.ranks == 1_000_000


def test_experts_and_long_sequences():
    plan = make_plan(request("mixtral-8x7b", "8x8 h100", 4096, 512))
    assert plan.best.memory_bytes <= plan.request.limit
    long = make_plan(request("llama3-8b", "4x8 h100", 131072, 16))
    assert long.best.layout.cp * long.best.layout.tp > 1, long.best.layout.words()  # one rank cannot hold the sequence


def test_neighbours_say_why_they_are_not_it(golden):
    plan, _ = golden
    found = neighbours(plan)
    verdicts = {each.change: each for each in found}
    assert verdicts["recompute selective -> none"].verdict == "too large"
    assert re.search(r"GB over the limit", verdicts["recompute selective -> none"].why)
    assert verdicts["pp 1 -> 2"].verdict == "slower" and "bubble" in verdicts["pp 1 -> 2"].why
    assert verdicts["micro-batch 2 -> 4"].verdict == "illegal" and "do not divide" in verdicts["micro-batch 2 -> 4"].why
    assert not [each for each in found if each.verdict == "faster"]
    text = "\n".join(explain(plan))
    assert [text.index(f"\n{number}. {axis} ") for number, axis in ((1, "TP"), (2, "PP"), (3, "DP"), (4, "CP"))] == sorted(
        text.index(f"\n{number}. {axis} ") for number, axis in ((1, "TP"), (2, "PP"), (3, "DP"), (4, "CP"))
    )


def test_the_emitted_config_loads_and_gives_the_layout_back(golden, tmp_path):
    plan, _ = golden
    for each in [plan.best, plan.find(pp=2), plan.find(pp=2, vp=2), plan.find(cp=2), plan.find(tp=8)]:
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(config_of(each.job)))
        config = load(str(path), ranks=1024)
        assert config.train_batch_size == 512 and config.mesh.tp == each.layout.tp
        assert job_of_config(str(path), each.job).layout == each.layout
        assert notes_of(each.job) == []


def test_a_config_that_a_user_has():
    base = Job(read_shape("llama3-8b"), read_cluster("8xh100"), Layout(), 4096)
    given = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "fp16": {"enabled": True}, "communication_data_type": "fp16",
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "activation_checkpointing": {"policy": "full"},
    }  # fmt: skip
    layout = job_of_config(given, base, 8).layout
    assert (layout.dp_shard, layout.zero, layout.micro_batch, layout.accumulation) == (8, 3, 2, 4)
    assert (layout.param, layout.wire, layout.optimizer_tier, layout.recompute) == ("fp16", "fp16", "cpu", "full")
    plain = job_of_config({"train_batch_size": 8}, base, 8).layout
    assert (plain.param, plain.compute, plain.master, plain.sizes.total) == ("fp32", "fp32", None, 16)
    with pytest.raises(ConfigError, match=r"6 ranks cannot be divided by the 4 ranks"):
        job_of_config({"train_batch_size": 12, "mesh": {"tp": 4}}, base, 6)
    with pytest.raises(LedgerError, match=r"6 ranks do not divide by tp 4 x cp 1 x pp 1"):
        layout_of(load({"train_batch_size": 8, "mesh": {"tp": 4}}, ranks=8), 6)


def test_what_cannot_be_planned_says_what_is_nearest():
    with pytest.raises(LedgerError, match=r"none of \d+ layouts fits .* the smallest needs .* Use more devices"):
        make_plan(request("llama3-405b", "8xh100", 8192, 8, limit_bytes=5e9))
    with pytest.raises(LedgerError, match=r"no legal layout .* a step has 7 sequences"):
        make_plan(request("llama3-8b", "8x8 h100", 8192, 7, fixed={"tp": 1, "pp": 1}))


def test_fixed_degrees_are_kept():
    plan = make_plan(request(fixed={"tp": 8, "pp": 2}))
    assert {(each.layout.tp, each.layout.pp) for each in plan.candidates} == {(8, 2)}


def test_states_off_the_device_need_their_stage_on_one_rank_too():
    plan = make_plan(request("llama3-8b", "1xh100", 8192, 16, base=Layout(optimizer_tier="cpu", parameter_tier="cpu")))
    assert {each.layout.zero for each in plan.candidates} == {3}
    names = {term.name for term in plan.best.memory.peak[1].terms}
    assert {"gathered units", "gradients of running units"} <= names and not {"parameters", "gradients", "master weights"} & names
    assert config_of(plan.best.job)["zero_optimization"]["offload_param"] == {"device": "cpu"}


def test_what_fits_nowhere_goes_off_the_devices_and_no_further_than_it_must():
    """The optimizer to the host, parameters too where a device holds less, a drive where the host is small."""
    for limit, host, tiers in ((None, 2e12, ("cpu", "device")), (3e10, 2e12, ("cpu", "cpu")), (None, 5e10, ("nvme", "nvme"))):
        plan = make_plan(request("llama3-8b", "1xh100", 8192, 16, limit_bytes=limit, host_bytes=host))
        assert "nothing fits with all states on the devices" in plan.note
        assert (plan.best.layout.optimizer_tier, plan.best.layout.parameter_tier) == tiers
        assert config_of(plan.best.job)["zero_optimization"]["offload_optimizer"] == {"device": tiers[0]}
        assert f"optimizer on {tiers[0]}" in plan.best.layout.words()
    assert make_plan(request("llama3-8b", "8xh100", 8192, 16)).note == ""


def test_the_host_bus_and_the_drive_are_in_traffic_and_time():
    made = request("llama3-8b", "8xh100", 8192, 64).job(
        Layout(dp_shard=8, zero=3, accumulation=8, optimizer_tier="nvme", parameter_tier="cpu")
    )
    found = step_time(made)
    moved = {(flow.axis, flow.primitive, flow.state): flow.sent_bytes for flow in found.flows}
    share = 8_030_261_248 / 8
    assert moved["host", "to host", "gradients"] == pytest.approx(8 * 4 * share, rel=1e-4)
    assert moved["nvme", "written", "optimizer states"] == moved["nvme", "read", "optimizer states"] == pytest.approx(8 * share, rel=1e-2)
    assert found.parts["exposed host"] > 0 and sum(term.value for term in found.parts.terms) == pytest.approx(found.seconds)


def test_the_report_is_one_file_with_charts_and_nothing_from_outside(golden):
    plan, _ = golden
    text = page(plan, ["a note <with> signs"])
    assert "a note &lt;with&gt; signs" in text
    charts = re.findall(r"<svg.*?</svg>", text, re.S)
    assert len(charts) == 4
    for chart in charts:
        root = ElementTree.fromstring(chart)
        assert root.attrib["aria-label"] and len(list(root.iter())) > 5
        for each in root.iter("{http://www.w3.org/2000/svg}rect"):
            assert float(each.attrib["width"]) >= 0
    outside = re.findall(r'(?:src|href)="[^"]*"|url\([^)]*\)|@import|<script', text)
    assert not outside
