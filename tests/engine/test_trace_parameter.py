"""engine.trace_parameter: where a parameter's parts lie, what happens to it in a step, and which checkpoint files hold it."""

from __future__ import annotations

import json

import pytest
from models import batch, build
from training import cast, config_for

NAME = "blocks.1.up.weight"


def traced(stage, precision, gas, names, save=None):
    import stateroom

    engine, *_ = stateroom.initialize(build("gpt"), config=config_for(stage, precision, gas))
    before = engine.trace_parameter(names[0], show=False)
    for step in range(2):
        for micro in range(gas):
            engine.backward(engine(*cast(batch("gpt", step, micro, engine.global_rank), precision)))
            engine.step()
    if save:
        engine.save_checkpoint(save)
    traces = [engine.trace_parameter(name, show=False) for name in names]
    engine.destroy()
    return before, traces


def whats(trace):
    return [(event.during, event.what.split(" (")[0]) for event in trace.events]


def test_a_sharded_parameter_is_gathered_freed_reduced_and_updated(pools):
    ranks = pools(2).run(traced, 3, "bf16", 2, [NAME])
    micro = [
        ("forward", "gather starts"),
        ("forward", "whole: gathered"),
        ("forward", "freed: only the shard is left"),
        ("backward", "gather starts"),
        ("backward", "whole: gathered"),
    ]
    for before, (trace,) in ranks:
        assert before.events == () and "no step has ended" in str(before)
        seen = whats(trace)
        assert seen[-1] == ("step", "updated by the optimizer") and trace.step == 2
        assert [each for each in seen if each in micro] == 2 * micro
        for what in ("its last gradient is there", "reduction of its gradient starts", "its gradient is reduced"):
            assert seen.count(("backward", what)) == 2, what
        moments = [event.at_s for event in trace.events]
        assert moments == sorted(moments) and moments[0] > 0


def test_parts_and_bytes_of_all_ranks_make_the_whole(pools):
    for stage in (0, 1, 3):
        found = [trace for _, (trace,) in pools(2).run(traced, stage, "bf16", 1, [NAME])]
        for name, itemsize, is_cut in (("parameter", 2, stage == 3), ("master weight", 4, stage >= 1), ("exp_avg", 4, stage >= 1)):
            sizes = [sum(state.num_bytes for state in trace.states if state.name == name) for trace in found]
            assert sum(sizes) == found[0].numel * itemsize * (1 if is_cut else 2), (stage, name)
        if stage:
            places = found[0].places
            assert places == found[1].places
            assert [place.start for place in places][1:] == [place.stop for place in places][:-1]
            assert (places[0].start, places[-1].stop) == (0, found[0].numel)
        else:
            assert found[0].places == () and "every rank keeps all of it" in str(found[0])


def test_whole_parameters_are_never_gathered_for_use(pools):
    for _, (trace,) in pools(2).run(traced, 1, "fp32", 1, [NAME]):
        assert ("forward", "gather starts") not in whats(trace) and ("step", "gather starts") in whats(trace)
        assert any("the parameter's own bytes" in state.note for state in trace.states)


def test_files_of_the_checkpoint(pools, tmp_path):
    (_, (trace,)), _ = pools(2).run(traced, 3, "bf16", 1, [NAME], str(tmp_path / "saves"))
    assert trace.checkpoint.endswith("global_step2")
    states = {state for state, *_ in trace.files}
    assert {"fp32", "exp_avg", "exp_avg_sq"} <= states
    for state in states:
        assert sum(numel for name, _, numel in trace.files if name == state) == trace.numel
    for _, file, _ in trace.files:
        assert (tmp_path / "saves" / "global_step2").samefile(file.rpartition("/")[0])


def test_tied_and_unknown_names(pools):
    (_, (tied,)), _ = pools(2).run(traced, 3, "fp32", 1, ["head.weight"])
    assert tied.name == "head.weight" and "also called emb.weight" in tied.notes[0] and tied.unit == "root"
    assert json.loads(tied.to_json())["shape"] == list(tied.shape)
    kinds = [kind for kind, _ in pools(2).outcomes(traced, 3, "fp32", 1, ["blocks.1.up.wieght"])]
    assert kinds == ["error", "error"]


def test_the_message_names_the_nearest(pools):
    for _, (kind, text, _) in pools(2).outcomes(traced, 0, "fp32", 1, ["blocks.1.up.wieght"]):
        assert kind == "EngineError" and NAME in text


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank(pools, stage):
    ((_, (trace,)),) = pools(1).run(traced, stage, "fp32", 1, [NAME])
    assert trace.places == () and whats(trace)[-1] == ("step", "updated by the optimizer")
