"""Curves as PNG files, drawn by matplotlib, which is imported here alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rolecall.errors import UserError
from rolecall.look.charts import Chart

_COLOURS = ("#0b5fb3", "#c45208", "#00795a", "#a8317f", "#6d6200", "#5b4bb5", "#52606d", "#2a8fb8")
_DASHES = ("-", "--", ":", "-.", (0, (1, 2)), (0, (6, 2)), (0, (3, 1)), (0, (5, 1, 1, 1)))


def write_png(charts: Sequence[Chart], folder: Path) -> list[Path]:
    """One file per chart, named after it; files of the same names are replaced."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--png needs matplotlib: pip install 'rolecall[plot]'") from None
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for chart in charts:
        figure = Figure(figsize=(6, 3.4), dpi=150, layout="constrained")
        _draw(figure.add_subplot(), chart)
        path = folder / f"{chart.name}.png"
        figure.savefig(path, metadata={"Software": None})
        written.append(path)
    return written


def _draw(axes: Any, chart: Chart) -> None:
    if chart.stacked:
        layers = [[value or 0.0 for value in series.ys] for series in chart.series]
        labels = [_plain(series.label) for series in chart.series]
        axes.stackplot(chart.xs, layers, labels=labels, colors=_COLOURS[: len(layers)], alpha=0.85)
    else:
        for i, series in enumerate(chart.series):
            values = [float("nan") if value is None else value for value in series.ys]
            look = {"color": _COLOURS[i % len(_COLOURS)], "linestyle": _DASHES[i % len(_DASHES)]}
            dot = "o" if len(values) == 1 else None
            xs: Sequence[int] = chart.xs
            if chart.sparse:
                there = [(x, y) for x, y in zip(chart.xs, values, strict=True) if y == y]
                xs, values = [x for x, _ in there], [y for _, y in there]
            axes.plot(xs, values, label=_plain(series.label), linewidth=1.6, marker=dot, **look)
            if series.low is not None and series.high is not None:
                edges = zip(chart.xs, series.low, series.high, strict=True)
                band = [(x, a, b) for x, a, b in edges if a is not None and b is not None]
                axes.fill_between(*zip(*band, strict=True), color=look["color"], alpha=0.15, linewidth=0)
    axes.set_title(_plain(chart.title), loc="left", fontsize=11)
    axes.set_xlabel("step", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(visible=True, axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(chart.series) > 1:
        axes.legend(fontsize=8, frameon=False)


def _plain(label: str) -> str:
    """Dollar signs would be read as formulas, and a label that begins with an underscore would be left out."""
    return label.replace("$", r"\$").replace("_", " ") if label.startswith("_") else label.replace("$", r"\$")
