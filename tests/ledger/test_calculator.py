"""FLOPs, memory, traffic and pipelines: sums add up, forms agree with the general count, and with the engine's own predictions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stateroom.ledger import OptimizerRecord, UnitRecord, predict_states, predict_traffic
from stateroom.ledger.comm.axes import Rates, flows, group_of, seconds_of
from stateroom.ledger.comm.collectives import collective_seconds
from stateroom.ledger.flops import forward_flops, narayanan_flops, step_flops, training_flops_per_token
from stateroom.ledger.hardware import read_cluster
from stateroom.ledger.job import Job, Layout, problems
from stateroom.ledger.memory import core_factor, layer_activations, megatron_activation_bytes, zero_states
from stateroom.ledger.memory.life import fullest, in_flight_chunks, peak_bytes
from stateroom.ledger.memory.rank import padded, rank_states, rank_units, share
from stateroom.ledger.memory.tensors import LayerOptions, layer_tensors
from stateroom.ledger.pipeline import bubble_share, bubble_time, instructions, simulate
from stateroom.ledger.pipeline.partition import part_sizes
from stateroom.ledger.problems import LedgerError
from stateroom.ledger.shapes import count_parameters, read_shape
from stateroom.ledger.step import step_time
from stateroom.zero.layout import Layout as UnitLayout
from stateroom.zero.placement import STAGES

SMALL = read_shape("llama3.2-1b")


def job(model="llama3.2-1b", on="8xh100", seq=2048, **layout):
    cluster = read_cluster(on)
    given_layout = {"dp_shard": cluster.devices, **layout}
    return Job(read_shape(model), cluster, Layout(**given_layout), seq)


def test_causal_attention_is_half_of_full_and_the_rest_is_equal():
    full, causal, none = (forward_flops(SMALL, 4096, attention=each) for each in ("full", "causal", "none"))
    assert full.part("layer: attention core") == 2 * causal.part("layer: attention core")
    assert full.total - causal.total == causal.total - none.total > 0
    assert full.switches["attention counted"] == "full"
    with pytest.raises(LedgerError, match="attention is 'half'; known: full, causal, none"):
        forward_flops(SMALL, 16, attention="half")


def test_the_layer_count_gives_the_closed_form_of_a_gpt():
    """72 B L s h² (1 + s/6h + V/12hL) counts a GPT's matrices, its full attention core and its head."""
    shape = read_shape("megatron-175b")
    counted = step_flops(shape, 2048, 64, attention="full").model.total
    assert counted == pytest.approx(narayanan_flops(64, 96, 12288, 2048, 51200), rel=1e-12)


def test_recomputation_adds_what_its_policy_says():
    made = {policy: step_flops(SMALL, 2048, 4, recompute=policy) for policy in ("none", "core", "selective", "full")}
    assert made["none"].recompute.total == made["selective"].recompute.total == 0
    assert made["core"].recompute.total == 4 * forward_flops(SMALL, 2048).part("layer: attention core")
    head = forward_flops(SMALL, 2048)["output head"]
    assert made["full"].hardware == pytest.approx(made["none"].hardware * 4 / 3 - 4 * head)


def test_windows_and_encoders():
    wide = replace(read_shape("mistral-7b"), window=None)
    assert training_flops_per_token(read_shape("mistral-7b"), 16384) < training_flops_per_token(wide, 16384)
    assert training_flops_per_token(read_shape("mistral-7b"), 2048) == training_flops_per_token(wide, 2048)
    assert forward_flops(read_shape("bert-base"), 512, attention="causal").switches["attention counted"] == "full"
    assert forward_flops(read_shape("t5-base"), 512)["layer: cross attention core"] > 0


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_the_tensor_count_gives_the_published_form_of_a_gpt_layer(tp):
    shape = read_shape("megatron-22b")
    options = LayerOptions(tp=tp, dropout=True, flash=False, sequence_parallel=True)
    published = layer_activations(2048, 4, 6144, 64, tp=tp, mode="tp+sp")
    assert layer_tensors(shape, 2048, 4, options).total == pytest.approx(published, rel=1e-12)
    without_core = layer_tensors(shape, 2048, 4, replace(options, recompute="core")).total
    assert without_core == pytest.approx(layer_activations(2048, 4, 6144, 64, tp=tp, mode="tp+sp+sel"), rel=1e-12)
    assert core_factor(64, 2048, 6144) == pytest.approx(106.67, rel=1e-3)


