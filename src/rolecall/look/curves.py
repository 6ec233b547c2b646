"""Charts as inline SVG in a card each. Without scripts they are pictures with a text; with them they can be read out."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil, floor, log10

from rolecall.look.charts import Chart, Series, four_digits
from rolecall.look.page import Data, facts, text

_WIDTH, _HEIGHT = 360, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 8, 8, 20
_POINTS = 400
"""More than can be distinguished in a card; of longer runs each stretch keeps its extremes."""
_COLOURS = 8
_Scale = Callable[[float], float]
"""From a number to a place in the picture."""


def curve_cards(name: str, charts: Sequence[Chart], *, always: int = 0) -> tuple[str, Data]:
    """The cards, and the numbers for the script. `name` is unique on the page.

    Numbers that never change are a folded list of their values, except the first `always` charts.
    """
    cards, held = [], {}
    flat = [chart for i, chart in enumerate(charts) if i >= always and is_flat(chart)]
    for i, chart in enumerate(chart for chart in charts if chart not in flat):
        short = thinned(chart)
        key = f"{name}-{i}"
        cards.append(_card(key, short))
        held[key] = {
            "xs": list(short.xs),
            "series": [{"label": s.label, "ys": [six_digits(y) for y in s.ys]} for s in short.series],
            "box": [_LEFT, _TOP, _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM, _WIDTH],
            "range": None if chart.stacked else _range(short)[1:],
            **({"sparse": True} if chart.sparse else {}),
        }
    drawn = f'<div class="cards">{"".join(cards)}</div>' if cards else ""
    if flat:
        values = {f"{c.title}: {s.label}" if len(c.series) > 1 else c.title: _last(s) for c in flat for s in c.series}
        drawn += f"<details><summary>Numbers that never changed ({len(values)})</summary>{facts(values)}</details>"
    return drawn, Data(id=f"curves-{name}", value=held)


def is_flat(chart: Chart) -> bool:
    """Whether there are several steps, and no line ever moves."""
    values = [{y for y in series.ys if y is not None} for series in chart.series]
    return not chart.stacked and len(chart.xs) > 1 and all(len(held) <= 1 for held in values)


def in_words(chart: Chart) -> str:
    """The chart as a sentence per line."""
    parts = []
    for series in chart.series:
        there = [(x, y) for x, y in zip(chart.xs, series.ys, strict=True) if y is not None]
        if there:
            (x0, y0), (x1, y1) = there[0], there[-1]
            low, high = min(y for _, y in there), max(y for _, y in there)
            parts.append(
                f"{series.label} goes from {four_digits(y0)} at step {x0} to {four_digits(y1)} at step {x1}, "
                f"between {four_digits(low)} and {four_digits(high)}"
            )
    marked = "".join(f" Marked, steps {first} to {last}: {why}." for first, last, why in chart.marks)
    return f"{chart.title}: {'; '.join(parts)}.{marked}"


def picture(chart: Chart) -> str:
    """The chart alone, for a page with a style of its own."""
    return _svg(thinned(chart))


def _svg(chart: Chart) -> str:
    label = text(in_words(chart))
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{_drawn(chart)}</svg>'


def _card(key: str, chart: Chart) -> str:
    legend = "".join(
        f'<li><svg viewBox="0 0 22 10" aria-hidden="true">{_sample(i, stacked=chart.stacked)}</svg>'
        f"{text(series.label)} <b>{text(_last(series))}</b></li>"
        for i, series in enumerate(chart.series)
    )
    first, last = (chart.xs[0], chart.xs[-1]) if chart.xs else (0, 0)
    about = f'<p class="about">{text(chart.about)}</p>' if chart.about else ""
    return (
        f'<figure class="card"><figcaption><h4>{text(chart.title)}</h4>{about}</figcaption>'
        f'<div class="plot" id="{key}" tabindex="0" role="slider" aria-label="{text(chart.title)} by step" '
        f'aria-valuemin="{first}" aria-valuemax="{last}" aria-valuenow="{last}">'
        f"{_svg(chart)}</div>"
        f'<ul class="key">{legend}<li class="at">step {last}</li></ul></figure>'
    )


def _drawn(chart: Chart) -> str:
    tops = _tops(chart)
    ticks, low, high = _range(chart)
    x0, x1 = (chart.xs[0], chart.xs[-1]) if chart.xs else (0, 1)

    def x(step: float) -> float:
        return _LEFT + (step - x0) / ((x1 - x0) or 1) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _TOP + (high - value) / ((high - low) or 1) * (_HEIGHT - _TOP - _BOTTOM)

    def shade(mark: tuple[int, int, str]) -> str:
        begin, end = (x(min(max(step, x0), x1)) for step in mark[:2])
        box = f'x="{begin:.1f}" width="{max(end - begin, 3):.1f}" y="{_TOP}" height="{_HEIGHT - _TOP - _BOTTOM}"'
        return f'<rect class="d1" fill-opacity=".15" {box}><title>{text(mark[2])}</title></rect>'

    marks = [
        f'<line class="{"zero" if tick == 0 else "grid"}" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        f'<text x="{_LEFT - 6}" y="{y(tick) + 3.5:.1f}" text-anchor="end">{said}</text>'
        for tick, said in zip(ticks, _told(ticks), strict=True)
    ]
    for step, anchor in [(x0, "start"), (x1, "end")] if x1 > x0 else [(x0, "start")]:
        marks.append(f'<text x="{x(step):.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{step}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    marks.append(f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">step</text>')
    if chart.stacked:
        shapes = _areas(chart.xs, tops, x, y)
    else:
        shapes = [_band(i, chart.xs, series, x, y) for i, series in enumerate(chart.series)]
        shapes += [_line(i, *_points(chart, ys), x, y) for i, ys in enumerate(tops)]
    cross = f'<line class="cross" x1="0" x2="0" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>'
    return "".join([*map(shade, chart.marks), *marks, *shapes, cross])


def _tops(chart: Chart) -> list[list[float | None]]:
    return _stacked(chart.series) if chart.stacked else [list(s.ys) for s in chart.series]


def _range(chart: Chart) -> tuple[list[float], float, float]:
    """(ticks, lower end, upper end) of the axis."""
    bands = [edge for s in chart.series for edge in (s.low, s.high) if edge is not None]
    there = [y for ys in [*_tops(chart), *bands] for y in ys if y is not None]
    low, high = (min(there), max(there)) if there else (0.0, 1.0)
    ticks = _ticks(min(low, 0.0) if chart.stacked or _near_zero(low, high) else low, high)
    return ticks, min(ticks[0], low), max(ticks[-1], high)


def _line(i: int, xs: Sequence[int], ys: Sequence[float | None], x: _Scale, y: _Scale) -> str:
    """One path, broken where there is no value; a value between two gaps is a dot."""
    path, dots, run = [], [], list[str]()
    for step, value in [*zip(xs, ys, strict=True), (0, None)]:
        if value is not None:
            run.append(f"{x(step):.1f} {y(value):.1f}")
        elif run:
            path.append(f"M{'L'.join(run)}")
            if len(run) == 1:
                cx, cy = run[0].split()
                dots.append(f'<circle class="d{i % _COLOURS}" cx="{cx}" cy="{cy}" r="2.5"/>')
            run = []
    return f'<path class="line k{i % _COLOURS}" d="{"".join(path)}"/>{"".join(dots)}'


def _points(chart: Chart, ys: Sequence[float | None]) -> tuple[Sequence[int], Sequence[float | None]]:
    """What a line goes through; a sparse one knows no gaps."""
    if not chart.sparse:
        return chart.xs, ys
    there = [(x, y) for x, y in zip(chart.xs, ys, strict=True) if y is not None]
    return [x for x, _ in there], [y for _, y in there]


def _band(i: int, xs: Sequence[int], series: Series, x: _Scale, y: _Scale) -> str:
    if series.low is None or series.high is None:
        return ""
    edges = [(s, a, b) for s, a, b in zip(xs, series.low, series.high, strict=True) if a is not None and b is not None]
    there = [(x(step), y(value)) for step, value, _ in edges]
    back = [(x(step), y(value)) for step, _, value in reversed(edges)]
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in [*there, *back])
    return f'<polygon class="d{i % _COLOURS}" fill-opacity=".15" points="{points}"/>'


def _areas(xs: Sequence[int], tops: Sequence[Sequence[float | None]], x: _Scale, y: _Scale) -> list[str]:
    shapes, below = [], [0.0] * len(xs)
    for i, ys in enumerate(tops):
        above = [value or 0.0 for value in ys]
        there = [(x(step), y(value)) for step, value in zip(xs, above, strict=True)]
        back = [(x(step), y(value)) for step, value in zip(xs, below, strict=True)][::-1]
        if len(xs) == 1:  # one step still is an area
            there, back = (
                [(_LEFT, there[0][1]), (_LEFT + 12, there[0][1])],
                [(_LEFT + 12, back[0][1]), (_LEFT, back[0][1])],
            )
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in [*there, *back])
        shapes.append(f'<polygon class="area d{i % _COLOURS}" points="{points}"/>')
        below = above
    return shapes


def _sample(i: int, *, stacked: bool) -> str:
    if stacked:
        return f'<rect class="d{i % _COLOURS}" x="4" width="10" height="10" rx="2"/>'
    return f'<path class="line k{i % _COLOURS}" d="M1 5H21"/>'


def _stacked(series: Sequence[Series]) -> list[list[float | None]]:
    tops: list[list[float | None]] = []
    for one in series:
        below = tops[-1] if tops else [0.0] * len(one.ys)
        tops.append([(b or 0.0) + (v or 0.0) for b, v in zip(below, one.ys, strict=True)])
    return tops


def _ticks(low: float, high: float) -> list[float]:
    """Three to five round numbers that enclose the range, or nearly."""
    if high == low:
        low, high = (low - abs(low) * 0.1, high + abs(high) * 0.1) if high else (0.0, 1.0)
    rough = (high - low) / 3
    size = 10.0 ** floor(log10(rough))
    step = size * next(m for m in (1, 2, 2.5, 5, 10) if m * size >= rough * 0.999)
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [k * step for k in range(first, last + 1)]


def _near_zero(low: float, high: float) -> bool:
    """Whether 0 is so near that the axis may as well begin there."""
    return low > 0 and low <= 0.35 * high


def thinned(chart: Chart, points: int = _POINTS) -> Chart:
    """Of a long run each stretch keeps the steps with its extremes."""
    n = len(chart.xs)
    if n <= points:
        return chart
    keep = {0, n - 1}
    bucket = n / (points / (2 * len(chart.series)))
    for start in range(ceil(n / bucket)):
        inside = range(int(start * bucket), min(n, int((start + 1) * bucket)))
        for series in chart.series:
            there = [i for i in inside if series.ys[i] is not None]
            if there:
                keep |= {min(there, key=lambda i: series.ys[i] or 0.0), max(there, key=lambda i: series.ys[i] or 0.0)}
    chosen = sorted(keep)

    def kept(values: Sequence[float | None] | None) -> list[float | None] | None:
        return None if values is None else [values[i] for i in chosen]

    lines = [replace(s, ys=[s.ys[i] for i in chosen], low=kept(s.low), high=kept(s.high)) for s in chart.series]
    return replace(chart, xs=[chart.xs[i] for i in chosen], series=lines)


def _last(series: Series) -> str:
    there = [y for y in series.ys if y is not None]
    return four_digits(there[-1]) if there else "–"


def _told(ticks: Sequence[float]) -> list[str]:
    """Ticks with as many digits as tell them apart."""
    found = ([_tick(tick, digits) for tick in ticks] for digits in range(4, 9))
    return next((words for words in found if len(set(words)) == len(words)), [_tick(tick, 9) for tick in ticks])


def _tick(value: float, digits: int) -> str:
    """Short enough to stand beside the axis: 5.5e-4 rather than 0.00055."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{float(f'{value:.{digits}g}'):.9g}"
    number, _, power = f"{value:.{digits - 3}e}".partition("e")
    return f"{number.rstrip('0').removesuffix('.')}e{int(power)}"


def six_digits(value: float | None) -> float | None:
    """A number for a script; more digits would not be seen."""
    return None if value is None else float(f"{value:.6g}")
