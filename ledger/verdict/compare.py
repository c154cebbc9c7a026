"""Predicted, measured, difference: a run directory beside what the calculator says of the same job."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..flops.layers import training_flops_per_token
from ..job import Job
from ..memory.life import fullest
from ..plan.config import job_of_config
from ..shapes.count import active_parameters
from ..step.time import StepTime, step_time
from ..units import show_bytes, show_seconds
from .bands import Verdict, verdict
from .run import RunRecord, read_run

_CLOSE = 0.15


@dataclass(frozen=True)
class Row:
    """One figure; `unit` is bytes, s, tokens/s or a share. None is what nobody said."""

    name: str
    predicted: float | None
    measured: float | None
    unit: str

    @property
    def difference(self) -> float | None:
        """Measured over predicted, less 1."""
        return None if not self.predicted or self.measured is None else self.measured / self.predicted - 1


@dataclass(frozen=True)
class Comparison:
    """The rows, what they say of the assumptions, and the verdict on the MFU where one can be given."""

    path: Path
    rows: tuple[Row, ...]
    findings: tuple[str, ...]
    verdict: Verdict | None

    def lines(self) -> list[str]:
        """Return the comparison as text."""
        table = [("figure", "predicted", "measured", "difference")]
        for row in self.rows:
            change = "" if row.difference is None else f"{100 * row.difference:+.2f} %"
            table.append((row.name, _shown(row.predicted, row.unit), _shown(row.measured, row.unit), change))
        wide = [max(len(row[column]) for row in table) for column in range(4)]
        lines = [f"{self.path}: predicted and measured"]
        lines += [f"  {a:<{wide[0]}}  {b:>{wide[1]}}  {c:>{wide[2]}}  {d:>{wide[3]}}".rstrip() for a, b, c, d in table]
        lines += [f"- {text}" for text in self.findings]
        return lines + ([] if self.verdict is None else self.verdict.lines())

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain data."""
        return {
            "run": str(self.path),
            "rows": [{**vars(row), "difference": row.difference} for row in self.rows],
            "findings": list(self.findings),
            "verdict": None
            if self.verdict is None
            else {"standing": self.verdict.standing, "mfu": self.verdict.mfu, "lines": self.verdict.lines()},
        }


def compare_run(folder: str | os.PathLike[str], base: Job | None = None) -> Comparison:
    """Return a run beside its prediction.

    Args:
        base: the shape, cluster and sequence of the job; its layout is read from the run's own config. Without it only what
            the engine predicted itself, the bytes of its states, is compared.

    Raises:
        LedgerError: no run directory, or its config does not fit the cluster.
    """
    run = read_run(folder)
    rows, findings = _states(run)
    if base is None:
        findings.append("give --model and --on for step time, MFU, FLOPs and peak memory beside these")
        step = run.typical("step_s")
        rows.append(Row("step time", None, step, "s"))
        return Comparison(run.path, tuple(rows), tuple(findings), None)
    job = job_of_config(run.config, base, run.ranks)
    time = step_time(job)
    measured = run.typical("step_s")
    tokens = run.typical("tokens")
    rows += _speed(job, time, measured, tokens)
    peak = fullest(job).peak[1].total
    memory = max((float(step["memory_bytes"]) for step in run.settled() if step.get("memory_bytes")), default=None)
    rows.append(Row("device memory", peak, memory, "bytes"))
    findings += _speed_findings(job, time, measured, tokens)
    judged = _judged(job, measured, tokens)
    return Comparison(run.path, tuple(rows), tuple(findings), judged)


def _states(run: RunRecord) -> tuple[list[Row], list[str]]:
    rows, findings = [], []
    for state in run.ledger.get("states", []):
        rows.append(Row(state["state"], state["predicted_bytes"], state["measured_bytes"], "bytes"))
        if state["predicted_bytes"] is None:
            findings.append(f"{state['state']}: the optimizer is not known to the ledger, so its states were not predicted")
        elif state["predicted_bytes"] != state["measured_bytes"]:
            findings.append(
                f"{state['state']} is off by {state['measured_bytes'] - state['predicted_bytes']:+,} bytes: dtype or "
                "placement is not as configured"
            )
    for flow in run.ledger.get("traffic", []):
        name = f"{flow['kind']} of {flow['state']} a step"
        rows.append(Row(name, flow["predicted_bytes"], flow["counted_bytes"], "bytes"))
        if flow["predicted_bytes"] != flow["counted_bytes"]:
            findings.append(
                f"{name}: {flow['counted_calls']} calls counted, {flow['predicted_calls']} predicted: units were gathered or "
                "reduced at other times"
            )
    if not run.ledger:
        findings.append("ledger.json is not there: the run ended before its first step")
    return rows, findings


def _speed(job: Job, time: StepTime, measured: float | None, tokens: float | None) -> list[Row]:
    rows = [Row("step time", time.seconds, measured, "s"), Row("tokens of a step", float(job.tokens), tokens, "tokens")]
    per_token = training_flops_per_token(job.shape, job.seq, attention=job.attention)
    if measured and tokens:
        rate = tokens / measured
        rows.append(Row("tokens a second", time.tokens_s, rate, "tokens/s"))
        rows.append(Row(f"MFU ({job.attention} attention)", time.mfu, rate * per_token / (time.devices * time.peak_flops), "share"))
    else:
        rows.append(Row(f"MFU ({job.attention} attention)", time.mfu, None, "share"))
    return rows


def _speed_findings(job: Job, time: StepTime, measured: float | None, tokens: float | None) -> list[str]:
    """Say which assumption is off, by what the measurement rules out."""
    if measured is None:
        return ["metrics.jsonl has no steps yet"]
    findings = []
    if tokens and abs(tokens / job.tokens - 1) > 0.01:
        findings.append(f"a step has {tokens:,.0f} tokens, not {job.tokens:,}: sequences are shorter or padded, or --seq is off")
    ratio = measured / time.seconds
    if measured < time.lower_bound_s:
        findings.append("the step is shorter than its lower bound: the hardware, the model or the tokens are not what was said")
    elif ratio > 1 + _CLOSE:
        exposed = time.parts.part("exposed")
        text = (
            f"the step takes {ratio:.2f} times as long as predicted; beyond kernels that run slower than the family's constants, look at "
        )
        findings.append(
            text + ("communication that was taken to be hidden" if exposed > 0.1 * time.seconds else "the data loader and the host")
        )
    elif ratio < 1 - _CLOSE:
        findings.append(
            f"the step takes {ratio:.2f} of the predicted time: kernels are better than the family's constants ({time.constants_from})"
        )
    else:
        findings.append(f"step time within {100 * _CLOSE:.0f} % of the prediction")
    return findings


def _judged(job: Job, measured: float | None, tokens: float | None) -> Verdict | None:
    if not measured or not tokens:
        return None
    device = job.cluster.accelerator
    per_token = training_flops_per_token(job.shape, job.seq)
    mfu = tokens / measured * per_token / (job.cluster.devices * device.peak_flops(job.layout.compute))
    return verdict(mfu, device, active_parameters(job.shape), job.cluster.devices)


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "bytes":
        return show_bytes(value) if value >= 1e6 else f"{value:,.0f} B"
    if unit == "s":
        return show_seconds(value)
    return f"{100 * value:.2f} %" if unit == "share" else f"{value:,.0f}"