def test_policies_keep_less_and_less():
    sizes = [
        layer_tensors(SMALL, 2048, 1, LayerOptions(flash=False, recompute=each)).total for each in ("none", "core", "selective", "full")
    ]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4
    with pytest.raises(LedgerError, match="recompute is 'some'; known: none, core, selective, full"):
        LayerOptions(recompute="some")


@given(st.integers(1, 10**7), st.integers(1, 300))
def test_a_share_is_that_of_the_engines_layout(numel, world):
    layout = UnitLayout.even([("unit", (numel,))], world)
    assert (share(numel, world), padded(numel, world)) == (layout.bounds[1], layout.padded)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world", [1, 2, 7, 8])
def test_states_and_traffic_equal_what_the_engine_predicts_to_the_byte(stage, world):
    """The engine hands its units to predict_states and predict_traffic; the calculator has the same bytes from sizes alone."""
    shape, accumulation = read_shape("smollm2-135m"), 3
    made = Job(shape, read_cluster(f"{world}xh100"), Layout(dp_shard=world, zero=stage, accumulation=accumulation, on_host=True), 512)
    units = []
    for unit in rank_units(made, 0):
        layout = UnitLayout.even([(unit.name, (unit.numel,))], world)
        units += [UnitRecord(unit.name, layout, True, unit.is_root, 2, 4, 4, 4)] * unit.count
    sharded = STAGES[stage].optimizer.sharded and world > 1
    cuts = [(unit.layout, rank) for unit in units for rank in (range(1) if sharded else range(world))]
    numels = tuple(size for layout, rank in cuts if (size := min(layout.interval(rank)[1], layout.numel) - layout.interval(rank)[0]) > 0)
    predicted = predict_states(units, STAGES[stage], 0, [OptimizerRecord("AdamW", (), numels, 4)])
    found = rank_states(made, 0)["device"]
    assert found["parameters"] == predicted["parameters"] and found["gradients"] == predicted["gradients"]
    assert found["master weights"] == predicted["master weights"]
    assert found["optimizer states"] == predicted["optimizer states"]
    traffic = {}
    for flow in flows(made):
        key = (flow.primitive, flow.state)
        traffic[key] = (round(flow.calls), round(flow.calls * flow.payload_bytes))
    assert traffic == predict_traffic(units, STAGES[stage], world, accumulation)


def test_adding_ranks_never_raises_bytes_a_rank():
    for model in ("llama3-8b", "mixtral-8x7b"):
        for stage in range(4):
            totals = [zero_states(count_parameters(read_shape(model)).total, world, stage).total for world in (1, 2, 3, 8, 64, 1000)]
            assert totals == sorted(totals, reverse=True)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([1, 2, 4]), st.integers(0, 3), st.sampled_from(["none", "selective", "full"]), st.sampled_from([1, 2, 3]))
def test_memory_of_a_rank_shrinks_with_ranks_and_its_terms_add_up(tp, stage, recompute, doublings):
    small = job(on="8xh100", tp=tp, dp_shard=8 // tp, zero=stage, recompute=recompute)
    ranks = 8 * 2**doublings
    large = job(on=f"{ranks} h100", tp=tp, dp_shard=ranks // tp, zero=stage, recompute=recompute)
    assert peak_bytes(large)[0] <= peak_bytes(small)[0] * (1 + 1e-6) + 4096  # padding of a unit to more ranks
    for _, at in fullest(small).instants:
        assert at.total == pytest.approx(sum(term.value for term in at.terms))
    assert fullest(small).peak[1].total == pytest.approx(peak_bytes(small)[0])
    assert fullest(small).why.startswith("the peak is ")


def test_offload_moves_states_to_their_tier():
    held = rank_states(job(zero=2, optimizer_tier="cpu"), 0)
    assert set(held) == {"device", "cpu"} and held["cpu"]["optimizer states"] > 0
    assert "optimizer states" not in [term.name for term in held["device"].terms]


def test_the_uneven_stage_is_the_first_or_the_last():
    assert part_sizes(126, 16) == [7, *[8] * 14, 7]
    for layers, stages in ((80, 8), (61, 16), (70, 12), (5, 5)):
        assert sum(part_sizes(layers, stages)) == layers


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 8), st.integers(1, 4), st.integers(1, 3))
def test_the_simulated_bubble_is_the_closed_form(stages, groups, chunks):
    count = stages * groups
    for name in ("gpipe", "1f1b", "zb-h1"):
        ran = simulate(instructions(name, stages, count))
        assert ran.share() == pytest.approx(bubble_share(stages, count, schedule=name))
    ran = simulate(instructions("1f1b", stages, count, chunks), 1 / chunks, 1 / chunks, 1 / chunks)
    assert ran.bubble == pytest.approx(bubble_time("1f1b", stages, 1, 1, 1, interleave=chunks))
    held = [in_flight_chunks("1f1b", stage, stages, chunks, count) for stage in range(stages)]
    assert list(ran.held) == pytest.approx(held)


