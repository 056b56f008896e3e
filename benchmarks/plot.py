"""The run as a picture: one panel for each case of the default loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .contenders import EXCLUSIVE, FEW, OURS, RAW, UNCONFIRMED
from .pairs import Measured
from .report import DEFAULT_LOOP, Figure, Report

_COLOURS = {
    OURS.title: "#1b7f5c",
    UNCONFIRMED.title: "#63b598",
    EXCLUSIVE.title: "#63b598",
    FEW.title: "#63b598",
    RAW.title: "#9a9a9a",
}
_PEER = "#7a8fb5"
_XLABEL = "µs per acquire and release (logarithmic): medians and quartiles"
_LINE_HEIGHT, _PANEL_EXTRA = 0.3, 0.9


def draw(report: Report, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [m for m in report.measured if m.loop == DEFAULT_LOOP and m.times]
    if not panels:
        raise SystemExit("nothing to draw: the run has no case on the default loop")
    heights = [len(panel.times) * _LINE_HEIGHT + _PANEL_EXTRA for panel in panels]
    figure, axes = pyplot.subplots(
        len(panels),
        figsize=(9, sum(heights)),
        squeeze=False,
        height_ratios=heights,
        layout="constrained",
    )
    for axis, panel in zip(axes[:, 0], panels, strict=True):
        _draw_panel(axis, panel)
    axes[-1, 0].set_xlabel(_XLABEL, fontsize=9)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def _draw_panel(axis: Any, panel: Measured) -> None:
    from matplotlib import ticker

    figures = {title: Figure.of(times) for title, times in reversed(panel.times.items())}
    for position, (title, figure) in enumerate(figures.items()):
        colour = _COLOURS.get(title, _PEER)
        axis.hlines(position, figure.low, figure.high, color=colour, linewidth=3, alpha=0.5)
        axis.plot(figure.median, position, "o", color=colour, markersize=7)
        axis.annotate(
            f"{figure.median:,.{0 if figure.median >= 20 else 1}f}",
            (figure.high, position),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axis.set_yticks(range(len(figures)), list(figures))
    axis.set_ylim(-0.6, len(figures) - 0.4)
    axis.set_xscale("log")
    lows, highs = zip(*((f.low, f.high) for f in figures.values()), strict=True)
    axis.set_xlim(min(lows) / 1.3, max(highs) * 1.5)
    axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axis.xaxis.set_minor_locator(ticker.NullLocator())
    axis.grid(axis="x", color="#e4e4e4", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.set_title(panel.title, loc="left", fontsize=10, fontweight="bold")
    axis.tick_params(labelsize=8)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
