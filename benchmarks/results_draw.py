"""Line charts as SVG, without a plotting library."""

from collections.abc import Mapping, Sequence

Line = Sequence[tuple[float, float, float, float]]
"""(x, mean, lowest, highest) of each point."""

_COLOURS = (
    *("#3b7dd8", "#2a9d5c", "#d1495b", "#8a5fbf", "#e08e2b", "#1b998b", "#8c564b"),
    *("#c2528b", "#6b7280", "#a3a300", "#0f4c81", "#7fb800", "#b5651d", "#444444"),
)
_FONT = 'font-family="sans-serif" font-size="12" fill="#57606a"'
_LEFT, _TOP, _WIDTH, _HEIGHT = 46, 30, 430, 230


def chart(
    lines: Mapping[str, Line],
    *,
    title: str,
    x: str,
    low: float | None = 0.0,
    high: float | None = 1.0,
    colours: Mapping[str, str] | None = None,
) -> str:
    """Lines with the band between lowest and highest, and a legend. Without `low` or `high` the axis fits the lines."""
    points = [point for line in lines.values() for point in line]
    last = max((p[0] for p in points), default=1.0) or 1.0
    bottom = min(p[2] for p in points) if low is None else low
    top = max(p[3] for p in points) if high is None else high
    top = top if top > bottom else bottom + 1

    def at(value_x: float, value_y: float) -> str:
        return f"{_LEFT + _WIDTH * value_x / last:.1f},{_TOP + _HEIGHT * (1 - (value_y - bottom) / (top - bottom)):.1f}"

    height = max(_TOP + _HEIGHT + 40, _TOP + 18 * len(lines) + 10)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 {height}" width="680" height="{height}">']
    parts += [f'<rect width="680" height="{height}" rx="6" fill="#ffffff"/>', _text(_LEFT, 18, title)]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _TOP + _HEIGHT * (1 - share)
        parts.append(f'<line x1="{_LEFT}" y1="{y}" x2="{_LEFT + _WIDTH}" y2="{y}" stroke="#eaeef2"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{bottom + share * (top - bottom):.3g}", anchor="end"))
    for i, (name, line) in enumerate(lines.items()):
        colour = (colours or {}).get(name) or _COLOURS[i % len(_COLOURS)]
        band = [at(p[0], p[3]) for p in line] + [at(p[0], p[2]) for p in reversed(line)]
        if any(p[2] != p[3] for p in line):
            parts.append(f'<polygon points="{" ".join(band)}" fill="{colour}" fill-opacity="0.12"/>')
        middle = " ".join(at(p[0], p[1]) for p in line)
        parts.append(f'<polyline points="{middle}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = _TOP + 18 * i + 8
        parts.append(f'<rect x="{_LEFT + _WIDTH + 14}" y="{y - 8}" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(_LEFT + _WIDTH + 30, y + 1, name))
    parts.append(_text(_LEFT, _TOP + _HEIGHT + 18, "0"))
    parts.append(_text(_LEFT + _WIDTH, _TOP + _HEIGHT + 18, f"{last:g} {x}", anchor="end"))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, words: str, *, anchor: str = "start") -> str:
    safe = words.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" {_FONT}>{safe}</text>'
