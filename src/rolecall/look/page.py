"""The shell of a page: head, style, script, and the data the script reads. Whatever text goes in stays text."""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files

from rolecall.visible import visible_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A part of a page with a heading that the navigation leads to."""

    id: str
    """Unique on the page; letters, digits and dashes."""
    title: str
    """The heading, as plain text."""
    body: str
    """HTML."""
    level: int = 1
    """1 for a section, 2 for one inside the section before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """Something for the page's script, as JSON in an element that nothing inside it can close."""

    id: str
    """The element's id."""
    value: object
    """What JSON can hold."""


def text(value: object) -> str:
    """Anything as HTML that shows it as text: markup is escaped, what cannot be seen is spelt out."""
    return escape(visible_text(str(value)), quote=True)


def page(*, title: str, lead: str = "", sections: Sequence[Section], data: Sequence[Data] = ()) -> str:
    """One self-contained page. `lead` is HTML below the title."""
    style = asset("page.css")
    script = f'"use strict";\n(() => {{\n{asset("page.js")}\n{asset("curves.js")}}})();'
    links = "".join(f'<li><a href="#{s.id}">{text(s.title)}</a></li>' for s in sections if s.level == 1)
    navigation = f'<nav aria-label="Sections"><ul>{links}</ul></nav>' if links else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_policy(style, script)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{text(title)}</title>
<style>{style}</style>
</head>
<body>
<a class="skip" href="#content">Skip to the content</a>
<header class="top"><h1>{text(title)}</h1>{lead}</header>
{navigation}
<main id="content" tabindex="-1">
{"".join(map(section_html, sections))}
</main>
<noscript><p class="note">Curves are drawn without scripts; the token view needs them.</p></noscript>
{"".join(map(data_block, data))}
<script>{script}</script>
</body>
</html>
"""


def table(head: Sequence[str], rows: Sequence[Sequence[object]], *, caption: str = "", numbers: int = 0) -> str:
    """A table of plain values; the first cell of a row is its heading, columns from `numbers` on hold numbers."""

    def cell(i: int, value: object) -> str:
        kind = ' class="n"' if numbers and i >= numbers else ""
        return f'<th scope="row">{text(value)}</th>' if i == 0 else f"<td{kind}>{text(value)}</td>"

    titles = "".join(
        f'<th scope="col"{" class=n" if numbers and i >= numbers else ""}>{text(name)}</th>'
        for i, name in enumerate(head)
    )
    body = "".join("<tr>" + "".join(cell(i, v) for i, v in enumerate(row)) + "</tr>" for row in rows)
    above = f"<caption>{text(caption)}</caption>" if caption else ""
    name = text(caption or " and ".join(head[:2]))
    whole = f"<table>{above}<thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="group" aria-label="{name}">{whole}</div>'


def facts(pairs: Mapping[str, object], *, wide: bool = False) -> str:
    """Names and values, a line each; in columns unless `wide`."""
    lines = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in pairs.items())
    return f'<dl class="facts{" wide" if wide else ""}">{lines}</dl>'


def section_html(section: Section) -> str:
    """A section with its heading."""
    tag = f"h{section.level + 1}"
    return (
        f'<section id="{section.id}" aria-labelledby="{section.id}-title" class="level{section.level}">'
        f'<{tag} id="{section.id}-title">{text(section.title)}</{tag}>{section.body}</section>\n'
    )


def data_block(data: Data) -> str:
    """The element that holds it."""
    held = json.dumps(data.value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Inside a script element only these could end it, open a comment in it, or end a line for older scripts.
    for character in "<>&\u2028\u2029":
        held = held.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" id="{data.id}">{held}</script>\n'


@cache
def asset(name: str) -> str:
    """A file of `assets/`, as text."""
    return (files("rolecall.look") / "assets" / name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """Nothing may be loaded or sent, and only this page's own style and script act."""

    def own(content: str) -> str:
        return f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'"

    return f"default-src 'none'; style-src {own(style)}; script-src {own(script)}; base-uri 'none'; form-action 'none'"
