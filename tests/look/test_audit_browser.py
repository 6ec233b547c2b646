"""The page of an audit in a real browser. Made from records by hand: a page needs no model."""

import pytest
from look_runs import HOSTILE

from rolecall.jobs.audit import write_page
from rolecall.maths.roles import Verdict
from rolecall.recipes.audit import Audit, Finding, Level, TokenSample


def sample(*pieces):
    n = len(pieces)
    verdicts = ("GIVEN", *("TRAINED",) * (n - 1))
    return TokenSample(
        title="rows.jsonl, line 3, answer 0",
        note="stop, 2 tokens, reward 1",
        ids=tuple(range(n)),
        pieces=pieces,
        roles=("PROMPT", *("CONTENT",) * (n - 2), "STOP"),
        verdicts=verdicts,
        reasons={name: Verdict[name].sentence for name in set(verdicts)},
        logprobs=(None, *(-0.5,) * (n - 1)),
        score=1.0,
    )


def finding(check, level, *evidence, summary="one sentence", advice=""):
    return Finding(check=check, level=Level(level), summary=summary, evidence=evidence, advice=advice)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("audit") / "audit.html"
    findings = (
        finding("stop-ids", "ok", "answers end at 2"),
        finding("gold", "warning", "row 7", summary="scores more", advice="look at the reward"),
        finding("context", "error", "row 9: 2000 tokens", summary="too long", advice="shorten it"),
        finding("seam", "skipped", summary="the rows have no answers"),
    )
    about = {"model": "some/model", "rows": "rows.jsonl"}
    write_page(Audit(about=about, findings=findings, samples=(sample(b"1+1=", b"2", b"<|end|>"),)), path)
    return path


def test_it_opens_from_disk_and_the_worst_comes_first(browser, page):
    browser.open(page)
    assert browser.asked_for() == [page.as_uri()]
    assert browser.complaints() == []
    assert browser.one("h1").text == "Audit of some/model on rows.jsonl"
    assert browser.one(".lead").text == "1 error and 1 warning in 4 checks. Put the errors right before training."
    found = [article.text.splitlines() for article in browser.all("article.finding")]
    assert found == [
        ["ERROR context", "too long", "row 9: 2000 tokens", "Change: shorten it"],
        ["WARNING gold", "scores more", "row 7", "Change: look at the reward"],
    ]
    assert [row.text.split()[:2] for row in browser.all("#checks tbody tr")] == [
        ["stop-ids", "ok"],
        ["seam", "skipped"],
    ]


def test_a_token_says_why_it_trains(browser, page):
    browser.open(page)
    browser.js("document.querySelectorAll('.strip .tok')[1].focus()")
    assert Verdict.TRAINED.sentence in browser.one(".told").text
    assert "-0.5" in browser.one(".told").text
    browser.js("document.querySelectorAll('.strip .tok')[0].focus()")
    assert Verdict.GIVEN.sentence in browser.one(".told").text


def test_an_audit_that_found_nothing_says_so(browser, tmp_path):
    path = tmp_path / "audit.html"
    write_page(Audit(about={"model": "m", "rows": "r"}, findings=(finding("gold", "ok"),)), path)
    browser.open(path)
    assert browser.one(".lead").text == "0 errors and 0 warnings in 1 check. No error stands in the way of training."
    assert "Nothing was found" in browser.one("#problems").text
    assert browser.all(".view") == []


def test_hostile_text_is_shown_and_does_nothing(browser, tmp_path):
    path = tmp_path / "audit.html"
    bad = "".join(HOSTILE) + "\ud800"
    findings = (finding(bad, "error", bad, summary=bad, advice=bad), finding(bad, "ok", bad, summary=bad))
    pieces = (b"p", *(text.encode() for text in HOSTILE), b"\xff")
    write_page(Audit(about={"model": bad, "rows": bad, bad: bad}, findings=findings, samples=(sample(*pieces),)), path)
    browser.open(path)
    assert browser.js("return document.title").startswith("Audit of <img")
    assert browser.complaints() == []
    assert browser.asked_for() == [path.as_uri()]
    assert browser.all("main img, main script, main svg[onload]") == []
    assert HOSTILE[0] in browser.one("article.finding").text
    assert not set(path.read_text(encoding="utf-8")) & {"\u202e", "\x1b", "\x00"}


@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_runs_over_the_side(browser, page, width, scheme):
    browser.open(page, width=width, scheme=scheme)
    assert browser.js("return document.documentElement.scrollWidth") <= width


def test_headings_go_down_and_names_are_unique(browser, page):
    browser.open(page)
    ids = browser.js("return [...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    labelled = browser.js(
        "return [...document.querySelectorAll('[aria-labelledby]')].map(e => e.ariaLabelledByElements?.length ?? !!document.getElementById(e.getAttribute('aria-labelledby')))"
    )
    assert all(labelled)
