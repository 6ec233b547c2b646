"""The page of an audit: what has to be put right, what was looked at, and samples token by token."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from rolecall.look.page import Section, facts, page, table, text
from rolecall.look.tokens import Sample, SampleSet, token_view


class Finding(Protocol):
    """What one check found: its name, its level (error, warning, ok or skipped), one sentence, what shows it, what to change."""

    @property
    def check(self) -> str: ...
    @property
    def level(self) -> str: ...
    @property
    def summary(self) -> str: ...
    @property
    def evidence(self) -> Sequence[str]: ...
    @property
    def advice(self) -> str: ...


def audit_html(*, title: str, about: Mapping[str, str], findings: Sequence[Finding], samples: Sequence[Sample]) -> str:
    """One self-contained page."""
    bad = [f for level in ("error", "warning") for f in findings if f.level == level]
    fine = [f for level in ("ok", "skipped") for f in findings if f.level == level]
    sections = [
        Section(id="problems", title="What to put right", body="".join(map(_problem, bad)) or _NOTHING),
        Section(
            id="checks",
            title="What else was looked at",
            body=table(
                ["check", "result", "what was found", "numbers"],
                [(f.check, f.level, f.summary, "; ".join(f.evidence)) for f in fine],
            ),
        ),
    ]
    data = []
    if samples:
        view, drawn_from = token_view("samples", [SampleSet(label="samples", samples=samples)])
        sections.append(Section(id="tokens", title="Token by token", body=_TOKENS + view))
        data.append(drawn_from)
    sections.append(Section(id="what", title="What was audited", body=facts(about)))
    return page(title=title, lead=f'<p class="lead"><b>{_verdict(findings)}</b></p>', sections=sections, data=data)


_NOTHING = '<p class="ok">Nothing was found that has to be put right.</p>'
_TOKENS = '<p class="note">Every token as training would see it. A solid line below a token says that it trains.</p>'


def _verdict(findings: Sequence[Finding]) -> str:
    count = Counter(f.level for f in findings)
    words = [f"{count[level]} {level}{'s' * (count[level] != 1)}" for level in ("error", "warning")]
    what = "Put the errors right before training." if count["error"] else "No error stands in the way of training."
    return f"{' and '.join(words)} in {len(findings)} check{'s' * (len(findings) != 1)}. {what}"


def _problem(finding: Finding) -> str:
    evidence = "".join(f"<li>{text(line)}</li>" for line in finding.evidence)
    name = f"finding-{''.join(c for c in finding.check if c.isalnum() or c == '-')}"
    return (
        f'<article class="finding {"error" if finding.level == "error" else "warning"}" aria-labelledby="{name}">'
        f'<h3 id="{name}"><span class="level">{text(finding.level)}</span> {text(finding.check)}</h3>'
        f"<p>{text(finding.summary)}</p><ul>{evidence}</ul>"
        f"<p><b>Change:</b> {text(finding.advice)}</p></article>"
    )
