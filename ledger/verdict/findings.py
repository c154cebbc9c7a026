"""Which assumption of a prediction is off, by what a run's own record rules out."""

from __future__ import annotations

from ..job import Job
from ..step.time import StepTime
from ..units import show_seconds
from .run import RunRecord

_CLOSE = 0.15  # of the predicted time: the model's own error is of this size, docs/ledger_fit.md


def moved_findings(run: RunRecord) -> list[str]:
    """Return what the states and the traffic of a run say against what the engine predicted of them."""
    findings = []
    for state in run.ledger.get("states", []):
        if state["predicted_bytes"] is None:
            findings.append(f"{state['state']}: the optimizer is not known to the ledger, so its states were not predicted")
        elif state["predicted_bytes"] != state["measured_bytes"]:
            findings.append(
                f"{state['state']} is off by {state['measured_bytes'] - state['predicted_bytes']:+,} bytes: dtype or "
                "placement is not as configured"
            )
    for flow in run.ledger.get("traffic", []):
        if flow["predicted_bytes"] != flow["counted_bytes"]:
            findings.append(
                f"{flow['kind']} of {flow['state']} a step: {flow['counted_calls']} calls counted, {flow['predicted_calls']} predicted: "
                "units were gathered or reduced at other times"
            )
    memory = (run.ledger.get("step") or {}).get("memory") or {}
    if str(memory.get("what", "")).startswith("resident"):
        findings.append(
            "measured memory is how far a CPU process has grown, libraries' own buffers included; an accelerator counts tensors alone"
        )
    if not run.ledger:
        findings.append("ledger.json is not there: the run ended before its first step")
    return findings


def speed_findings(job: Job, time: StepTime, run: RunRecord) -> list[str]:
    """Return what the time of the steps says against the prediction, and which part of it is off the most."""
    measured, tokens = run.typical("step_s"), run.typical("tokens")
    if measured is None:
        return ["metrics.jsonl has no steps yet"]
    findings = []
    if tokens and abs(tokens / job.tokens - 1) > 0.01:
        findings.append(f"a step has {tokens:,.0f} tokens, not {job.tokens:,}: sequences are shorter or padded, or --seq is off")
    counted = run.typical("flops")
    if counted and abs(counted / time.flops.model.total - 1) > 0.01 and job.attention == "causal":
        findings.append(f"the engine counted {counted / time.flops.model.total:.3f} times the FLOPs: the model is not {job.shape.name}")
    ratio = measured / time.seconds
    if measured < time.lower_bound_s:
        findings.append("the step is shorter than its lower bound: the hardware, the model or the tokens are not what was said")
    elif abs(ratio - 1) <= _CLOSE:
        findings.append(f"step time within {100 * _CLOSE:.0f} % of the prediction")
    elif ratio < 1:
        findings.append(f"the step takes {ratio:.2f} of the predicted time: {_blame(time, run, faster=True)}")
    else:
        findings.append(f"the step takes {ratio:.2f} times as long as predicted: {_blame(time, run, faster=False)}")
    return findings


def _blame(time: StepTime, run: RunRecord, *, faster: bool) -> str:
    """Return the part whose time is furthest off in the direction of the whole, and the assumption behind it."""
    exposed, optimizer = time.parts.part("exposed"), time.parts.part("optimizer")
    waits, update, outside = run.part("waiting for"), run.part("step"), run.part("outside")
    compute = run.part("forward", "backward")
    if compute is None or waits is None or update is None or outside is None:
        if faster:
            return f"kernels are better than the constants ({time.constants_from})"
        hidden = "communication that was taken to be hidden" if exposed > 0.1 * time.seconds else "the data loader and the host"
        return f"the run has no account of its steps; beyond kernels slower than the constants ({time.constants_from}), look at {hidden}"
    predicted = time.seconds - exposed - optimizer
    kernels = "better" if faster else "slower"
    amount = "less" if faster else "more"
    parts = (
        (
            compute - predicted,
            f"kernels are {kernels} than the constants ({time.constants_from})",
            "forward and backward",
            compute,
            predicted,
        ),
        (waits - exposed, f"{amount} communication is exposed: links or overlap are not as assumed", "communication", waits, exposed),
        (update - optimizer, f"memory is {'faster' if faster else 'slower'} than its constant", "the optimizer", update, optimizer),
        (outside, "the data loader or the script's own work, which is predicted as nothing", "outside the engine", outside, 0.0),
    )
    _, why, name, took, said = (min if faster else max)(parts, key=lambda part: part[0])
    return f"most of it is {name}, {show_seconds(took)} where {show_seconds(said)} was predicted: {why}"
