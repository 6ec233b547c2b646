"""What each page shows. Pages are rendered here, so that without scripts they still say all but the curves."""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from rolecall.errors import UserError
from rolecall.look.audit_page import audit_lead, audit_sections, read_tokens
from rolecall.look.charts import Chart, Series, four_digits
from rolecall.look.compare import groups_of, overlaid
from rolecall.look.curves import six_digits, thinned
from rolecall.look.doctor.audit import findings_of
from rolecall.look.doctor.marks import marked
from rolecall.look.page import data_block, section_html, text
from rolecall.look.records import sample_set, shortened, unit_of
from rolecall.look.report import before_after, lead_of, run_charts, what_ran
from rolecall.look.run import RunFiles
from rolecall.look.tokens import token_view
from rolecall.look.view.answers import VERDICTS, Query, beside, search
from rolecall.look.view.compare import comparison, read_compared, same_prompt
from rolecall.look.view.runs import KEPT, SEPARATOR, Runs, Summary, resources
from rolecall.train.lock import is_held
from rolecall.visible import visible_text

_POINTS = 2000
"""Points of a line; of a longer run each stretch keeps its extremes."""
_LOG_BYTES, _LOG_LINES = 1 << 14, 40
_SPARK = (96, 24)
_COMPARED = 24
"""Runs that one page compares at most."""


class NotThere(UserError):
    """A run or an answer that is not there."""


