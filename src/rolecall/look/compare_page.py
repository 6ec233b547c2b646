"""A comparison of runs as one page."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rolecall.look.charts import Chart
from rolecall.look.compare import Group, differences, ends, groups_of, overlaid
from rolecall.look.curves import curve_cards
from rolecall.look.page import Data, Section, facts, page, table, text
from rolecall.look.records import unit_of
from rolecall.look.run import RunFiles, command_line, read_several
from rolecall.look.same_prompts import shared_prompts, side_by_side
from rolecall.look.tokens import token_view

_PROMPTS = 3
"""Prompts whose answers are side by side on the page."""


def read_runs(paths: Sequence[Path]) -> dict[str, RunFiles]:
    """Runs by names that tell them apart."""
    runs, places, parts = read_several(paths), [path.resolve() for path in paths], 1
    while len({place.parts[-parts:] for place in places}) < len(places):
        parts += 1
    return {"/".join(place.parts[-parts:]): run for place, run in zip(places, runs, strict=True)}


def compare_html(runs: Mapping[str, RunFiles]) -> str:
    """The page."""
    groups = groups_of(runs)
    main, rest = overlaid(groups)
    cards, data = curve_cards("compared", main, always=1)
    more, more_data = curve_cards("more", rest)
    if rest:
        cards += f"<details><summary>All other numbers ({len(rest)})</summary>{more}</details>"
    answers, drawn_from = _answers(runs)
    ran = facts({name: command_line(run) for name, run in runs.items()}, wide=True)
    sections = [
        Section(id="end", title="At the end", body=ends_table(groups)),
        Section(id="settings", title="What differs", body=differences_table(groups)),
        Section(id="curves", title="Curves", body=cards),
        *([Section(id="answers", title="Answers to the same prompts", body=answers)] if answers else []),
        Section(id="ran", title="What ran", body=ran),
    ]
    title = f"{len(runs)} runs compared"
    return page(title=title, lead=lead_of_groups(groups), sections=sections, data=[data, more_data, *drawn_from])


def compared_curves(runs: Mapping[str, RunFiles]) -> list[Chart]:
    """The main curves, for pictures."""
    return overlaid(groups_of(runs))[0]


def lead_of_groups(groups: Sequence[Group]) -> str:
    """Which lines there are."""
    several = [group for group in groups if len(group.runs) > 1]
    bands = " Of runs that differ in their seed alone the mean is drawn, and a band from the lowest to the highest."
    names = ", ".join(f"<b>{text(group.label)}</b>" for group in groups)
    return f'<p class="lead">{names}.{bands if several else ""}</p>'


def ends_table(groups: Sequence[Group]) -> str:
    """The last numbers of every group."""
    names, rows = ends(groups)
    caption = "The last evaluation; of what is logged at every step, the mean of the last tenth"
    return table(["run", *names], rows, numbers=1, caption=caption)


def differences_table(groups: Sequence[Group]) -> str:
    """The settings in which groups differ."""
    rows = differences(groups)
    if not rows:
        return '<p class="note">Nothing but seeds: all runs have the same settings.</p>'
    return table(["setting", *(group.label for group in groups)], [(name, *values) for name, values in rows])


def _answers(runs: Mapping[str, RunFiles]) -> tuple[str, list[Data]]:
    shared = list(shared_prompts(runs).items())[:_PROMPTS]
    if not shared:
        return "", []
    sets = [side_by_side(runs, prompt, places) for prompt, places in shared]
    view, data = token_view("answers", sets, unit=unit_of(next(iter(runs.values()))))
    return view, [data]
