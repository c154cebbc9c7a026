"""Charts as inline SVG, drawn from plain numbers: stacked bars, one bar of parts, grouped bars, and points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

WIDTH = 760
# eight hues that stay apart for colour-blind readers (Okabe and Ito, with a grey for the rest)
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800", "#8c8c8c")
_TEXT = 'font-family="inherit" font-size="12" fill="currentColor"'


def colour(index: int) -> str:
    """Return the colour of a series; the last one stands for every further one."""
    return COLOURS[min(index, len(COLOURS) - 1)]


def frame(height: float, body: Sequence[str], label: str) -> str:
    """Return an SVG element that scales with the page."""
    inside = "\n".join(body)
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}" xmlns="http://www.w3.org/2000/svg">\n{inside}\n</svg>'


def words(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    """Return a line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" {_TEXT}>{escape(text)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, title: str) -> str:
    """Return a rectangle that says what it is when pointed at."""
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}"'
    return f'<rect {shape} fill="{fill}"><title>{escape(title)}</title></rect>'


def legend(y: float, names: Sequence[str]) -> tuple[list[str], float]:
    """Return the legend of a chart and the height at which it ends."""
    found, x = [], 0.0
    for index, name in enumerate(names):
        wide = 22 + 6.6 * len(name)
        if x + wide > WIDTH:
            x, y = 0.0, y + 18
        found += [box(x, y - 9, 10, 10, colour(index), name), words(x + 14, y, name)]
        x += wide + 8
    return found, y + 14


def stacked(
    bars: Sequence[tuple[str, Sequence[float]]],
    names: Sequence[str],
    show: Callable[[float], str],
    label: str,
    limit: tuple[str, float] | None = None,
) -> str:
    """Return horizontal stacked bars over one scale, with a line at `limit`.

    Args:
        bars: (name, one value for each of `names`).
    """
    left, right, thick = 150, 90, 24
    most = max([sum(values) for _, values in bars] + ([limit[1]] if limit else []) + [1e-30])
    scale = (WIDTH - left - right) / most
    body, y = legend(14, names)
    top = y + 6
    y = top
    for name, values in bars:
        body.append(words(left - 8, y + thick / 2 + 4, name, "end"))
        x = float(left)
        for index, value in enumerate(values):
            body.append(box(x, y, value * scale, thick, colour(index), f"{name}, {names[index]}: {show(value)}"))
            x += value * scale
        body.append(words(WIDTH, y + thick / 2 + 4, show(sum(values)), "end"))
        y += thick + 10
    if limit is not None:
        x = left + limit[1] * scale
        body.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - 4}" y2="{y}" stroke="currentColor" stroke-dasharray="4 3"/>')
        body.append(words(x, y + 14, f"{limit[0]}: {show(limit[1])}", "end"))
        y += 20
    return frame(y + 4, body, label)


def bars(rows: Sequence[tuple[str, float, str, int]], show: Callable[[float], str], label: str) -> str:
    """Return one horizontal bar a row: (name, value, what is written behind it, which colour)."""
    left, thick = 260, 18
    most = max([value for _, value, _, _ in rows] + [1e-30])
    scale = (WIDTH - left - 250) / most
    body, y = [], 4.0
    for name, value, behind, hue in rows:
        body += [words(left - 8, y + 13, name, "end"), box(left, y, value * scale, thick, colour(hue), f"{name}: {show(value)}")]
        body.append(words(left + value * scale + 6, y + 13, f"{show(value)} {behind}".strip()))
        y += thick + 7
    return frame(y + 4, body, label)


def points(
    rows: Sequence[tuple[float, float, str, int]], axes: tuple[str, str], show: tuple[Callable[[float], str], Callable[[float], str]],
        label: str,
    names: Sequence[str], line: Sequence[tuple[float, float]] = (),
) -> str:  # fmt: skip
    """Return a scatter of (x, y, title, series); `line` joins some of them."""
    left, bottom, height = 80, 48, 360
    body, top = legend(14, names)
    top += 22
    xs, ys = [row[0] for row in rows], [row[1] for row in rows]
    low_x, high_x, low_y, high_y = 0.0, max(xs) * 1.05, min(ys) * 0.95, max(ys) * 1.02
    wide, tall = WIDTH - left - 40, height - top - bottom

    def place(x: float, y: float) -> tuple[float, float]:
        return left + (x - low_x) / (high_x - low_x or 1) * wide, top + tall - (y - low_y) / (high_y - low_y or 1) * tall

    for step in range(5):
        x, y = low_x + (high_x - low_x) * step / 4, low_y + (high_y - low_y) * step / 4
        px, py = place(x, y)
        body.append(f'<line x1="{left}" x2="{WIDTH - 40}" y1="{py:.1f}" y2="{py:.1f}" stroke="currentColor" opacity="0.15"/>')
        body += [words(left - 6, py + 4, show[1](y), "end"), words(px, top + tall + 16, show[0](x), "middle")]
    if line:
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in (place(*each) for each in line))
        body.append(f'<polyline points="{path}" fill="none" stroke="currentColor" stroke-width="1.5" opacity="0.6"/>')
    for x, y, title, series in rows:
        px, py = place(x, y)
        body.append(
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="{6 if series == 0 else 4}" fill="{colour(series)}">'
            f"<title>{escape(title)}</title></circle>"
        )
    body += [words(left + wide / 2, height - 8, axes[0], "middle"), words(0, top - 12, axes[1], "start")]
    return frame(height, body, label)
