"""Findings on a page: a table, and shaded stretches of the curves that show them."""

from collections.abc import Sequence
from dataclasses import replace

from rolecall.look.charts import Chart
from rolecall.look.doctor.finding import Finding
from rolecall.look.page import table

_SHOWN_BY = {
    "entropy-collapse": "entropy",
    "entropy-explosion": "entropy",
    "kl-blow-up": "kl-to-the-reference",
    "lr-too-large": "kl-of-an-update",
    "useless-critic": "explained-variance",
    "mismatch": "sampler-against-trainer",
    "length-hacking": "length",
    "repetition": "length",
    "lost-stop": "truncation",
    "truncation-wall": "truncation",
    "flat-groups": "flat-groups",
    "over-optimised": "evaluated-reward",
    "evaluation-falls": "evaluated-reward",
}
"""The chart of each kind; of the others, and where it is missing, the first one of the page."""


def marked(charts: Sequence[Chart], found: Sequence[Finding]) -> list[Chart]:
    """The charts with the steps of each finding shaded in the one that shows it."""
    names = {chart.name for chart in charts}
    first = charts[0].name if charts else ""
    marks: dict[str, list[tuple[int, int, str]]] = {}
    for one in found:
        name = _SHOWN_BY.get(one.kind, first)
        marks.setdefault(name if name in names else first, []).append((*one.steps, f"{one.kind}, {one.sure}"))
    return [replace(chart, marks=marks[chart.name]) if chart.name in marks else chart for chart in charts]


def findings_table(found: Sequence[Finding]) -> str:
    """A row for each finding."""
    rows = [
        (one.kind, one.sure, f"{one.steps[0]} to {one.steps[1]}", one.sentence, one.setting, one.did, _places(one))
        for one in found
    ]
    head = ["finding", "sure", "steps", "what", "try first", "what that did in our run with this fault", "see"]
    return table(head, rows, caption="What `rolecall doctor` finds in the files of this run")


def _places(one: Finding) -> str:
    places = (f"step {s} answer {i}{'' if t is None else f' token {t}'}" for s, i, t in one.evidence)
    return ", ".join(places)
