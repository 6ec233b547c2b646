"""The page of an audit: what has to be put right, what was looked at, and samples token by token."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.errors import UserError
from rolecall.look.page import Data, Section, facts, page, table, text
from rolecall.look.tokens import Sample, SampleSet, token_view
from rolecall.visible import visible_text

FORMAT = 1
"""The layout of a page's data that this version reads."""
_DATA, _TOKENS = "audit", "samples"
_MARK = '<script type="application/json" id="{id}">'
_LARGEST = 1 << 25
"""Bytes beyond which a file is not looked into."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditFinding:
    """What one check found, as a page holds it."""

    check: str
    level: str
    """error, warning, ok or skipped."""
    summary: str
    evidence: tuple[str, ...]
    """What shows it."""
    advice: str
    """What to change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadAudit:
    """What the file of an audit's page says."""

    title: str
    about: Mapping[str, str]
    findings: tuple[AuditFinding, ...]
    tokens: Mapping[str, object] | None
    """What the token view is drawn from."""

    def count(self, level: str) -> int:
        """Findings of a level."""
        return sum(found.level == level for found in self.findings)


def audit_html(*, title: str, about: Mapping[str, str], findings: Sequence[Any], samples: Sequence[Sample]) -> str:
    """One self-contained page. A finding is anything with the fields of an `AuditFinding`."""
    held = _value(title, about, findings)
    data, view, found = [Data(id=_DATA, value=held)], "", [*map(_finding, held["findings"])]
    if samples:
        view, drawn_from = token_view(_TOKENS, [SampleSet(label="samples", samples=samples)])
        data.append(drawn_from)
    lead = f'<p class="lead"><b>{audit_lead(found)}</b></p>'
    return page(title=title, lead=lead, sections=audit_sections(about, found, view), data=data)


def audit_sections(about: Mapping[str, str], findings: Sequence[AuditFinding], view: str) -> list[Section]:
    """The parts of the page; `view` is the HTML of the token view, if there is one."""
    bad = [f for level in ("error", "warning") for f in findings if f.level == level]
    fine = [f for level in ("ok", "skipped") for f in findings if f.level == level]
    looked_at = [(f.check, f.level, f.summary, "; ".join(f.evidence)) for f in fine]
    checks = table(["check", "result", "what was found", "numbers"], looked_at)
    sections = [
        Section(id="problems", title="What to put right", body="".join(map(_problem, bad)) or _NOTHING),
        Section(id="checks", title="What else was looked at", body=checks),
    ]
    if view:
        sections.append(Section(id="tokens", title="Token by token", body=_NOTE + view))
    return [*sections, Section(id="what", title="What was audited", body=facts(about))]


def read_audit(path: Path) -> ReadAudit | None:
    """What the page in a file says, which is read as data alone; None if it is no audit's."""
    html = path.read_text(encoding="utf-8", errors="replace") if path.stat().st_size <= _LARGEST else ""
    if _MARK.format(id=_DATA) not in html:
        return None
    try:
        held, tokens = _data(html, _DATA), _data(html, f"data-{_TOKENS}")
        newer = held["format"] > FORMAT
        found = None if newer else _read(held, tokens)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise UserError(f"{path} is the page of an audit, but torn or changed; run the audit again") from None
    if newer:
        raise UserError(f"{path} is the page of an audit by a newer rolecall; install a newer one")
    return found


def _read(held: Mapping[str, Any], tokens: Mapping[str, Any]) -> ReadAudit:
    return ReadAudit(
        title=str(held["title"]),
        about={str(name): str(value) for name, value in held["about"].items()},
        findings=tuple(map(_finding, held["findings"])),
        tokens=tokens or None,
    )


def _finding(held: Mapping[str, Any]) -> AuditFinding:
    words = {name: str(held[name]) for name in ("check", "level", "summary", "advice")}
    return AuditFinding(**words, evidence=tuple(map(str, held["evidence"])))


def read_tokens(audit: ReadAudit) -> tuple[str, Data | None]:
    """The HTML of its token view, and the data it is drawn from."""
    if audit.tokens is None:
        return "", None
    html, _ = token_view(_TOKENS, [])
    return html, Data(id=f"data-{_TOKENS}", value=audit.tokens)


def _value(title: str, about: Mapping[str, str], findings: Sequence[Any]) -> dict[str, Any]:
    """What `read_audit` reads."""
    held = [
        {name: visible_text(str(getattr(found, name))) for name in ("check", "level", "summary", "advice")}
        | {"evidence": list(map(visible_text, found.evidence))}
        for found in findings
    ]
    said = {visible_text(name): visible_text(value) for name, value in about.items()}
    return {"format": FORMAT, "title": visible_text(title), "about": said, "findings": held}


def _data(html: str, name: str) -> dict[str, Any]:
    """A block of data of the page; empty if there is none."""
    _, there, rest = html.partition(_MARK.format(id=name))
    if not there:
        return {}
    held = json.loads(rest[: rest.index("</script>")])
    json.dumps(held, allow_nan=False)  # a number that is none would stop a page that shows it
    if not isinstance(held, dict):
        raise ValueError
    return held


_NOTHING = '<p class="ok">Nothing was found that has to be put right.</p>'
_NOTE = '<p class="note">Every token as training would see it. A solid line below a token says that it trains.</p>'


def audit_lead(findings: Sequence[AuditFinding]) -> str:
    """How many errors and warnings there are, in a sentence."""
    count = Counter(f.level for f in findings)
    words = [f"{count[level]} {level}{'s' * (count[level] != 1)}" for level in ("error", "warning")]
    what = "Put the errors right before training." if count["error"] else "No error stands in the way of training."
    return f"{' and '.join(words)} in {len(findings)} check{'s' * (len(findings) != 1)}. {what}"


def _problem(finding: AuditFinding) -> str:
    evidence = "".join(f"<li>{text(line)}</li>" for line in finding.evidence)
    name = f"finding-{''.join(c for c in finding.check if c.isalnum() or c == '-')}"
    return (
        f'<article class="finding {"error" if finding.level == "error" else "warning"}" aria-labelledby="{name}">'
        f'<h3 id="{name}"><span class="level">{text(finding.level)}</span> {text(finding.check)}</h3>'
        f"<p>{text(finding.summary)}</p><ul>{evidence}</ul>"
        f"<p><b>Change:</b> {text(finding.advice)}</p></article>"
    )
