"""The whole account of a job, as text and as plain data: memory, FLOPs, traffic, bubble, time, recovery and cost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .account import Account
from .comm.axes import Flow
from .flops.layers import forward_flops
from .goodput.job import Recovery, cost_of, recovery_of
from .job import Job
from .memory.life import Course, fullest
from .memory.rank import rank_states
from .pipeline.formulas import bubble_share, bubble_time, schedule_named
from .shapes.count import count_parameters
from .step.time import StepTime, step_time
from .units import show_bytes, show_count, show_seconds

SECTIONS = ("model", "memory", "flops", "traffic", "bubble", "time", "recovery", "cost")


@dataclass(frozen=True)
class JobAccount:
    """Everything the calculator says about a job; build it with `account_of`."""

    job: Job
    parameters: Account
    active: float
    memory: Course
    elsewhere: dict[str, Account]
    forward: Account
    time: StepTime
    recovery: Recovery
    cost: Account | None
    notes: tuple[str, ...] = field(default_factory=tuple)

    def to_dict(self, sections: Sequence[str] = SECTIONS) -> dict[str, Any]:
        """Return the sections as plain data; bytes, seconds and FLOPs without prefixes."""
        whole = {
            "model": {"shape": self.job.shape.to_dict(), "parameters": self.parameters.to_dict(), "active_parameters": self.active},
            "memory": self._memory_dict(),
            "flops": {
                "forward": self.forward.to_dict(), "model_flops_of_a_step": self.time.flops.model.total,
                "recomputed_of_a_step": self.time.flops.recompute.total, "per_token": 3 * self.forward.total / self.job.seq,
            },
            "traffic": [asdict(flow) for flow in self.time.flows],
            "bubble": self._bubble_dict(),
            "time": {
                "parts": self.time.parts.to_dict(), "lower_bound_s": self.time.lower_bound_s, "mfu": self.time.mfu, "hfu": self.time.hfu,
                "mfu_denominator": f"{self.time.peak_flops:.4g} FLOP/s {self.job.layout.compute}, dense",
                 "tokens_per_s": self.time.tokens_s,
            },
            "recovery": self._recovery_dict(),
            "cost": None if self.cost is None else self.cost.to_dict(),
        }  # fmt: skip
        head = {
            "cluster": str(self.job.cluster),
            "layout": self.job.layout.to_dict(),
            "seq": self.job.seq,
            "tokens_per_step": self.job.tokens,
        }
        return {**head, **{name: whole[name] for name in sections}, "notes": list(self.notes)}

    def to_json(self, sections: Sequence[str] = SECTIONS) -> str:
        """Return to_dict() as JSON."""
        return json.dumps(self.to_dict(sections), indent=2)

    def lines(self, sections: Sequence[str] = SECTIONS, *, binary: bool = False) -> list[str]:
        """Return the sections as text; sizes in GB, or in GiB with `binary`."""
        parts = {
            "model": self._model_lines, "memory": lambda: self._memory_lines(binary), "flops": self._flops_lines,
            "traffic": self._traffic_lines, "bubble": self._bubble_lines, "time": self._time_lines,
            "recovery": self._recovery_lines, "cost": self._cost_lines,
        }  # fmt: skip
        text = [
            f"{self.job.shape.name} on {self.job.cluster}",
            f"  {self.job.layout.words()}; {self.job.seq:,} tokens a sequence, {self.job.tokens:,} a step",
        ]
        for name in sections:
            text += ["", *parts[name]()]
        return [*text, *(f"note: {note}" for note in self.notes)]

    def _model_lines(self) -> list[str]:
        lines = self.parameters.lines()
        return [*lines, f"  active for one token: {self.active:,.0f}"] if self.active != self.parameters.total else lines

    def _memory_dict(self) -> dict[str, Any]:
        instants = {name: at.to_dict() for name, at in self.memory.instants}
        usable = self.job.cluster.accelerator.usable_bytes
        found = {"stage": self.memory.stage, "peak": self.memory.peak[0], "peak_bytes": self.memory.peak[1].total, "usable_bytes": usable}
        return {
            **found,
            "why": self.memory.why,
            "instants": instants,
            "elsewhere": {tier: rows.to_dict() for tier, rows in self.elsewhere.items()},
        }

    def _memory_lines(self, binary: bool) -> list[str]:
        at = self.memory.peak[1]
        usable = self.job.cluster.accelerator.usable_bytes
        over = f"{100 * at.total / usable:.0f} % of the {show_bytes(usable, binary=binary)} that a process can allocate"
        course = " -> ".join(f"{each} {show_bytes(sums.total, binary=binary)}" for each, sums in self.memory.instants)
        lines = [
            f"memory of a device, the fullest stage ({self.memory.stage}): {show_bytes(at.total, binary=binary)}, {over}",
            f"  over a step: {course}",
        ]
        lines += [f"  {self.memory.why}", *at.lines()]
        for tier, rows in self.elsewhere.items():
            lines += rows.lines() if tier != "device" else []
        return lines

    def _flops_lines(self) -> list[str]:
        per_token = 3 * self.forward.total / self.job.seq
        return [
            *self.forward.lines(),
            f"  training: {show_count(per_token)}FLOP a token, {show_count(3 * self.forward.total)}FLOP a sequence, "
            f"{show_count(self.time.flops.model.total)}FLOP a step; recomputed: {show_count(self.time.flops.recompute.total)}FLOP a step",
        ]

    def _traffic_lines(self) -> list[str]:
        rows = [_flow_row(flow) for flow in self.time.flows]
        if not rows:
            return ["traffic: none, one rank holds everything"]
        heads = ("axis", "primitive", "state", "calls", "payload of a call", "sent by a rank", "time", "over", "can hide behind")
        table = [heads, *rows]
        wide = [max(len(row[column]) for row in table) for column in range(len(heads))]
        lines = ["traffic of a rank in a step" + (", of a stage like most" if self.job.layout.pp > 1 else "")]
        lines += ["  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, wide, strict=True)).rstrip() for row in table]
        sent = sum(flow.sent_bytes for flow in self.time.flows)
        return [
            *lines,
            f"  sum: {show_bytes(sent)} sent or moved, {show_seconds(sum(flow.seconds for flow in self.time.flows))} if nothing overlapped",
        ]

    def _bubble_dict(self) -> dict[str, Any]:
        layout = self.job.layout
        ideal, total = (
            bubble_share(layout.pp, layout.accumulation, interleave=layout.vp, schedule=layout.schedule, over=over)
            for over in ("ideal", "total")
        )
        return {"schedule": layout.schedule, "stages": layout.pp, "chunks": layout.parts // layout.pp, "microbatches": layout.accumulation,
                "over_ideal": ideal, "over_total": total, "units": bubble_time(layout.schedule, layout.pp, 1, 1, 1, interleave=layout.vp),
                "source": schedule_named(layout.schedule).source}  # fmt: skip

    def _bubble_lines(self) -> list[str]:
        found = self._bubble_dict()
        if self.job.layout.pp == 1:
            return ["bubble: none, one stage"]
        return [
            f"bubble of {found['schedule']}: {found['stages']} stages, {found['microbatches']} micro-batches, "
            f"{found['chunks']} chunks a stage",
            f"  over ideal time {100 * found['over_ideal']:.2f} %, over total time {100 * found['over_total']:.2f} % ({found['source']})",
        ]

    def _time_lines(self) -> list[str]:
        time = self.time
        return [
            *time.parts.lines(),
            f"  lower bound {show_seconds(time.lower_bound_s)}; {time.tokens_s:,.0f} tokens/s, "
            f"{time.tokens_s / time.devices:,.1f} a device",
            f"  MFU {100 * time.mfu:.1f} %, HFU {100 * time.hfu:.1f} % of {time.peak_flops / 1e12:,.0f} TFLOP/s "
            f"({self.job.layout.compute}, dense)",
        ]

    def _recovery_dict(self) -> dict[str, Any]:
        found = self.recovery
        return {
            "checkpoint": found.checkpoint.to_dict(), "write_s": found.write_s, "stall_s": found.stall_s, "mtbf_s": found.mtbf_s,
            "restart_s": found.restart_s, "young_s": found.young_s, "daly_s": found.daly_s, "optimal_s": found.optimal_s,
            "effective_training_time": found.shares.to_dict(),
        }  # fmt: skip

    def _recovery_lines(self) -> list[str]:
        found = self.recovery
        return [
            *found.checkpoint.lines(),
            f"  written in {show_seconds(found.write_s)}, training stops for {show_seconds(found.stall_s)}; mean time "
            "between interruptions "
            f"{show_seconds(found.mtbf_s)}",
            f"  interval: Young {show_seconds(found.young_s)}, Daly {show_seconds(found.daly_s)}, exact optimum "
            f"{show_seconds(found.optimal_s)}",
            *found.shares.lines(),
        ]

    def _cost_lines(self) -> list[str]:
        return ["cost: give --tokens, the length of the run"] if self.cost is None else self.cost.lines()


def _flow_row(flow: Flow) -> tuple[str, ...]:
    return (
        flow.axis, flow.primitive, flow.state, f"{flow.calls:,.0f}", show_bytes(flow.payload_bytes), show_bytes(flow.sent_bytes),
        show_seconds(flow.seconds), flow.crosses, flow.behind,
    )  # fmt: skip


def account_of(
    job: Job, *, tokens: float | None = None, price: float | None = None, notes: Sequence[str] = (), **recovery: Any
) -> JobAccount:
    """Return the account of a checked job.

    Args:
        tokens: of the whole run, for the cost. price: USD a device-hour.
        recovery: see `goodput.job.recovery_of`.
    """
    time = step_time(job)
    memory = fullest(job)
    found = recovery_of(job, **recovery)
    cost = None if tokens is None else cost_of(job, time.seconds, tokens, found.goodput, price)
    elsewhere = {tier: rows for tier, rows in rank_states(job, memory.stage).items() if tier != "device"}
    parameters = count_parameters(job.shape)
    active = count_parameters(job.shape, active=True).total
    return JobAccount(
        job,
        parameters,
        active,
        memory,
        elsewhere,
        forward_flops(job.shape, job.seq, attention=job.attention),
        time,
        found,
        cost,
        tuple(notes),
    )
