"""The tables of a dry run's report, and the same as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..memory.rank import rank_units
from ..units import show_bytes, show_count
from .memory import DEVICE, HOST
from .report import DryRun, StageFigures

Table = Sequence[Sequence[str]]


def stage_dict(own: StageFigures, usable: float | None) -> dict[str, Any]:
    """Return the figures of one rank as plain data."""
    known = own.beside
    return {
        "memory": {
            "instants": [
                {"name": each.name, "operation": each.operation, "states": dict(each.states), "host": dict(each.host), "total": each.total,
                 "calculator": known.instants.get(each.name)} for each in own.instants
            ],
            "peak": own.peak.name, "peak_bytes": own.peak.total, "host_peak_bytes": own.host_peak, "usable_bytes": usable,
        },
        "states": [
            {"tier": tier, "state": state, "bytes": size, "calculator": known.states.get((tier, state))}
            for (tier, state), size in own.rest().items()
        ],
        "traffic": [{**asdict(row), "calculator": known.traffic.get((row.axis, row.kind, row.state))} for row in own.traffic],
        "own_collectives": [dict(zip(("name", "ranks", "calls", "bytes"), row, strict=True)) for row in own.own],
        "flops": {"counted": own.flops, "calculator": known.flops},
    }  # fmt: skip


def report_lines(run: DryRun) -> list[str]:
    """Return the report as text."""
    own = run.own
    where = f", pipeline stage {own.stage} of {len(run.stages)}" if len(run.stages) > 1 else ""
    lines = [
        f"dry run of {run.script}: rank {run.rank:,} of {run.world:,}{where}, ZeRO stage {run.zero}, figures of step {run.steps} "
        f"({run.seconds:.1f} s, {show_bytes(run.host_bytes)} of host memory)",
        "", "bytes at rest on this rank", *aligned(_rest_table(own)), "", "bytes over a step", *aligned(_course_table(own)),
        _peak_line(own, run.usable_bytes),
    ]  # fmt: skip
    if len(run.stages) > 1:
        lines += ["", "pipeline stages: one rank of each", *aligned(_stage_table(run.stages))]
    lines += ["", "rank classes: ranks that hold the same at rest", *aligned(_class_table(run.stages))]
    lines += ["", "collectives and messages of a step: payload is the whole buffer", *aligned(_traffic_table(own))]
    lines += ["", _flops_line(own)]
    if own.beside.why:
        lines.append(f"- no calculator beside it: {own.beside.why}")
    return [*lines, *(f"- {note}" for note in run.notes)]


def _rest_table(own: StageFigures) -> Table:
    table: list[Sequence[str]] = [("state", "tier", "dry run", "calculator", "difference")]
    rest, known = own.rest(), own.beside.states
    tiers = dict.fromkeys(tier for tier, _ in rest)
    for tier in tiers:
        here = {state: size for (where, state), size in rest.items() if where == tier}
        table += [(state, tier, f"{size:,}", *_beside(size, known.get((tier, state)))) for state, size in here.items()]
        both = [(size, known[tier, state]) for state, size in here.items() if (tier, state) in known]
        if both:
            ours, theirs = sum(a for a, _ in both), sum(b for _, b in both)
            table.append(("sum of what both know", tier, f"{ours:,}", *_beside(ours, theirs)))
        table.append(("sum", tier, f"{sum(here.values()):,}", "", ""))
    return table


def _course_table(own: StageFigures) -> Table:
    table: list[Sequence[str]] = [("state", *(each.name for each in own.instants))]
    for state in (state for state in own.instants[0].states if any(each.states.get(state) for each in own.instants)):
        table.append((state, *(f"{each.states.get(state, 0):,}" for each in own.instants)))
    hosts = dict.fromkeys(state for each in own.instants for state, size in each.host.items() if size)
    is_one = own.instants[0].is_one
    in_host = [(f"{state} in host memory", *(f"{each.host.get(state, 0):,}" for each in own.instants)) for state in hosts]
    table += in_host if is_one else []
    table.append(("sum", *(f"{each.total:,}" for each in own.instants)))
    known = dict(own.beside.instants)
    if is_one:  # one memory: what rests in host memory is in the sum
        near = sum(size for (tier, _), size in own.beside.states.items() if tier == HOST)
        known = {name: size + near for name, size in known.items()}
    if known:
        table.append(("calculator", *(f"{known.get(each.name, 0):,.0f}" for each in own.instants)))
        changes = [each.total / known[each.name] - 1 if known.get(each.name) else None for each in own.instants]
        table.append(("difference", *("" if change is None else f"{100 * change:+.1f} %" for change in changes)))
    if in_host and not is_one:
        table += [*in_host, ("sum in host memory", *(f"{each.host_total:,}" for each in own.instants))]
    return table


def _peak_line(own: StageFigures, limit: float | None) -> str:
    at = own.peak
    after = f", after {at.operation}" if at.operation else ""
    sizes = [*at.states.items(), *((f"{state} in host memory", size) for state, size in at.host.items() if at.is_one)]
    largest = sorted(sizes, key=lambda item: -item[1])[:3]
    shares = ", ".join(f"{state} {100 * size / at.total:.0f} %" for state, size in largest)
    text = f"  the peak is {at.name}{after}: {show_bytes(at.total)} of tensors; {shares}"
    if limit is not None:
        text += f"; {100 * at.total / limit:.0f} % of the {show_bytes(limit)} that a process can allocate"
    if own.host_peak and not at.is_one:
        text += f"; in host memory at most {show_bytes(own.host_peak)} for each rank"
    return text


def _stage_table(stages: Sequence[StageFigures]) -> Table:
    table: list[Sequence[str]] = [
        ("stage", "rank", "layers", "states at rest", "end of forward", "peak", "calculator: peak", "difference", "sent to stages", "FLOPs")
    ]
    for each in stages:
        states = sum(size for (tier, state), size in each.rest().items() if tier == DEVICE and (tier, state) in _STATES)
        forward = next((at.total for at in each.instants if at.name == "end of forward"), 0)
        known = max(each.beside.instants.values(), default=None)
        beside = ("", "") if not known else (f"{known:,.0f}", f"{100 * (each.peak.total / known - 1):+.1f} %")
        sent = sum(row.counted_bytes for row in each.traffic if row.kind == "send")
        job = each.beside.job
        layers = "" if job is None else f"{sum(unit.count for unit in rank_units(job, each.stage) if not unit.is_root):,}"
        table.append(
            (f"{each.stage}", f"{each.rank:,}", layers, f"{states:,}", f"{forward:,}", f"{each.peak.total:,}", *beside, f"{sent:,}",
             f"{show_count(each.flops)}FLOP")
        )  # fmt: skip
    return table


_STATES = {(DEVICE, state) for state in ("parameters", "gradients", "master weights", "optimizer states")}


def _class_table(stages: Sequence[StageFigures]) -> Table:
    names = list(dict.fromkeys(key for stage in stages for each in stage.classes for key in each.states))
    heads = [state if tier == DEVICE else f"{state} ({tier})" for tier, state in names]
    table: list[Sequence[str]] = [("ranks", "how many", *(("stage",) if len(stages) > 1 else ()), *heads, "sum on the device", "peak")]
    for stage in stages:
        own = sum(size for (tier, state), size in stage.rest().items() if (tier, state) in _STATES)
        for each in stage.classes:
            found = (each.states.get(name, 0) for name in names)
            sizes = ("not known" if size is None else f"{size:,}" for size in found)
            at = (f"{each.stage}",) if len(stages) > 1 else ()
            total = each.total()
            table.append((each.words(), f"{each.count:,}", *at, *sizes, f"{total:,}", f"{stage.peak.total - own + total:,}"))
    return table


def _traffic_table(own: StageFigures) -> Table:
    table: list[Sequence[str]] = [("axis", "collective", "state", "calls", "bytes", "calculator: calls", "bytes", "difference")]
    for row in own.traffic:
        known = own.beside.traffic.get((row.axis, row.kind, row.state))
        calls = "" if known is None else f"{known[0]:,}"
        beside = _beside(row.counted_bytes, None if known is None else known[1])
        table.append((row.axis, row.kind, row.state, f"{row.counted_calls:,}", f"{row.counted_bytes:,}", calls, *beside))
    for name, ranks, calls_made, size in own.own:
        table.append((f"{ranks:,} ranks", name, "the script's own", f"{calls_made:,}", f"{size:,}", "", "", ""))
    if len(table) == 1:
        table.append(("none", "", "", "0", "0", "", "", ""))
    return table


def _flops_line(own: StageFigures) -> str:
    line = f"FLOPs of this rank in a step: {show_count(own.flops)}FLOP counted on matrix products and attention (all pairs)"
    known = own.beside.flops
    if known:
        line += f"; calculator {show_count(known)}FLOP ({100 * (own.flops / known - 1):+.2f} %)"
    return line


def _beside(found: float, known: float | None) -> tuple[str, str]:
    return ("", "") if known is None else (f"{known:,.0f}", f"{found - round(known):+,}")


def aligned(table: Table) -> list[str]:
    """Return rows as text, words to the left and numbers to the right."""
    wide = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    words = [
        not any(row[column][:1] in "+-0123456789" and row[column][:1] for row in table[1:]) or column == 0 for column in range(len(wide))
    ]
    return [
        "  "
        + "  ".join(f"{cell:<{size}}" if left else f"{cell:>{size}}" for cell, size, left in zip(row, wide, words, strict=True)).rstrip()
        for row in table
    ]
