"""The derivation of a plan in words and numbers: tensor, then pipeline, then data, then context parallelism."""

from __future__ import annotations

from dataclasses import replace

from ..comm.axes import flows
from ..flops.layers import training_flops_per_token
from ..job import Layout
from ..memory.life import peak_bytes
from ..memory.states import zero_states
from ..pipeline.formulas import bubble_share
from ..shapes.count import count_parameters
from ..step.time import step_time
from ..units import show_bytes, show_count, show_seconds
from .reasons import neighbours
from .search import Plan


def explain(plan: Plan) -> list[str]:
    """Return the derivation, line by line."""
    return [*_start(plan), *_tensor(plan), *_pipeline(plan), *_data(plan), *_context(plan), *_rejected(plan)]


def _start(plan: Plan) -> list[str]:
    request = plan.request
    params = count_parameters(request.shape).total
    states = zero_states(params, 1, 0, request.base.sizes)
    flops = training_flops_per_token(request.shape, request.seq, attention=request.attention)
    tokens = request.batch * request.seq
    return [
        f"{request.shape.name}: {params:,.0f} parameters, {show_bytes(states.total)} of states at {request.base.sizes.total:g} bytes each; "
        f"{show_count(flops)}FLOP a token ({request.attention} attention)",
        f"{request.cluster}: {show_bytes(request.limit)} may be used of each; {tokens:,} tokens a step are "
        f"{tokens / request.cluster.devices:,.0f} a device",
        f"without any model parallelism ZeRO 3 would leave "
        f"{show_bytes(zero_states(params, request.cluster.devices, 3, request.base.sizes).total)} of states "
        f"on a device, and a step of {request.batch:,} sequences has work for at most {request.batch:,} data-parallel ranks",
    ]


def _with(plan: Plan, **degrees: int) -> tuple[Layout, float, float] | None:
    """Return the best layout found with these degrees, its memory and its time."""
    found = plan.find(**degrees)
    return None if found is None else (found.layout, found.memory_bytes, found.seconds)


def _compare(plan: Plan, name: str, values: list[int]) -> list[str]:
    best = plan.best
    lines = []
    for value in values:
        found = _with(plan, **{name: value})
        mark = "  <- chosen" if value == getattr(best.layout, name) else ""
        if found is None:
            lines.append(f"    {name} {value}: no layout fits or is legal{mark}")
            continue
        layout, memory, seconds = found
        lines.append(
            f"    {name} {value}: {100 * (seconds / best.seconds - 1):+.1f} % step time, {show_bytes(memory)}: {layout.words()}{mark}"
        )
    return lines


def _doublings(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def _tensor(plan: Plan) -> list[str]:
    best, request = plan.best, plan.request
    time = best.time
    share = sum(flow.seconds for flow in time.flows if flow.axis == "tp")
    lines = [
        f"1. TP {best.layout.tp}: a matrix is shared only inside the {request.cluster.domain} devices that fast links join "
        f"({show_bytes(request.cluster.link_bytes_s)}/s each, against {show_bytes(request.cluster.network_bytes_s)}/s of network)."
    ]
    if best.layout.tp > 1:
        sent = sum(flow.sent_bytes for flow in time.flows if flow.axis == "tp")
        lines.append(
            f"   It sends {show_bytes(sent)} a step and rank, {show_seconds(share)} on the links, of which "
            f"{show_seconds(time.parts.part('exposed tp'))} nothing hides."
        )
    return [*lines, *_compare(plan, "tp", _doublings(min(request.cluster.domain, 64)))]


def _pipeline(plan: Plan) -> list[str]:
    layout = plan.best.layout
    lines = [f"2. PP {layout.pp}: stages cut states and need little traffic, but idle while the pipeline fills."]
    if layout.pp > 1:
        share = bubble_share(layout.pp, layout.accumulation, interleave=layout.vp)
        lines.append(
            f"   {layout.accumulation} micro-batches in {layout.vp} chunks: the bubble is (p - 1)/(v m) = {100 * share:.1f} "
            "% of ideal compute."
        )
    return [*lines, *_compare(plan, "pp", _doublings(min(64, plan.request.shape.layers)))]


def _data(plan: Plan) -> list[str]:
    best = plan.best
    layout, time = best.layout, best.time
    moved = [flow for flow in time.flows if flow.axis.startswith("dp")]
    lines = [
        f"3. DP {layout.dp}: what is left of the devices, each rank with {layout.micro_batch} x {layout.accumulation} "
        f"sequences; ZeRO {layout.zero}."
    ]
    if moved:
        lines.append(
            f"   It sends {show_bytes(sum(flow.sent_bytes for flow in moved))} a step and rank, "
            f"{show_seconds(sum(flow.seconds for flow in moved))} on its links, "
            f"{show_seconds(time.parts.part('exposed dp'))} of them exposed."
        )
    for stage in (1, 2, 3):
        job = plan.request.job(replace(layout, zero=stage))
        memory, _ = peak_bytes(job)
        seconds = step_time(job).seconds
        fits = "" if memory <= plan.request.limit else ", does not fit"
        mark = "  <- chosen" if stage == layout.zero else ""
        lines.append(f"    ZeRO {stage}: {100 * (seconds / best.seconds - 1):+.1f} % step time, {show_bytes(memory)}{fits}{mark}")
    return lines


def _context(plan: Plan) -> list[str]:
    layout = plan.best.layout
    tokens = plan.request.seq // layout.cp
    lines = [
        f"4. CP {layout.cp}: only where a sequence is too long for one rank, or the batch has too few of them; a rank has "
        f"{tokens:,} tokens."
    ]
    if layout.cp > 1:
        moved = [flow for flow in flows(plan.best.job) if flow.axis == "cp"]
        lines.append(f"   Keys and values take {show_bytes(sum(flow.sent_bytes for flow in moved))} a step and rank.")
    return [*lines, *_compare(plan, "cp", _doublings(max(2, min(16, plan.request.seq // 4096))))]


def _rejected(plan: Plan) -> list[str]:
    lines = ["Neighbours of the chosen layout, one step away:"]
    lines += [f"    {each.change}: {each.verdict}: {each.why}" for each in neighbours(plan)]
    return lines