def test_a_schedule_that_waits_for_ever_is_said_to():
    first, second = instructions("1f1b", 2, 2)
    with pytest.raises(LedgerError, match="cannot go on; stage 0"):
        simulate([first[::-1], second])
    with pytest.raises(LedgerError, match=r"5 micro-batches do not divide by 4 stages; nearest: 4 or 8"):
        instructions("1f1b", 4, 5, 2)
    with pytest.raises(LedgerError, match="unknown schedule '2f2b'; known: gpipe, 1f1b"):
        bubble_share(4, 4, schedule="2f2b")


def test_collectives_over_domains():
    cluster = read_cluster("64 h100")
    inside, across = group_of(cluster, 8, 1), group_of(cluster, 8, 8)
    assert (inside.inside, inside.outside, across.inside, across.outside) == (8, 1, 1, 8)
    fast, slow = (seconds_of(cluster, group, "all_gather", 1e9, Rates()) for group in (inside, across))
    assert slow > 5 * fast
    assert collective_seconds("all_reduce", 1e9, 8, 450e9) == pytest.approx(2 * collective_seconds("all_gather", 1e9, 8, 450e9))


def test_a_step_adds_up_and_is_never_below_its_bound():
    for layout in ({}, {"tp": 8, "dp_shard": 8, "pp": 1}, {"tp": 4, "pp": 4, "dp_shard": 4, "accumulation": 8, "vp": 2}):
        made = step_time(job("llama3-8b", "64 h100", 8192, **{"zero": 1, **(layout or {"dp_shard": 64})}))
        assert made.seconds == pytest.approx(sum(term.value for term in made.parts.terms))
        assert made.seconds >= made.lower_bound_s > 0 and 0 < made.mfu <= made.hfu < 1
        assert made.parts["ideal compute"] == pytest.approx(made.mfu * made.seconds)


@pytest.mark.parametrize(
    "layout, says",
    [
        ({"tp": 3, "dp_shard": 1}, r"attention heads: 32 does not divide by tp = 3; nearest legal: 2 or 4"),
        ({"tp": 16, "dp_shard": 1}, r"tp 16 leaves the 8 devices that fast links join; use at most 8"),
        ({"dp_shard": 4}, r"the axes make 4 ranks .* the cluster has 8 devices"),
        ({"pp": 8, "vp": 4, "dp_shard": 1}, r"16 layers do not fill pp 8 x vp 4 chunks"),
        ({"pp": 2, "vp": 2, "dp_shard": 4, "accumulation": 3}, r"micro-batches of a step: 3 does not divide by pp \(interleaved\) = 2"),
        ({"ep": 2}, r"ep is 2, but llama3.2-1b has no experts"),
        ({"parameter_tier": "cpu"}, r"parameters rest off the device only in ZeRO stage 3"),
        ({"micro_batch": 0}, r"micro_batch is 0"),
    ],
)
def test_layouts_that_do_not_fit_are_refused_with_the_nearest_legal_values(layout, says):
    found = "\n".join(problems(job(**layout)))
    import re

    assert re.search(says, found), found


def test_megatrons_estimate_with_and_without_sequence_parallelism():
    args = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "padded_vocab_size": 100, "seq_length": 32, "micro_batch_size": 2,
            "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}  # fmt: skip
    sbh = 32 * 2 * 64
    flight = 1 + 1 / 4
    expected = (sbh * 34 * 4 + 8 * 32 * 2 * 2 + sbh * 2) * flight / 2
    assert megatron_activation_bytes(args).total == pytest.approx(expected)
    plain = (sbh * (10 + 12) * 4 + 8 * 32 * 2 * 2 + sbh * 2) * flight * 1.05
    assert megatron_activation_bytes(args, sequence_parallel=False).total == pytest.approx(plain)
