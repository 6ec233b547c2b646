"""`rolecall audit` on the terminal."""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rolecall.config.audit import AuditOptions
from rolecall.files import plain
from rolecall.jobs.audit import run as audit
from rolecall.jobs.audit import write_page
from rolecall.recipes.audit import Audit, Finding, Level, TokenSample
from rolecall.visible import visible_text, visible_token

_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "bold red", Level.SKIPPED: "dim"}
_ENDS = 24
"""Tokens shown of each end of a long run."""
_ORDER = (Level.ERROR, Level.WARNING, Level.OK, Level.SKIPPED)


def run(options: AuditOptions) -> int:
    """Print samples and findings, the worst last, and write the page; 1 if there is an error."""
    page = _page_path(options)
    with _working(options):
        found = audit(options)
    if options.json:
        print(json.dumps(_as_json(found), ensure_ascii=False))
    else:
        _show(found, quiet=options.quiet)
    if page is not None:
        write_page(found, page)
        if not options.quiet:
            print(f"page: {page}", file=sys.stderr)
    return 1 if found.errors else 0


def _page_path(options: AuditOptions) -> Path | None:
    """Where the page goes."""
    if not options.page:
        return None
    if options.html is not None:
        return Path(options.html).expanduser()
    number = 1
    while Path(f"audit-{number}.html").exists():
        number += 1
    return Path(f"audit-{number}.html")


def _working(options: AuditOptions) -> AbstractContextManager[object]:
    """Something that moves on a terminal while the model answers."""
    console = Console(stderr=True)
    if options.quiet or not console.is_terminal:
        return nullcontext()
    answers = f", {options.groups} x {options.samples} answers" if options.job == "rl" else ""
    return console.status(Text(f"looking at {visible_text(options.model)} and its rows{answers}"))


def _as_json(found: Audit) -> dict[str, object]:
    samples = [
        {
            "title": sample.title,
            "note": sample.note,
            "score": sample.score,
            "ids": sample.ids,
            "tokens": sample.tokens,
            "roles": [role.lower() for role in sample.roles],
            "verdicts": [verdict.lower() for verdict in sample.verdicts],
            "logprobs": sample.logprobs,
        }
        for sample in found.samples
    ]
    return {"about": dict(found.about), "findings": [plain(f) for f in found.findings], "samples": samples}


def _show(found: Audit, *, quiet: bool) -> None:
    console = Console(highlight=False, soft_wrap=True)
    if not quiet:
        for name, value in found.about.items():
            console.print(Text(f"{name:10} {visible_text(value)}"))
        for sample in found.samples:
            console.print(Text("\n".join(_table(sample))))
        console.print()
    width = max(len(f.check) for f in found.findings)
    for finding in sorted(found.findings, key=lambda f: -_ORDER.index(f.level)):
        if not quiet or finding.problem:
            for line in _lines(finding, width):
                console.print(line)
    console.print(Text(_summary(found)))


def _lines(finding: Finding, width: int) -> Iterator[Text]:
    margin = " " * (11 + width)
    yield Text.assemble(
        (f"{finding.level:7}", _STYLES[finding.level]), f"  {finding.check:{width}}  {visible_text(finding.summary)}"
    )
    for evidence in finding.evidence if finding.problem else ():
        yield Text(f"{margin}{visible_text(evidence)}", style="dim")
    if finding.advice:
        yield Text(f"{margin}change: {visible_text(finding.advice)}")


def _summary(found: Audit) -> str:
    levels = Counter(f.level for f in found.findings)
    counts = [f"{levels[level]} {level}{'s' * (level in _ORDER[:2] and levels[level] != 1)}" for level in _ORDER]
    return f"\n{', '.join(counts)}"


def _table(sample: TokenSample) -> Iterator[str]:
    """A line per token, then what the verdicts mean. Of a long run of the same role the middle is left out."""
    yield f"\n{visible_text(sample.title)}: {sample.note}"
    yield "   pos  role         verdict         log-prob      id  token"
    columns = (sample.roles, sample.verdicts, sample.logprobs, sample.ids, sample.tokens)
    lines = [
        f"{position:6}  {role.lower():11}  {verdict.lower():14}  {'-' if logprob is None else f'{logprob:.3f}':>8}  "
        f"{token:6}  {visible_token(text)}"
        for position, (role, verdict, logprob, token, text) in enumerate(zip(*columns, strict=True))
    ]
    for _, run in groupby(range(len(lines)), key=lambda i: sample.roles[i]):
        places = list(run)
        if len(places) <= 2 * _ENDS:
            yield from (lines[i] for i in places)
            continue
        yield from (lines[i] for i in places[:_ENDS])
        yield f"     …  {len(places) - 2 * _ENDS} more; the page shows them all"
        yield from (lines[i] for i in places[-_ENDS:])
    for sentence in sample.reasons.values():
        yield f"        {sentence}"
