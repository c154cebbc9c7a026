"""Draw a run's losses over its steps as a PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plot_history(history: dict[str, Any], path: Path) -> str:
    """Write the picture and return one line that says where it is, or what is missing to draw it."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return "no loss curve was drawn: it needs matplotlib, pip install 'stateroom[bench]'"
    figure = Figure(figsize=(8, 4.5), layout="constrained")  # without pyplot: no window system, no global state
    axes = figure.add_subplot()
    steps, losses = history["step"], history["loss"]
    axes.plot(steps, losses, color="#b9c6d6", linewidth=0.8, label="training, each step")
    axes.plot(steps, _smooth(losses), color="#1f5fa8", linewidth=1.8, label="training, smoothed")
    axes.plot(*zip(*history["valid"], strict=True), "o:", linewidth=0.8, color="#c8501e", label="validation")
    for step, _ in history["valid"][1:-1]:
        axes.axvline(step, color="#999999", linewidth=0.6, linestyle=":")  # where a run ended and the next went on
    axes.set(xlabel="step", ylabel="cross-entropy per token (nats)", title=history.get("title", ""))
    axes.grid(alpha=0.3)
    axes.legend()
    FigureCanvasAgg(figure).print_png(str(path))
    return f"loss curve: {path}"


def _smooth(losses: list[float], keep: float = 0.9) -> list[float]:
    """Return the running mean that forgets slowly, without its usual pull towards the first value."""
    mean, weight, out = 0.0, 0.0, []
    for loss in losses:
        mean, weight = keep * mean + (1 - keep) * loss, keep * weight + (1 - keep)
        out.append(mean / weight)
    return out
