"""Where the time of simulated workers goes, as text and as a picture."""

from collections.abc import Sequence

from rolecall.planning.simulate import Simulated

_WIDTH, _ROW, _LEFT, _BAR = 720, 22, 190, 420
_COLOURS = {"sampling": "#2a7f62", "lost": "#c0392b", "idle": "#d8dee4"}


def bar(sampling: float, lost: float, *, width: int = 40) -> str:
    """`####x...`: the shares of a worker's time in which kept answers grew, that failures took, and in which it waited."""
    grown = round(min(1.0, sampling) * width)
    gone = min(width - grown, round(lost * width))
    return "#" * grown + "x" * gone + "." * (width - grown - gone)


def svg(rows: Sequence[Simulated]) -> str:
    """The same as a picture that needs nothing else."""
    height = _ROW * (len(rows) + 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
    ]
    labels = {"sampling": "answers grow", "lost": "lost to failures", "idle": "slots wait"}
    for i, (name, colour) in enumerate(_COLOURS.items()):
        left = _LEFT + i * 140
        parts.append(f'<rect x="{left}" y="6" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{left + 15}" y="15">{labels[name]}</text>')
    for i, row in enumerate(rows):
        y, x = _ROW * (i + 1) + 6, float(_LEFT)
        parts.append(f'<text x="8" y="{y + 12}">{row.workers} workers, {row.mode}</text>')
        for name, colour in _COLOURS.items():
            width = max(0.0, min(_LEFT + _BAR - x, getattr(row, name) * _BAR))
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 8}" fill="{colour}"/>')
            x += width
        parts.append(f'<text x="{_LEFT + _BAR + 8}" y="{y + 12}">{row.seconds:.3g} s a step</text>')
    return "\n".join([*parts, "</svg>", ""])
