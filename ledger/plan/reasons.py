"""Why this layout: its neighbours one step away along each degree, and what each of them would cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..account import Account
from ..job import Layout, problems
from ..memory.life import peak_bytes
from ..step.time import step_time
from ..units import show_bytes
from .search import TIE, Candidate, Plan, Request


@dataclass(frozen=True)
class Neighbour:
    """A layout one step away.

    Attributes:
        change: what differs, such as "tp 4 -> 8". verdict: "illegal", "too large", "slower", "equal" or "faster".
        why: the constraint or the numbers. slower: relative step time, None where it cannot run.
    """

    change: str
    layout: Layout
    verdict: str
    why: str
    slower: float | None = None


def neighbours(plan: Plan, of: Candidate | None = None) -> list[Neighbour]:
    """Return each neighbour of a candidate (of the best one by default) with the reason why it is not it."""
    chosen = of or plan.best
    return [_judge(plan.request, chosen, change, layout) for change, layout in _steps(plan.request, chosen.layout)]


def _steps(request: Request, layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Yield layouts with one degree doubled or halved, the data-parallel degree making up for it."""
    for name in ("tp", "pp", "cp"):
        for value in (getattr(layout, name) // 2, getattr(layout, name) * 2):
            if value < 1:
                continue
            total = layout.ranks * getattr(layout, name)
            others = layout.ranks // layout.dp // getattr(layout, name) * value
            if total and request.cluster.devices % others == 0:
                dp = request.cluster.devices // others
                yield (
                    f"{name} {getattr(layout, name)} -> {value}",
                    _fit_batch(request, replace(layout, **{name: value, "dp_shard": dp, "dp_replicate": 1})),
                )
    for stage in (layout.zero - 1, layout.zero + 1):
        if 0 <= stage <= 3:
            yield f"zero {layout.zero} -> {stage}", replace(layout, zero=stage)
    for micro in (layout.micro_batch // 2, layout.micro_batch * 2):
        if micro >= 1:
            yield f"micro-batch {layout.micro_batch} -> {micro}", _fit_batch(request, replace(layout, micro_batch=micro))
    for policy in request.recompute:
        if policy != layout.recompute:
            yield f"recompute {layout.recompute} -> {policy}", replace(layout, recompute=policy)
    for chunks in (layout.vp // 2, layout.vp * 2):
        if chunks >= 1 and layout.pp > 1:
            yield f"chunks {layout.vp} -> {chunks}", replace(layout, vp=chunks)
    if request.shape.mixture is not None:
        for ep in (layout.ep // 2, layout.ep * 2):
            if ep >= 1:
                yield f"ep {layout.ep} -> {ep}", replace(layout, ep=ep)


def _fit_batch(request: Request, layout: Layout) -> Layout:
    """Return the layout with the accumulation that keeps the batch; 0 where it cannot be kept."""
    each = layout.dp * layout.micro_batch
    accumulation = request.batch // each if request.batch % each == 0 else 0
    chunks = layout.vp if layout.pp > 1 and accumulation % layout.pp == 0 else 1
    return replace(layout, accumulation=accumulation, vp=chunks)


def _judge(request: Request, chosen: Candidate, change: str, layout: Layout) -> Neighbour:
    if layout.accumulation < 1:
        each = layout.dp * layout.micro_batch
        return Neighbour(
            change,
            layout,
            "illegal",
            f"{request.batch:,} sequences of a step do not divide over dp {layout.dp} x {layout.micro_batch} = {each:,}",
        )
    job = request.job(layout)
    wrong = problems(job)
    if wrong:
        return Neighbour(change, layout, "illegal", "; ".join(wrong))
    memory, stage = peak_bytes(job)
    if memory > request.limit:
        over = f"{show_bytes(memory)} on stage {-stage}, {show_bytes(memory - request.limit)} over the limit"
        return Neighbour(change, layout, "too large", over)
    time = step_time(job)
    slower = time.seconds / chosen.seconds - 1
    verdict = "slower" if slower > TIE else "faster" if slower < -TIE else "equal"
    grown = _largest_change(chosen.time.parts, time.parts)
    return Neighbour(change, layout, verdict, f"{100 * slower:+.1f} % step time ({grown}), {show_bytes(memory)}", slower)


def _largest_change(before: Account, after: Account) -> str:
    """Return the two parts that changed most."""
    names = dict.fromkeys([term.name for term in (*before.terms, *after.terms)])
    old, new = ({term.name: term.value for term in each.terms} for each in (before, after))
    changes = sorted(((new.get(name, 0.0) - old.get(name, 0.0), name) for name in names), key=lambda item: -abs(item[0]))
    return ", ".join(f"{name} {100 * change / before.total:+.1f} %" for change, name in changes[:2])
