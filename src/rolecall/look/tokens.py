"""The token view: every position of a sequence as a box, coloured by a chosen number, with the reason for its verdict.

A position is a token, or a time step of an episode whose piece names the action.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import isfinite
from typing import Any, Literal

from rolecall.look.page import Data, text
from rolecall.look.pieces import spelt
from rolecall.maths.codes import Role, Verdict
from rolecall.visible import visible_text

Numbers = Mapping[str, Sequence[float | None]]
"""Numbers per position by name; None where there is none."""

KEPT = 2000
"""Positions that a long sequence keeps at its beginning, and as many at its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantity:
    """A number that positions can be coloured by."""

    label: str
    about: str
    """What it is, in half a line."""
    scale: Literal["category", "low", "signed", "ratio"]
    """category: a colour each. low: the lower the stronger, from 0 down. signed: two colours around 0. ratio: two
    colours around 1."""


QUANTITIES = {
    "verdict": Quantity(label="verdict", about="why a position trains or does not", scale="category"),
    "role": Quantity(label="role", about="what a position is", scale="category"),
    "logprob": Quantity(label="log-prob", about="log p under the weights that this update started from", scale="low"),
    "behaviour_logprob": Quantity(label="log-prob, sampler", about="log p when it was sampled", scale="low"),
    "old_logprob": Quantity(
        label="log-prob, old", about="log p under the policy at the start of the step", scale="low"
    ),
    "ref_logprob": Quantity(label="log-prob, reference", about="log p under the frozen reference", scale="low"),
    "ratio": Quantity(label="ratio", about="how much more likely it is than under the old policy", scale="ratio"),
    "kl": Quantity(label="KL", about="estimate of the KL to the reference", scale="signed"),
    "value": Quantity(label="value", about="what the critic expects before this position", scale="signed"),
    "reward": Quantity(label="reward", about="score and KL part that fall on this position", scale="signed"),
    "return": Quantity(label="return", about="what the critic is fitted to", scale="signed"),
    "advantage": Quantity(label="advantage", about="how much better than expected", scale="signed"),
    "weight": Quantity(label="weight", about="importance weight of this position in the loss", scale="ratio"),
    "contribution": Quantity(label="loss contribution", about="this position's share of the loss", scale="signed"),
}
"""The numbers that are known by name, in the order of the menu. `contribution/TERM` is the share of one loss term."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A run of positions with a name: a prompt, a turn, an observation."""

    start: int
    end: int
    """One past the last."""
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """What one optimiser step saw of a sequence."""

    label: str
    numbers: Numbers
    verdicts: Sequence[int] | None = None
    """If they differ from the sample's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One sequence to look at."""

    title: str
    pieces: Sequence[bytes] | None
    """What each position writes; None shows ids instead."""
    ids: Sequence[int]
    roles: Sequence[int]
    verdicts: Sequence[int] | None = None
    numbers: Numbers = field(default_factory=dict)
    passes: Sequence[Pass] = ()
    """The optimiser steps that trained on it, if their record is there."""
    spans: Sequence[Span] = ()
    """Who wrote what; without any, spans follow the roles."""
    facts: Sequence[tuple[str, str]] = ()
    """What is known of the whole: score, finish …"""
    labels: Sequence[str] = ()
    """Why it is shown: best, longest … Without any it only stands beside the others of its group."""
    group: str = ""
    """Samples of one group are shown side by side below this heading."""
    short: str = ""
    """What it is called among its group; the title if empty."""
    place: int = 0
    """Its place among its group, from left to right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSet:
    """Samples to choose from, such as those of a step."""

    label: str
    samples: Sequence[Sample]
    note: str = ""
    """HTML below the view."""
    clip: tuple[float, float] | None = None
    """The ratio's bounds, if the loss clips it."""


def token_view(name: str, sets: Sequence[SampleSet], *, unit: str = "token") -> tuple[str, Data]:
    """The HTML of a view of these samples, and the data it is drawn from. `name` is unique on the page; `unit` is what a position is called."""
    value = {
        "unit": unit,
        "quantities": _quantities(sets),
        "verdicts": {int(v): {"name": words(v.name), "sentence": v.sentence} for v in Verdict},
        "roles": {int(r): {"name": words(r.name), "sentence": _ROLES[r]} for r in Role},
        "sets": [
            {
                "label": visible_text(s.label),
                "clip": s.clip,
                "samples": [_sample(sample) for sample in s.samples],
            }
            for s in sets
        ],
    }
    notes = "".join(
        f'<div class="set-note" data-set="{i}"{"" if i == 0 else " hidden"}>{s.note}</div>' for i, s in enumerate(sets)
    )
    html = (
        f'<div class="view" data-view="data-{name}" data-name="{name}">'
        f'<p class="note">The {text(unit)} view is drawn by this page\'s script, which did not run.</p></div>{notes}'
    )
    return html, Data(id=f"data-{name}", value=value)


