"""Checkpoint intervals against a simulated run, failure rates, hardware by name, and relations between figures."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stateroom.ledger.derive import QUANTITIES, derive, quantity
from stateroom.ledger.goodput import (
    daly_interval,
    effective_ratio,
    exact_goodput,
    expected_failures,
    first_order_waste,
    goodput_account,
    mean_time_between_failures,
    mtbf_from_node_rate,
    optimal_goodput,
    optimal_interval,
    survival,
    young_interval,
)
from stateroom.ledger.goodput.job import cost_of, recovery_of
from stateroom.ledger.hardware import known_accelerator, read_cluster, read_hardware
from stateroom.ledger.hardware.catalogue import ACCELERATORS
from stateroom.ledger.job import Job, Layout
from stateroom.ledger.problems import LedgerError
from stateroom.ledger.shapes import read_shape
from stateroom.ledger.units import dtype_bytes, parse_bytes, parse_count, parse_seconds, show_bytes, show_seconds


def simulated_goodput(interval, write, mtbf, restart, segments, seed):
    """Compute over elapsed time of segments that are retried until they complete, failures drawn from a Poisson process."""
    draw = random.Random(seed)
    elapsed, next_failure = 0.0, draw.expovariate(1 / mtbf)
    for _ in range(segments):
        while True:
            if next_failure >= interval + write:
                elapsed += interval + write
                next_failure -= interval + write
                break
            elapsed += next_failure
            next_failure = draw.expovariate(1 / mtbf)
            while next_failure < restart:
                elapsed += next_failure
                next_failure = draw.expovariate(1 / mtbf)
            elapsed += restart
            next_failure -= restart
    return segments * interval / elapsed


@pytest.mark.parametrize("interval, write, mtbf, restart", [(1200, 60, 11135, 600), (300, 30, 1800, 120), (3600, 300, 20000, 0)])
def test_the_exact_goodput_is_that_of_a_simulated_run(interval, write, mtbf, restart):
    assert simulated_goodput(interval, write, mtbf, restart, 60_000, seed=5) == pytest.approx(
        exact_goodput(interval, write, mtbf, restart), rel=0.01
    )


@settings(max_examples=80, deadline=None)
@given(st.floats(1, 600), st.floats(3600, 1e6), st.floats(0, 1800))
def test_no_interval_beats_the_optimum_and_young_is_near_it(write, mtbf, restart):
    best = optimal_goodput(write, mtbf, restart)
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert exact_goodput(factor * optimal_interval(write, mtbf), write, mtbf, restart) <= best + 1e-12
    assert exact_goodput(young_interval(write, mtbf), write, mtbf, restart) >= 0.97 * best
    assert daly_interval(write, mtbf) == pytest.approx(optimal_interval(write, mtbf), rel=0.02)


@settings(max_examples=50, deadline=None)
@given(st.floats(10, 5000), st.floats(0, 300), st.floats(3600, 1e6), st.floats(0, 1800))
def test_shares_of_the_time_add_up(interval, write, mtbf, restart):
    found = goodput_account(interval, write, mtbf, restart)
    assert found.total == pytest.approx(1, abs=1e-9) and all(term.value >= 0 for term in found.terms)


def test_rates():
    assert mean_time_between_failures(50000, 10000) == 5
    assert expected_failures(50000 * 3600, 10000) == pytest.approx(4.8)
    assert mtbf_from_node_rate(1024, 6.5) / 3600 == pytest.approx(28.85, rel=1e-3)
    assert survival(18000, 3600) == pytest.approx(0.8187, rel=1e-3)
    assert first_order_waste(1158, 60, 11135, 600) == pytest.approx(0.158, rel=0.01)
    assert effective_ratio(mtbf_from_node_rate(12000, 6.5), 300, 300) == pytest.approx(0.7398, rel=1e-3)


def test_recovery_and_cost_of_a_job():
    job = Job(read_shape("llama3-70b"), read_cluster("128x8 h100"), Layout(tp=8, dp_shard=128), 8192)
    slow, beside = recovery_of(job, storage_bytes_s=2e10, asynchronous=False), recovery_of(job, storage_bytes_s=2e10)
    assert slow.checkpoint.total == 14 * 70553706496 and slow.write_s == pytest.approx(slow.checkpoint.total / 2e10)
    assert slow.stall_s == slow.write_s > beside.stall_s and beside.goodput > slow.goodput
    cost = cost_of(job, 4.0, 15e12, beside.goodput, price=2.0)
    assert cost.total == pytest.approx(15e12 / job.tokens * 4.0 * 1024 / 3600 / beside.goodput)
    assert f"{2 * cost.total:,.0f} USD" == cost.switches["cost"]
    with pytest.raises(LedgerError, match="no time is left"):
        cost_of(job, 4.0, 15e12, 0.0)


def test_clusters_are_read_from_words_and_files(tmp_path):
    for words in ("128x8 h100", "128 x 8 H100-SXM", "1024 h100", "1024xh100"):
        cluster = read_cluster(words)
        assert (cluster.devices, cluster.per_node, cluster.domain) == (1024, 8, 8)
    assert read_cluster("72 gb200").domain == 72 and read_cluster("h100", 16).nodes == 2
    path = tmp_path / "mine.hjson"
    lines = [
        "accelerator: {",
        "base: h100",
        "hbm_bytes_s: 3TB",
        "usable_bytes: 70GiB",
        "}",
        "devices: 32",
        "network_bytes_s: 25GB",
        "storage_bytes_s: 1TB",
    ]
    path.write_text("\n".join(lines))
    mine = read_cluster(path)
    assert (mine.devices, mine.network_bytes_s, mine.accelerator.hbm_bytes_s, mine.accelerator.usable_bytes) == (32, 25e9, 3e12, 70 * 2**30)
    assert mine.accelerator.peak_flops("fp8") == 1979e12


@pytest.mark.parametrize(
    "words, says",
    [
        ("8xh1000", r"unknown accelerator 'h1000'; nearest: .*h100"),
        ("1001 h100", r"1001 devices do not fill nodes of 8; nearest: 1000 or 1008"),
        ("h100", r"how many\? write for example '8xh100-sxm'"),
        ("16 a10", r"a10 has no network_bytes_s in the table"),
    ],
)
def test_unknown_hardware_is_refused_never_guessed(words, says):
    with pytest.raises(LedgerError, match=says):
        read_cluster(words)


def test_a_file_with_a_wrong_key_or_without_a_figure(tmp_path):
    with pytest.raises(LedgerError, match=r"unknown key 'hbm_bytes' of an accelerator; nearest: hbm_bytes_s"):
        read_hardware({"base": "h100", "hbm_bytes": 1})
    with pytest.raises(LedgerError, match=r"needs peak, usable_bytes, hbm_bytes_s; or start from a known one"):
        read_hardware({"name": "mine"})
    with pytest.raises(LedgerError, match=r"v100-sxm-32gb has no published dense peak for 'fp8'; it has fp16, fp32"):
        known_accelerator("v100").peak_flops("fp8")


def test_every_accelerator_has_sources_and_sound_figures():
    for device in ACCELERATORS:
        assert device.source and device.peak and device.usable_bytes > 1e9 and device.hbm_bytes_s > 1e11, device.name
        half, single = device.peak.get("bf16", device.peak.get("fp16")), device.peak.get("fp32", 0)
        assert half > single and device.peak.get("fp8", half) >= half


def test_relations_give_a_figure_with_its_chain():
    found = derive("mfu", {"tokens_per_s": 238300, "gpus": 6144, "peak": 275e12, "params": 540.35e9})
    assert found.value == pytest.approx(0.457, rel=1e-3)
    assert found.steps[-1].startswith("mfu = achieved / peak") and "token_flops = 6 N" in "\n".join(found.steps)
    attention = {"layers": 118, "hidden": 18432, "seq": 2048, "params": 540.35e9}
    full, causal = (derive("token_flops", attention, attention=each).value for each in ("full", "causal"))
    assert full - 6 * 540.35e9 == pytest.approx(2 * (causal - 6 * 540.35e9))
    with pytest.raises(LedgerError, match=r"usd does not follow from .*; it would with: .*device_h, usd_per_h"):
        derive("usd", {"params": 1e9})
    with pytest.raises(LedgerError, match=r"unknown quantity 'flop'; nearest"):
        quantity("flop")


@settings(max_examples=60, deadline=None)
@given(st.floats(0.05, 0.9), st.floats(1e13, 1e16), st.integers(1, 10**5), st.floats(1e8, 1e13))
def test_relations_are_consistent_both_ways(mfu, peak, devices, params):
    rate = derive("achieved", {"mfu": mfu, "peak": peak}).value
    tokens_s = rate * devices / (6 * params)
    assert derive("mfu", {"tokens_s": tokens_s, "devices": devices, "peak": peak, "params": params}).value == pytest.approx(mfu)
    hours = derive("device_h", {"params": params, "tokens": 1e12, "mfu": mfu, "peak": peak}).value
    assert derive("mfu", {"params": params, "tokens": 1e12, "device_h": hours, "peak": peak}).value == pytest.approx(mfu)


def test_every_quantity_has_one_name():
    names = [name for each in QUANTITIES.values() for name in (each.name, *each.aliases)]
    assert len(names) == len(set(names))


def test_units_in_and_out():
    assert parse_bytes("79.2 GiB") == pytest.approx(79.2 * 2**30) and parse_bytes("80GB") == 80e9
    assert parse_seconds("3.1h") == pytest.approx(11160) and parse_count("15.6T") == 15.6e12 and parse_count("4M") == 4e6
    assert show_bytes(85.04e9) == "85.04 GB" and show_bytes(2**30, binary=True) == "1 GiB" and show_seconds(7200) == "2 h"
    assert dtype_bytes("torch.bfloat16") == 2 and dtype_bytes("nvfp4") == 0.5
    for text, parse in (("80 Gigs", parse_bytes), ("soon", parse_seconds), ("4 lots", parse_count)):
        with pytest.raises(LedgerError, match=r"unknown unit|is not a"):
            parse(text)