class Pages:
    """The pages over the runs of a directory."""

    def __init__(self, runs: Runs, *, version: str) -> None:
        """`version` is of the files that pages load."""
        self.runs = runs
        self._found = lru_cache(maxsize=KEPT)(lambda path, last_step: findings_of(self.runs.files(path)))
        env = Environment(
            loader=PackageLoader("rolecall.look.view"),
            autoescape=True,
            finalize=_visible,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        env.globals.update(version=version, root=str(runs.root), spark=spark, four=four_digits, address=address)
        env.filters.update(ending=shortened, beginning=beginning)
        self._env = env

    # -- pages -----------------------------------------------------------------------------------------------------

    def index(self) -> str:
        """The table of runs, or what to run if there are none."""
        found = self.runs.summaries()
        return self._render("runs.html" if found else "empty.html", runs=found, seen=_key(found))

    def table_key(self) -> str:
        """Changes when the table does."""
        return _key(self.runs.summaries())

    def run(self, run: str) -> str:
        """One run."""
        path = self.path(run)
        summary, files = self.runs.summary(run, path), self.files(path)
        return self._render(
            "run.html",
            run=summary,
            lead=Markup(lead_of(files)),
            damaged=self.runs.log(path).read().damaged,
            evaluated=Markup(before_after(files, held_out=True)),
            ran=Markup(what_ran(files)),
            resume=resume_command(summary, files, self.shown(path)),
            log=self._log(path),
            recorded=list(files.rollouts),
            report=(path / "report.html").is_file(),
            resources=resources(path),
            ended=files.about.get("ended", "") if summary.state == "crashed" else "",
        )

    def audit(self, name: str) -> str:
        """One audit, made again from the data in its page."""
        found = self.runs.audit(name)
        if found is None:
            raise NotThere(f"there is no audit {name!r} in {self.runs.root}; it may have been removed or renamed")
        view, data = read_tokens(found)
        sections = audit_sections(found.about, found.findings, view)
        return self._render(
            "audit.html",
            name=name.replace(SEPARATOR, "/"),
            audit=found,
            lead=audit_lead(found.findings),
            sections=sections,
            body=Markup("".join(map(section_html, sections))),
            data=Markup(data_block(data)) if data else "",
        )

    def answers(self, run: str, given: Mapping[str, str]) -> str:
        """Recorded answers, searched and filtered."""
        path = self.path(run)
        files, query = self.files(path), Query.read(given)
        before = given.get("before", "")
        return self._render(
            "answers.html",
            run=self.runs.summary(run, path),
            query=query,
            found=search(files, query, before=int(before) if before.isascii() and before.isdigit() else None),
            recorded=len(files.rollouts),
            kept=len(files.updates),
            verdicts=list(VERDICTS),
        )

    def answer(self, run: str, step: int, row: int, given: Mapping[str, str]) -> str:
        """One answer token by token, beside the others of its group."""
        path = self.path(run)
        files, query = self.files(path), Query.read(given)
        if step not in files.rollouts:
            why = "save.rollouts says how many steps stay" if files.rollouts else "it has no rollouts"
            raise NotThere(f"step {step} of {run} is not recorded: {why}")
        unit = unit_of(files)
        try:
            shown = sample_set(files, step, unit=unit, rows=[row])
        except IndexError:
            raise NotThere(f"step {step} of {run} has no answer {row}") from None
        previous, following = beside(files, step, row, query)
        html, data = token_view("view", [shown], unit=unit)
        html = html.replace(
            '<div class="view"', f'<div class="view" data-base="{text(address(run, "answers", step))}"', 1
        )
        return self._render(
            "answer.html",
            run=self.runs.summary(run, path),
            step=step,
            row=row,
            title=shown.samples[0].title,
            query=query,
            searching=bool(query.params()),
            previous=previous,
            following=following,
            view=Markup(html),
            data=Markup(data_block(data)),
        )

    def compare(self, ids: Sequence[str]) -> str:
        """Several runs together."""
        return self._render("compare.html", **comparison(self, _several(ids)))

    def same_prompt(self, ids: Sequence[str], key: str) -> str:
        """Answers of several runs to the same prompt."""
        return self._render("same_prompts.html", **same_prompt(self, _several(ids), key))

    def error(self, sentence: str) -> str:
        """A page that says why there is no other."""
        return self._render("error.html", sentence=sentence)

    # -- data ------------------------------------------------------------------------------------------------------

    def curves(self, run: str) -> dict[str, Any]:
        """All curves of a run, and how much of its logs that is."""
        path = self.path(run)
        files, seen = self.files(path), self.runs.log(path).read().seen
        return {"seen": seen, "charts": chart_values(*run_charts(files))}

    def compared_curves(self, ids: Sequence[str], *, also_rest: bool) -> dict[str, Any]:
        """The curves of several runs, overlaid: the main ones, and how many others there are, or those too."""
        main, rest = overlaid(groups_of(read_compared(self, _several(ids))), also_rest=also_rest)
        return {"charts": chart_values(main, rest if also_rest else ()), "rest": len(rest)}

    def news(self, run: str, seen: tuple[int, ...]) -> dict[str, Any]:
        """The points of a run's curves that came after those that were seen."""
        path = self.path(run)
        lines = self.runs.log(path).read(seen=(seen[0], seen[1], seen[2]))
        new = {"seen": lines.seen, "restarted": lines.restarted, "state": self.runs.summary(run, path).state}
        if lines.seen == seen or lines.restarted:
            return new
        files = self.files(path)
        fresh = replace(files, steps=lines.steps, timing=lines.timing)
        return {**new, "charts": chart_values(*run_charts(fresh))}

    def findings(self, run: str) -> dict[str, Any]:
        """What the doctor finds, and the steps of each to shade."""
        path = self.path(run)
        files = self.files(path)
        if not files.steps:
            return {"found": [], "marks": {}}
        found = self._found(path, files.last_step)
        main, _ = run_charts(files)
        return {
            "found": [{name: _visible(value) for name, value in asdict(one).items()} for one in found],
            "marks": {chart.name: [list(mark) for mark in chart.marks] for chart in marked(main, found) if chart.marks},
        }

    # -- parts -----------------------------------------------------------------------------------------------------

    def path(self, run: str) -> Path:
        """Where a run lies."""
        path = self.runs.path(run)
        if path is None:
            raise NotThere(f"there is no run {run!r} in {self.runs.root}; it may have been removed or renamed")
        return path

    def files(self, path: Path) -> RunFiles:
        """A run as it is now; one whose first files are still to come has none of what they say."""
        if not (path / "run.json").exists() and is_held(path):
            raise UserError(f"{path.name} is being built and has written nothing yet; this page shows it when it has")
        return self.runs.files(path)

    def shown(self, path: Path) -> str:
        """A path as somebody would write it in the directory that the server was started in."""
        here = Path.cwd()
        return str(path.relative_to(here) if path.is_relative_to(here) else path)

    def _log(self, path: Path) -> tuple[str, str] | None:
        """(name, last lines) of what the run printed."""
        file = self.runs.log_of(path)
        if file is None:
            return None
        with file.open("rb") as held:
            size = held.seek(0, os.SEEK_END)
            held.seek(max(0, size - _LOG_BYTES))
            text = held.read(_LOG_BYTES).decode("utf-8", "replace")
        lines = [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").rstrip("\n").split("\n")]
        return file.name, "\n".join(lines[-_LOG_LINES:])

    def _render(self, template: str, **given: Any) -> str:
        return self._env.get_template(template).render(**given).encode("utf-8", "replace").decode()


def _key(found: Sequence[Summary]) -> str:
    short = [replace(one, spark=one.spark[-1:]) for one in found]
    return sha256(repr(short).encode("utf-8", "replace")).hexdigest()[:16]


def _several(ids: Sequence[str]) -> list[str]:
    """Each run once."""
    once = list(dict.fromkeys(ids))
    if len(once) < 2:
        raise UserError("choose two or more runs to compare")
    if len(once) > _COMPARED:
        raise UserError(f"{len(once)} runs are more than a page compares: choose at most {_COMPARED}")
    return once


def beginning(text: str, most: int = 90) -> str:
    """The begin of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def _visible(value: Any) -> Any:
    """Whatever goes into a page: what cannot be seen is spelt out. What is markup already was made so."""
    return visible_text(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def chart_values(main: Sequence[Chart], rest: Sequence[Chart]) -> list[dict[str, Any]]:
    """Charts as the page's script reads them."""
    charts = [*((chart, True) for chart in main), *((chart, False) for chart in rest)]
    return [{**_chart(thinned(chart, _POINTS)), "main": first} for chart, first in charts]


def _chart(chart: Chart) -> dict[str, Any]:
    return {
        "name": chart.name,
        "title": visible_text(chart.title),
        "about": visible_text(chart.about),
        "xs": list(chart.xs),
        "series": [_series(s) for s in chart.series],
        "stacked": chart.stacked,
        "sparse": chart.sparse,
    }


def _series(series: Series) -> dict[str, Any]:
    held: dict[str, Any] = {"label": visible_text(series.label), "ys": [six_digits(y) for y in series.ys]}
    if series.low is not None and series.high is not None:
        held |= {"low": [six_digits(y) for y in series.low], "high": [six_digits(y) for y in series.high]}
    return held


def address(run: str, *parts: object, kind: str = "run", **query: object) -> str:
    """The address of a run or an audit, or of something of it."""
    path = "/".join([f"/{kind}", quote(run, safe=":"), *(quote(str(part), safe="") for part in parts)])
    given = "&".join(
        f"{quote(name)}={quote(str(value), safe='')}" for name, value in query.items() if value not in (None, "")
    )
    return f"{path}?{given}" if given else path


def spark(values: Sequence[float]) -> str:
    """The points of a small line."""
    width, height = _SPARK
    low, high = min(values), max(values)
    span, last = (high - low) or 1.0, max(1, len(values) - 1)
    place = partial(_place, width=width, height=height)
    return " ".join(place(i / last, (value - low) / span) for i, value in enumerate(values))


def _place(x: float, y: float, *, width: int, height: int) -> str:
    return f"{1 + x * (width - 2):.1f},{2 + (1 - y) * (height - 4):.1f}"


def resume_command(run: Summary, files: RunFiles, out: str) -> str:
    """What goes on with a run that is not running and lies in `out`."""
    processes = files.about.get("processes", 1)
    start = (
        f"torchrun --nproc_per_node {processes} -m rolecall"
        if isinstance(processes, int) and processes > 1
        else "rolecall"
    )
    more = " --steps +100" if run.state == "done" else ""
    return f"{start} {files.command} --out {shlex.quote(out)} --resume{more}"
