"""Predicted, measured, difference: a run directory beside what the calculator and a dry run say of the same job."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..flops.layers import training_flops_per_token
from ..job import Job
from ..memory.life import fullest, tensors_of
from ..plan.config import job_of_config
from ..problems import LedgerError
from ..shapes.count import active_parameters
from ..step.time import StepTime, step_time
from ..units import show_bytes, show_count, show_seconds
from .bands import Verdict, verdict
from .findings import moved_findings, speed_findings
from .run import RunRecord, read_run


@dataclass(frozen=True)
class Row:
    """One figure; `unit` is bytes, s, tokens, tokens/s, FLOP or a share. None is what nobody said."""

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


def compare_run(folder: str | os.PathLike[str], base: Job | None = None, dry: str | os.PathLike[str] | None = None) -> Comparison:
    """Return a run beside its prediction.

    Args:
        base: the shape, cluster and sequence of the job; its layout is read from the run's own config. Without it only what
            the engine predicted itself, the bytes of its states and its traffic, is compared.
        dry: a file of `stateroom dryrun --json` of the same script, for the peak of tensors.

    Raises:
        LedgerError: no run directory, no such file, or the config does not fit the cluster.
    """
    run = read_run(folder)
    rows, findings = _states(run)
    if dry is not None:
        rows += _dry_rows(Path(dry), run)
    if base is None:
        findings.append("give --model and --on for step time, MFU, FLOPs and peak memory beside these")
        rows += [Row("step time", None, run.typical("step_s"), "s"), Row("exposed communication", None, run.typical("exposed_s"), "s")]
        return Comparison(run.path, tuple(rows), tuple(findings), None)
    job = job_of_config(run.config, base, run.ranks)
    time = step_time(job)
    rows += [*_speed(job, time, run), *_parts(time, run), *_memory(job, run)]
    findings += speed_findings(job, time, run)
    return Comparison(run.path, tuple(rows), tuple(findings), _judged(job, run))


def _states(run: RunRecord) -> tuple[list[Row], list[str]]:
    rows = [Row(state["state"], state["predicted_bytes"], state["measured_bytes"], "bytes") for state in run.ledger.get("states", [])]
    for flow in run.ledger.get("traffic", []):
        rows.append(Row(f"{flow['kind']} of {flow['state']} a step", flow["predicted_bytes"], flow["counted_bytes"], "bytes"))
    return rows, moved_findings(run)


def _dry_rows(path: Path, run: RunRecord) -> list[Row]:
    try:
        found = json.loads(path.read_text())
        peak = float(found["memory"]["peak_bytes"])
        moved = {f"{flow['kind']} of {flow['state']} a step": float(flow["counted_bytes"]) for flow in found["traffic"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LedgerError(f"{path} is no file of `stateroom dryrun --json`: {error}") from None
    counted = {f"{flow['kind']} of {flow['state']} a step": flow["counted_bytes"] for flow in run.ledger.get("traffic", [])}
    rows = [Row(f"{name}, dry run", size, counted.get(name), "bytes") for name, size in moved.items()]
    return [*rows, Row("peak of tensors, dry run", peak, _grown(run), "bytes")]


def _speed(job: Job, time: StepTime, run: RunRecord) -> list[Row]:
    seconds, tokens = run.typical("step_s"), run.typical("tokens")
    rows = [Row("step time", time.seconds, seconds, "s"), Row("tokens of a step", float(job.tokens), tokens, "tokens")]
    if seconds and tokens:
        rows.append(Row("tokens a second", time.tokens_s, tokens / seconds, "tokens/s"))
    rows.append(Row("FLOPs of a step", time.flops.model.total, run.typical("flops"), "FLOP"))
    mfu = hfu = None
    if seconds and tokens:
        per_token = training_flops_per_token(job.shape, job.seq, attention=job.attention)
        mfu = tokens / seconds * per_token / (time.devices * time.peak_flops)
        hfu = mfu * time.flops.hardware / time.flops.model.total
    rows.append(Row(f"MFU ({job.attention} attention)", time.mfu, mfu, "share"))
    return [*rows, Row("HFU", time.hfu, hfu, "share")]


def _parts(time: StepTime, run: RunRecord) -> list[Row]:
    """The time of a step in the parts that both know."""
    exposed, optimizer = time.parts.part("exposed"), time.parts.part("optimizer")
    return [
        Row("  forward and backward", time.seconds - exposed - optimizer, run.part("forward", "backward"), "s"),
        Row("  exposed communication", exposed, run.part("waiting for"), "s"),
        Row("  optimizer", optimizer, run.part("step"), "s"),
        Row("  outside the engine", 0.0, run.part("outside"), "s"),
    ]


def _memory(job: Job, run: RunRecord) -> list[Row]:
    return [Row("peak of tensors", tensors_of(fullest(job).peak[1]), _grown(run), "bytes")]


def _grown(run: RunRecord) -> float | None:
    """Return what is to be compared with tensors: what the allocator counted, or how far a CPU process has grown since `initialize`."""
    memory = (run.ledger.get("step") or {}).get("memory")
    if memory is None:
        return max((float(step["memory_bytes"]) for step in run.settled() if step.get("memory_bytes")), default=None)
    resident = memory["what"].startswith("resident")
    return float(memory["num_bytes"]) - (float(memory["before_bytes"]) if resident else 0.0)


def _judged(job: Job, run: RunRecord) -> Verdict | None:
    seconds, tokens = run.typical("step_s"), run.typical("tokens")
    if not seconds or not tokens:
        return None
    device = job.cluster.accelerator
    per_token = training_flops_per_token(job.shape, job.seq)
    mfu = tokens / seconds * per_token / (job.cluster.devices * device.peak_flops(job.layout.compute))
    return verdict(mfu, device, active_parameters(job.shape), job.cluster.devices)


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "bytes":
        return show_bytes(value) if value >= 1e6 else f"{value:,.0f} B"
    if unit == "s":
        return show_seconds(value)
    if unit == "FLOP":
        return f"{show_count(value)}FLOP"
    return f"{100 * value:.2f} %" if unit == "share" else f"{value:,.0f}"
