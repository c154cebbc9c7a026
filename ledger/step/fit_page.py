"""The text of docs/ledger_fit.md: the constants, how they were found, and what they miss by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from .constants import Constants

if TYPE_CHECKING:
    from .fit import Residual

_TEXT = """# The step-time constants, their fit and what they miss by

This page is printed by `python -m stateroom.ledger.step.fit`; `--refit` searches the constants anew.

`stateroom ledger` and `stateroom plan` predict the time of a step from the job's sizes and a few shares of published rates: how
much of the peak large matrix products reach, how much of the memory bandwidth the rest does, and so on. There is **one set for each
family of accelerators, never one for a run**. The search minimises the mean squared log error of tokens a second over the runs
marked "fit"; the others were kept out and are only judged. Constants that too few runs tell apart are not searched: they keep the
value of a published kernel or collective (attention: FlashAttention 2 and 3; collectives: nccl-tests; experts: grouped products).

{constants}

## How far off

| runs | number | median | 90th percentile | worst |
|---|---|---|---|---|
{summary}

Error is predicted over measured tokens a second, less 1; MFU has the same relative error. MFU is the ledger's own count (causal
attention, no recomputation, the dtype's dense peak), so it differs from what some sources print; the table says so where it does.

## Run by run

| run | devices | layout | measured tokens/s/device | predicted | error | measured MFU | use | taken where the source is silent |
|---|---|---|---|---|---|---|---|---|
{rows}

Sources: {sources}.

## What the model does not know

- Software. Eager kernels, compiled ones and hand-fused ones run on the same constants: torchtitan's and fms-fsdp's runs come out too
  fast by up to a third, NeMo's and Megatron's too slow by up to a sixth.
- Power and clocks: an H100 held at 500 W counts as one at 700 W.
- Topology: rails and oversubscription of a network are one share of its bandwidth.
- Experts: routing is taken to be even, and dispatch to have half of its time beside compute.
- Where a family has no published run in the fit, the nearest one's constants are borrowed and every account says so.
"""


def text(found: Sequence[Residual], constants: Mapping[str, Constants], searched: Mapping[str, Sequence[str]]) -> str:
    """Return the page."""
    return _TEXT.format(
        constants=_constants(constants, searched), summary=_summary(found), rows="\n".join(_row(each) for each in found),
        sources="; ".join(dict.fromkeys(each.run.source for each in found)),
    ).rstrip("\n")  # fmt: skip


def _constants(constants: Mapping[str, Constants], searched: Mapping[str, Sequence[str]]) -> str:
    names = [item.name for item in fields(Constants)]
    lines = [f"| family | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for family, known in constants.items():
        cells = [f"**{getattr(known, name):g}**" if name in searched[family] else f"{getattr(known, name):g}" for name in names]
        lines.append(f"| {family} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", "Bold: searched. The rest: taken."])


def _summary(found: Sequence[Residual]) -> str:
    from .fit import quantile

    groups = [
        ("all", list(found)),
        ("of the fit", [r for r in found if r.run.fitted]),
        ("kept out", [r for r in found if not r.run.fitted]),
    ]
    families = sorted({r.run.job().cluster.accelerator.family for r in found})
    groups += [(family, [r for r in found if r.run.job().cluster.accelerator.family == family]) for family in families]
    lines = []
    for name, group in groups:
        errors = [abs(each.error) for each in group]
        shown = " | ".join(f"{100 * value:.1f} %" for value in (quantile(errors, 0.5), quantile(errors, 0.9), max(errors)))
        lines.append(f"| {name} | {len(group)} | {shown} |")
    return "\n".join(lines)


def _row(each: Residual) -> str:
    job = each.run.job()
    predicted = each.predicted.tokens_s / each.predicted.devices
    cells = (
        each.run.name, f"{job.cluster.devices:,} {job.cluster.accelerator.name}", job.layout.words(), f"{each.run.device_tokens_s:,.1f}",
        f"{predicted:,.1f}", f"{100 * each.error:+.1f} %", f"{100 * each.measured_mfu:.1f} %", "fit" if each.run.fitted else "kept out",
        each.run.assumed,
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"
