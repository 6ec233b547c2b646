"""Several runs side by side: the same number of all, what they were told differently, their answers to the same prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rolecall.look.charts import PAIRS, Chart, Series, charts, four_digits, is_number, names_of, slug
from rolecall.look.run import RunFiles, flat, setting_text

_ENDS = ("eval_accuracy", "eval_reward", "eval_return", "eval_loss", "reward", "return", "loss", "kl", "entropy")
"""What the table of last numbers shows of each run, as far as some have it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Runs with the same settings but for their seeds; often one."""

    label: str
    runs: Sequence[tuple[str, RunFiles]]
    """By their names."""


def groups_of(runs: Mapping[str, RunFiles]) -> list[Group]:
    """The runs, those of equal settings together."""
    held: dict[str, list[tuple[str, RunFiles]]] = {}
    for name, run in runs.items():
        settings = {key: value for key, value in flat(run.config) if key != "seed"}
        held.setdefault(repr((run.command, sorted(settings.items(), key=str))), []).append((name, run))
    labels = [_label([name for name, _ in found]) for found in held.values()]
    return [
        Group(label=label if labels.count(label) == 1 else f"{found[0][0]} and {len(found) - 1} more", runs=found)
        for label, found in zip(labels, held.values(), strict=True)
    ]


def overlaid(groups: Sequence[Group], *, also_rest: bool = True) -> tuple[list[Chart], list[Chart]]:
    """A chart for each number that some run has: the main ones, and the others, without their lines unless `also_rest`.

    A line is the mean over the runs of a group; its band reaches from the lowest to the highest of them.
    """
    found = [[_lines(run) for _, run in group.runs] for group in groups]
    names = dict.fromkeys(name for runs in found for lines in runs for name in lines)
    main: list[Chart] = []
    rest: list[Chart] = []
    for name in names:
        shown = next(lines[name] for runs in found for lines in runs if name in lines)
        chart = Chart(name=name, title=shown.title, about=shown.about, xs=[], series=[], sparse=True)
        if shown.main or also_rest:
            xs = _steps([lines[name].xs for runs in found for lines in runs if name in lines])
            series = [  # all groups, so that each has the same colour in every chart
                _mean(group.label, [_along(lines[name], xs) for lines in runs if name in lines] or [[None] * len(xs)])
                for group, runs in zip(groups, found, strict=True)
            ]
            chart = replace(chart, xs=xs, series=series)
        (main if shown.main else rest).append(chart)
    return main, rest


@dataclass(frozen=True, kw_only=True, slots=True)
class _Points:
    """One number of one run."""

    title: str
    about: str
    main: bool
    xs: Sequence[int]
    ys: Sequence[float | None]


def _lines(run: RunFiles) -> dict[str, _Points]:
    """Every number of a run by a name that is the same in all runs."""
    main, rest = charts(run.steps, run.evaluations, run.timing, pairs=run.command in PAIRS, least=1)
    out: dict[str, _Points] = {}
    for chart, first in [*((chart, True) for chart in main), *((chart, False) for chart in rest)]:
        if chart.stacked:
            totals = [sum(y or 0.0 for y in ys) for ys in zip(*(s.ys for s in chart.series), strict=True)]
            whole = Series(label="", ys=totals)
            chart = replace(chart, title="Seconds per step", about="All phases together.", series=[whole])
        for i, series in enumerate(chart.series):
            name = chart.name if i == 0 else f"{chart.name}-{i}-{slug(series.label)}"
            title = chart.title if i == 0 else f"{chart.title}: {series.label}"
            about, main_one = (chart.about, first) if i == 0 else ("", False)
            out[name] = _Points(title=title, about=about, main=main_one, xs=chart.xs, ys=series.ys)
    return out


def _steps(held: Sequence[Sequence[int]]) -> list[int]:
    """All steps that some run has."""
    longest = max(held, key=len)
    same = all(xs == longest[: len(xs)] for xs in held)
    return list(longest) if same else sorted({x for xs in held for x in xs})


def _along(points: _Points, xs: Sequence[int]) -> Sequence[float | None]:
    """A run's values at these steps."""
    if points.xs == xs[: len(points.xs)]:
        return [*points.ys, *[None] * (len(xs) - len(points.xs))]
    there = dict(zip(points.xs, points.ys, strict=True))
    return [there.get(x) for x in xs]


def _mean(label: str, runs: Sequence[Sequence[float | None]]) -> Series:
    if len(runs) < 2:
        return Series(label=label, ys=runs[0])
    there = [[value for value in values if value is not None] for values in zip(*runs, strict=True)]
    ys = [sum(values) / len(values) if values else None for values in there]
    low, high = ([pick(values) if values else None for values in there] for pick in (min, max))
    return Series(label=label, ys=ys, low=low, high=high)


def differences(groups: Sequence[Group]) -> list[tuple[str, list[str]]]:
    """The settings in which groups differ, with each one's value; a dash where it has no such setting."""
    held = [_told(group) for group in groups]
    names = dict.fromkeys(name for settings in held for name in settings)
    rows = [(name, [settings.get(name, "–") for settings in held]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _told(group: Group) -> dict[str, str]:
    """What the runs of a group were told, and what they ran on; seeds together."""
    first = group.runs[0][1]
    settings = {name: setting_text(value) for name, value in flat(first.config) if name != "seed"}
    seeds = dict.fromkeys(setting_text(run.config.get("seed")) for _, run in group.runs)
    versions: Any = first.about.get("versions")
    ran_on = {f"version of {n}": str(v) for n, v in versions.items()} if isinstance(versions, dict) else {}
    return {"command": first.command, **settings, "seed": ", ".join(seeds), **ran_on}


def ends(groups: Sequence[Group]) -> tuple[list[str], list[list[str]]]:
    """(names, a row per group): the last evaluation, and the mean of the last tenth of the steps; with the range over runs."""
    found = [[ends_of(run, _ENDS) for _, run in group.runs] for group in groups]
    names = [name for name in _ENDS if any(name in end for runs in found for end in runs)]
    rows = []
    for group, runs in zip(groups, found, strict=True):
        cells = [_range([end[name] for end in runs if name in end]) for name in names]
        rows.append([group.label, str(max(run.last_step for _, run in group.runs)), *cells])
    return ["steps", *(name.replace("eval_", "evaluated ") for name in names)], rows


def ends_of(run: RunFiles, names: Sequence[str] | None = None) -> dict[str, float]:
    """Numbers at the end of a run, or all: the mean of its last tenth, or the last evaluation."""
    found = {}
    for name in names_of(run.steps) if names is None else names:
        values = [float(line[name]) for line in run.steps if is_number(line.get(name))]
        if values:
            last = values[-max(1, len(values) // 10) :]
            found[name] = sum(last) / len(last)
    for line in run.evaluations:
        found |= {name: float(value) for name, value in line.items() if name != "step" and is_number(value)}
    return found


def _range(values: Sequence[float]) -> str:
    if not values:
        return "–"
    mean = four_digits(sum(values) / len(values))
    return mean if min(values) == max(values) else f"{mean} ({four_digits(min(values))} to {four_digits(max(values))})"


def _label(names: Sequence[str]) -> str:
    """One name, or what the names of several begin with."""
    if len(names) == 1:
        return names[0]
    begin = names[0]
    for name in names[1:]:
        while not name.startswith(begin):
            begin = begin[:-1]
    begin = begin.rstrip("-_.,=@+/ ").removesuffix("seed").rstrip("-_.,=@+/ ")
    return f"{begin or names[0]} ({len(names)} seeds)"
