"""A run as a piece of HTML for a notebook: its main curve and its last numbers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rolecall.look.charts import charts, four_digits, is_number
from rolecall.look.curves import picture
from rolecall.look.page import text

_STYLE = """
.rolecall-run { font: 13px system-ui, sans-serif; max-width: 460px; }
.rolecall-run svg { width: 100%; }
.rolecall-run svg text { font-size: 10px; fill: currentColor; opacity: .7; }
.rolecall-run .grid, .rolecall-run .zero { stroke: currentColor; opacity: .2; }
.rolecall-run .cross { display: none; }
.rolecall-run .line { fill: none; stroke: #3b7dd8; stroke-width: 1.8; }
.rolecall-run .k1 { stroke: #d8743b; } .rolecall-run .k2 { stroke: #3ba55c; } .rolecall-run .k3 { stroke: #9b59b6; }
.rolecall-run circle { fill: #3b7dd8; }
.rolecall-run td { padding: 1px 10px 1px 0; text-align: left; }
"""
_SHOWN = ("reward", "return", "loss", "kl", "completions/mean_length", "accuracy", "rewards/accuracies")


def run_html(title: str, lines: Sequence[Mapping[str, Any]], files: Mapping[str, Path]) -> str:
    """`lines` are those of metrics.jsonl, `files` what the run left and may not be there."""
    evaluations = [line for line in lines if any(name.startswith("eval_") for name in line)]
    steps = [line for line in lines if line not in evaluations]
    shown: dict[str, object] = {}
    for line in steps:
        shown |= {name: line[name] for name in _SHOWN if is_number(line.get(name))}
    rows = [(name, four_digits(shown[name])) for name in _SHOWN if name in shown]
    rows += [(n, four_digits(v)) for line in evaluations[-1:] for n, v in line.items() if n != "step" and is_number(v)]
    rows += [(name, str(path)) for name, path in files.items() if path.exists()]
    cells = "".join(f"<tr><td>{text(name)}</td><td>{text(value)}</td></tr>" for name, value in rows)
    curves, _ = charts(steps, evaluations, ())
    drawn = "".join(f"<div>{text(curve.title)}</div>{picture(curve)}" for curve in curves[:1])
    return f'<div class="rolecall-run"><style>{_STYLE}</style><b>{text(title)}</b>{drawn}<table>{cells}</table></div>'
