"""A schedule over time, as text and as SVG: one row a stage, from the instruction lists that run."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..ledger.pipeline import Instruction, Simulation
from .schedules import Schedule

_NAMES = {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights"}
# hues that stay apart for colour-blind readers (Okabe and Ito); later chunks are paler
_COLOURS = {"F": "#0072b2", "B": "#e69f00", "I": "#cc79a7", "W": "#009e73"}
_CELL = 4  # characters of the shortest instruction


def as_text(plan: Schedule, ran: Simulation) -> str:
    """Return the timeline in characters: F3 is the forward of micro-batch 3; letters of a stage's second chunk are small."""
    unit = min(end - start for row in ran.spans for start, end, _ in row)
    lines = []
    for stage, row in enumerate(ran.spans):
        text = ""
        for start, end, each in row:
            text = text.ljust(_column(start, unit), ".")
            text += _word(each)[: _column(end, unit) - _column(start, unit)].ljust(_column(end, unit) - _column(start, unit), " ")
        lines.append(f"stage {stage:>2} |{text.ljust(_column(ran.seconds, unit), '.')}|")
    return "\n".join([*lines, "", *summary(plan, ran)])


def _column(at: float, unit: float) -> int:
    return round(at / unit * _CELL)


def _word(each: Instruction) -> str:
    return f"{each.kind if each.chunk % 2 == 0 else each.kind.lower()}{each.microbatch}"


def summary(plan: Schedule, ran: Simulation) -> list[str]:
    """Return lines with the bubble and what each stage holds."""
    chunks = f", {plan.chunks} chunks a stage" if plan.chunks > 1 else ""
    held = plan.activations()
    each = "micro-batches of one chunk" if plan.chunks > 1 else "micro-batches"
    idle = ", ".join(f"{100 * (1 - busy / ran.seconds):.1f} %" for busy in ran.busy)
    return [
        f"{plan.name}: {plan.stages} stages{chunks}, {plan.micro_batches} micro-batches",
        f"bubble: {100 * ran.share('total'):.1f} % of the time ({100 * ran.share('ideal'):.1f} % of the work); idle by stage: {idle}",
        f"most activations held at once, in {each}: {', '.join(map(str, held))}",
    ]


def as_svg(plan: Schedule, ran: Simulation, width: int = 960) -> str:
    """Return the timeline as an SVG document that needs nothing else to be shown."""
    left, top, thick, gap = 64, 30, 26, 6
    scale = (width - left - 8) / ran.seconds
    body = [f'<text x="{left}" y="18" font-size="13">{escape(summary(plan, ran)[0])}; bubble {100 * ran.share("total"):.1f} %</text>']
    for stage, row in enumerate(ran.spans):
        y = top + stage * (thick + gap)
        body.append(f'<text x="4" y="{y + 17}" font-size="12">stage {stage}</text>')
        body.append(f'<rect x="{left}" y="{y}" width="{ran.seconds * scale:.1f}" height="{thick}" fill="#eeeeee"/>')
        for start, end, each in row:
            body.append(_bar(left + start * scale, y, (end - start) * scale, thick, each))
    bottom = top + plan.stages * (thick + gap)
    return "\n".join(
        [_open(width, bottom + 30), *body, *_legend(left, bottom + 16, {e.kind for row in plan.rows for e in row}), "</svg>", ""]
    )


def _open(width: int, height: int) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" aria-label="pipeline schedule" '
        'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif">'
    )


def _bar(x: float, y: float, width: float, height: float, each: Instruction) -> str:
    title = f"{_NAMES[each.kind]} of micro-batch {each.microbatch}, chunk {each.chunk}"
    opacity = 1.0 if each.chunk == 0 else 0.6
    place = f'x="{x:.1f}" y="{y}" width="{max(width - 1, 0.5):.1f}" height="{height}"'
    shape = f'<rect {place} fill="{_COLOURS[each.kind]}" fill-opacity="{opacity}">'
    label = ""
    if width > 14:
        label = f'<text x="{x + width / 2:.1f}" y="{y + 17}" font-size="11" text-anchor="middle" fill="#ffffff">{each.microbatch}</text>'
    return f"{shape}<title>{escape(title)}</title></rect>{label}"


def _legend(x: float, y: float, kinds: Sequence[str] | set[str]) -> list[str]:
    found = []
    for kind in sorted(kinds):
        found.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{_COLOURS[kind]}"/>')
        found.append(f'<text x="{x + 14}" y="{y}" font-size="12">{_NAMES[kind]}</text>')
        x += 30 + 7 * len(_NAMES[kind])
    return found
