"""A plan as one HTML page that opens without a network: figures, charts as inline SVG, and the tables behind them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..account import Account
from ..show import account_of
from ..units import show_bytes, show_seconds
from .explain import explain
from .reasons import neighbours
from .search import Candidate, Plan
from .svg import bars, points, stacked

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 820px; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; background: #fff; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
svg { width: 100%; height: auto; } figure { margin: 1rem 0; } figcaption, .quiet { color: #5a5a5a; font-size: .9rem; }
table { border-collapse: collapse; font-size: .88rem; display: block; overflow-x: auto; }
th, td { text-align: left; padding: .25rem .7rem .25rem 0; border-bottom: 1px solid #ddd; vertical-align: top; }
td.n { text-align: right; white-space: nowrap; }
.figures { display: flex; flex-wrap: wrap; gap: 1.6rem; margin: 1rem 0; } .figures div b { display: block; font-size: 1.35rem; }
pre { white-space: pre-wrap; font-size: .82rem; background: #f5f5f5; padding: .8rem; overflow-x: auto; }
@media (prefers-color-scheme: dark) {
  body { color: #e6e6e6; background: #161616; } figcaption, .quiet { color: #a8a8a8; }
  th, td { border-color: #3a3a3a; } pre { background: #222; }
}
"""


def page(plan: Plan, notes: Sequence[str] = ()) -> str:
    """Return the report."""
    best = plan.best
    parts = [
        _head(plan),
        *(f'<p class="quiet">{escape(note)}</p>' for note in notes),
        _section("Memory of a device over a step", _memory(plan, best), best.memory.why + "."),
        _section("Where the time of a step goes", _time(best), _lost(best)),
        _section(
            "Traffic of a rank in a step, by axis", _traffic(best), "Time is that of the links alone; what compute hides is not waited for."
        ),
        _section(
            "Layouts: memory against step time",
            _pareto(plan),
            "The line joins layouts for which no other is both faster and smaller; grey dots are others that fit. Point at a "
            "dot for its degrees.",
        ),
        f"<h2>The layouts</h2>{_layouts(plan)}",
        f"<h2>Neighbours of the chosen layout</h2>{_neighbours(plan)}",
        f"<h2>Derivation</h2><pre>{escape(chr(10).join(explain(plan)))}</pre>",
        f"<h2>The whole account</h2><pre>{escape(chr(10).join(account_of(best.job).lines()))}</pre>",
    ]
    title = f"{plan.request.shape.name} on {plan.request.cluster}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _head(plan: Plan) -> str:
    best, request = plan.best, plan.request
    figures = (
        (show_seconds(best.seconds), "a step"), (f"{100 * best.mfu:.1f} %", f"MFU, {request.attention} attention"),
        (show_bytes(best.memory_bytes), f"of {show_bytes(request.limit)} a device"), (f"{best.time.tokens_s:,.0f}", "tokens a second"),
    )  # fmt: skip
    boxes = "".join(f"<div><b>{escape(value)}</b>{escape(text)}</div>" for value, text in figures)
    tokens = request.batch * request.seq
    return (
        f"<h1>{escape(request.shape.name)} on {escape(str(request.cluster))}</h1><p>{escape(best.layout.words())}</p>"
        f'<p class="quiet">{request.seq:,} tokens a sequence, {tokens:,} a step; {plan.tried:,} layouts tried, {plan.full:,} too large, '
        f"{len(plan.candidates):,} fit. Constants: {escape(best.time.constants_from)}.</p>"
        f'<div class="figures">{boxes}</div>'
    )


def _section(title: str, chart: str, caption: str) -> str:
    return f"<h2>{escape(title)}</h2><figure>{chart}<figcaption>{escape(caption)}</figcaption></figure>"


_STATES = (
    "parameters",
    "gradients",
    "master weights",
    "optimizer states",
    "activations",
    "in use for a while",
    "no tensor and fragmentation",
)


def _kinds(at: Account) -> list[float]:
    named = [sum(term.value for term in at.terms if term.name == name) for name in _STATES[:4]]
    activations = at.part("activations")
    rest = sum(term.value for term in at.terms if term.name in ("no tensor", "fragmentation"))
    return [*named, activations, at.total - sum(named) - activations - rest, rest]


def _memory(plan: Plan, best: Candidate) -> str:
    rows = [(name, _kinds(at)) for name, at in best.memory.instants]
    return stacked(rows, _STATES, show_bytes, "memory of a device at each instant of a step", ("limit", plan.request.limit))


def _time(best: Candidate) -> str:
    total = best.seconds
    rows = [(t.name, t.value, f"({100 * t.value / total:.1f} %)", 0 if t.name == "ideal compute" else 1) for t in best.time.parts.terms]
    return bars(rows, show_seconds, "time of a step by part")


def _lost(best: Candidate) -> str:
    terms = sorted(best.time.parts.terms, key=lambda term: -term.value)
    missing = [f"{term.name} {100 * term.value / best.seconds:.1f} %" for term in terms if term.name != "ideal compute"][:4]
    return f"The parts sum to {show_seconds(best.seconds)}. The missing points of MFU go to " + ", ".join(missing) + "."


def _traffic(best: Candidate) -> str:
    if not best.time.flows:
        return "<p>One rank holds everything: nothing travels.</p>"
    axes = list(dict.fromkeys(flow.axis for flow in best.time.flows))
    rows = [
        (
            f"{flow.axis}: {flow.primitive} of {flow.state}"[:42],
            flow.sent_bytes,
            f"in {show_seconds(flow.seconds)}, {flow.crosses}",
            axes.index(flow.axis),
        )
        for flow in best.time.flows
    ]
    return bars(rows, show_bytes, "bytes that a rank sends in a step, by axis")


def _pareto(plan: Plan) -> str:
    shown = [each for each in plan.candidates[1:400]]
    front = plan.pareto()
    rows = [(each.memory_bytes, each.seconds, each.layout.words(), 7) for each in shown]
    rows += [(each.memory_bytes, each.seconds, each.layout.words(), 1) for each in front]
    rows.append((plan.best.memory_bytes, plan.best.seconds, plan.best.layout.words(), 0))
    line = sorted((each.memory_bytes, each.seconds) for each in front)
    return points(
        rows, ("memory of a device", "time of a step"), (show_bytes, show_seconds), "layouts by memory and step time",
        ("chosen", "no other is faster and smaller"), line,
    )  # fmt: skip


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    body = "".join(
        "<tr>" + "".join(f"<td{' class=n' if index in numbers else ''}>{escape(cell)}</td>" for index, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _layouts(plan: Plan) -> str:
    rows = [
        (
            each.layout.words(),
            show_seconds(each.seconds),
            f"{100 * (each.seconds / plan.best.seconds - 1):+.1f} %",
            f"{100 * each.mfu:.1f} %",
            show_bytes(each.memory_bytes),
        )
        for each in plan.candidates[:15]
    ]
    return _table(("layout", "step", "against the chosen", "MFU", "memory"), rows, (1, 2, 3, 4))


def _neighbours(plan: Plan) -> str:
    return _table(("change", "verdict", "why"), [(each.change, each.verdict, each.why) for each in neighbours(plan)])