_ROLES = {
    Role.PAD: "Nothing; only there to make a rectangle.",
    Role.PROMPT: "Given by the task or the chat template.",
    Role.CONTENT: "Part of the answer.",
    Role.STOP: "The choice to end the turn.",
    Role.OBSERVATION: "Came from a tool, an environment, a user or another agent.",
    Role.NO_CHOICE: "The policy's slot, but nothing to choose.",
    Role.AFTER_END: "After the end of the answer or episode.",
}


def words(name: str) -> str:
    return name.replace("_", " ").lower()


def _quantities(sets: Sequence[SampleSet]) -> list[dict[str, Any]]:
    """Those that some sample has, with the range of their colours."""
    samples = [sample for s in sets for sample in s.samples]
    held: dict[str, list[float]] = {}
    for sample in samples:
        for numbers in (sample.numbers, *(p.numbers for p in sample.passes)):
            for name, values in numbers.items():
                held.setdefault(name, []).extend(v for v in values if v is not None and isfinite(v))
    terms = sorted(name for name in held if name.startswith("contribution/"))
    known = dict(QUANTITIES)
    for name in terms if len(terms) > 1 else ():
        about = f"this position's share of the {name.partition('/')[2]} term, times its coefficient"
        known[name] = Quantity(label=f"contribution, {name.partition('/')[2]}", about=about, scale="signed")
    out = []
    for key, quantity in known.items():
        there = key == "role" or (key == "verdict" and any(s.verdicts is not None for s in samples))
        if not there and not held.get(key):
            continue
        limit = _limit(quantity.scale, held.get(key, []))
        out.append(
            {"key": key, "label": quantity.label, "about": quantity.about, "scale": quantity.scale, "limit": limit}
        )
    return out


def _limit(scale: str, values: Sequence[float]) -> float:
    """Where the strongest colour begins: at most one position in twenty lies beyond."""
    if scale == "category":
        return 0.0
    away = sorted(abs(v - 1) if scale == "ratio" else abs(v) for v in values)
    away = [v for v in away if v > 0]
    return _short(away[int(0.95 * (len(away) - 1))]) if away else 1.0


def _sample(sample: Sample) -> dict[str, Any]:
    """The sample as the script reads it; of a long one the middle is left out."""
    length = len(sample.ids)
    keep = range(length) if length <= 2 * KEPT else [*range(KEPT), *range(length - KEPT, length)]

    def kept(values: Sequence[Any]) -> list[Any]:
        return list(values) if len(keep) == length else [values[i] for i in keep]

    def numbers(held: Numbers) -> dict[str, list[float | str | None]]:
        return {name: [_number(v) for v in kept(values)] for name, values in held.items()}

    answer = (Role.CONTENT, Role.STOP)
    spans = sample.spans or runs_of("answer" if r in answer else words(Role(r).name) for r in sample.roles)
    shown = spelt(sample.pieces) if sample.pieces is not None else [(f"#{i}", "") for i in sample.ids]
    value: dict[str, Any] = {
        "title": visible_text(sample.title),
        "short": visible_text(sample.short or sample.title),
        "labels": list(map(visible_text, sample.labels)),
        "facts": [[visible_text(name), visible_text(fact)] for name, fact in sample.facts],
        "group": visible_text(sample.group),
        "place": sample.place,
        "length": length,
        "texts": kept([piece for piece, _ in shown]),
        "ids": kept(sample.ids),
        "roles": kept(sample.roles),
        "verdicts": None if sample.verdicts is None else kept(sample.verdicts),
        "numbers": numbers(sample.numbers),
        "spans": [[s.start, s.end, visible_text(s.label)] for s in spans],
        "passes": [
            {
                "label": visible_text(p.label),
                "numbers": numbers(p.numbers),
                "verdicts": None if p.verdicts is None else kept(p.verdicts),
            }
            for p in sample.passes
        ],
    }
    if len(keep) != length:
        value["positions"] = list(keep)
    parts = {i: note for i, (_, note) in enumerate(kept(shown)) if note}
    if parts:
        value["parts"] = parts
    return value


def runs_of(labels: Iterable[str]) -> list[Span]:
    """A span for every run of positions with one label."""
    spans: list[Span] = []
    for label, run in groupby(labels):
        start = spans[-1].end if spans else 0
        spans.append(Span(start=start, end=start + len(list(run)), label=label))
    return spans


def _number(value: float | None) -> float | str | None:
    """Seven digits are more than anybody reads; JSON has no infinity."""
    if value is None:
        return None
    return _short(value) if isfinite(value) else str(value)


def _short(value: float) -> float:
    return float(f"{value:.7g}")
