"""Audits in `rolecall view`: listed beside runs, and shown from the data in their pages, never by their markup."""

import re
import shutil

import pytest
from look_runs import HOSTILE
from test_audit_browser import finding, sample
from view_server import viewing, write_run

from rolecall.jobs.audit import write_page
from rolecall.look.audit_page import read_audit
from rolecall.recipes.audit import Audit


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    runs = tmp_path_factory.mktemp("audited") / "runs"
    write_run(runs / "first")
    good = Audit(about={"model": "tiny", "rows": "sorting"}, findings=(finding("gold", "ok", "row 7"),))
    write_page(good, runs / "audit-1.html")
    findings = (
        finding("context", "error", HOSTILE[0], summary=HOSTILE[1], advice=HOSTILE[2]),
        finding("gold", "warning"),
    )
    about = {"command": "rolecall rl", "model": HOSTILE[0], "rows": HOSTILE[3], HOSTILE[1]: HOSTILE[0]}
    samples = (sample(b"ask", *(text.encode() for text in HOSTILE), b"<|end|>"),)
    (runs / "sweep").mkdir()
    write_page(Audit(about=about, findings=findings, samples=samples), runs / "sweep" / f"{HOSTILE[2]}.html")
    (runs / "compare.html").write_text("<!doctype html><p>no audit")
    whole = (runs / "audit-1.html").read_text()
    mark = whole.index('id="audit">')
    (runs / "torn.html").write_text(whole[: mark + 40])
    (runs / "newer.html").write_text(whole.replace('"format":1', '"format":99'))
    (runs / "odd.html").write_text(
        whole[:mark] + 'id="audit">{"format":1,"title":"x","about":[],"findings":1e999}</script>'
    )
    shutil.copy(runs / "audit-1.html", runs.parent / "outside.html")
    (runs / "linked.html").symlink_to(runs.parent / "outside.html")
    return runs


@pytest.fixture(scope="module")
def server(runs):
    with viewing(runs) as server:
        yield server


def test_they_are_listed_with_what_they_found_and_open(browser, server):
    browser.open(f"{server.base}/?token={server.token}")
    assert browser.one("h1").text == "1 run, 5 audits"
    states = {row.get_attribute("data-name"): row.get_attribute("data-state") for row in browser.all("tbody tr")}
    bad = {"torn.html": "unreadable", "newer.html": "unreadable", "odd.html": "unreadable"}
    assert states == {"first": "done", "audit-1": "done", f"sweep/{HOSTILE[2]}": "errors", **bad}
    problems = {row.get_attribute("data-name"): row.text for row in browser.all("tbody tr")}
    assert "torn or changed; run the audit again" in problems["torn.html"]
    assert "torn or changed; run the audit again" in problems["odd.html"]
    assert "is the page of an audit by a newer rolecall" in problems["newer.html"]
    browser.js("[...document.querySelectorAll('tbody a')].find((a) => a.textContent === 'audit-1').focus()")
    browser.press("ENTER")
    browser.until(lambda: browser.one("h1").text == "Audit of tiny on sorting")
    assert browser.one(".lead").text.startswith("0 errors and 0 warnings in 1 check.")
    assert browser.complaints() == []


def test_what_changes_before_the_stream_begins_is_told_too(server, runs):
    (seen,) = re.findall(r'data-seen="(\w+)"', server.ask("/")[2])
    run = write_run(runs / "between")
    with server.stream(f"/events?seen={seen}") as lines:
        assert next(line for line in lines if line.startswith("event")) == "event: changed"
    shutil.rmtree(run)


def test_one_that_appears_goes_and_comes_with_errors_is_in_the_table_by_itself(browser, server, runs):
    browser.open(f"{server.base}/?token={server.token}")
    state = "return document.querySelector('[data-run=\"later.html\"]')?.dataset.state ?? ''"
    for level, word in (("ok", "done"), ("error", "errors")):
        write_page(Audit(about={"model": "m", "rows": "r"}, findings=(finding("gold", level),)), runs / "later.html")
        browser.until(lambda word=word: browser.js(state) == word)
    (runs / "later.html").unlink()
    browser.until(lambda: browser.js(state) == "")
    assert browser.complaints() == []


def test_hostile_text_in_one_is_text_and_its_own_markup_is_not_served(browser, server, runs):
    name = f"sweep:{HOSTILE[2]}.html"
    browser.open(f"{server.base}/?token={server.token}")
    link = browser.js("return document.querySelector(`tbody tr[data-state=errors] a`).getAttribute('href')")
    status, headers, page = server.ask(link)
    assert status == 200, name
    assert "unsafe" not in headers["content-security-policy"]
    assert not re.search(r"<script(?! type=\"application/json\"| src=)|<style|<meta http-equiv", page)
    browser.open(f"{server.base}{link}")
    assert browser.driver.title.startswith("Audit of <img")
    assert not browser.all("main img, main svg[onload], main script")
    assert HOSTILE[0] in browser.one("article.finding").text
    assert browser.all(".strip .tok"), "tokens are drawn"
    for width in (400, 1600):
        browser.open(f"{server.base}{link}", width=width)
        assert browser.js("return document.documentElement.scrollWidth") <= width
    assert browser.complaints() == []


@pytest.mark.parametrize(
    "name", ["linked.html", "compare.html", "gone.html", "first", "outside.html", "..:outside.html"]
)
def test_what_is_no_audit_here_is_not_shown(name, server):
    status, _, page = server.ask(f"/audit/{name}")
    assert status == 404
    assert "there is no audit" in page


def test_a_page_is_read_as_it_was_written(runs):
    read = read_audit(runs / "sweep" / f"{HOSTILE[2]}.html")
    assert read.count("error") == 1
    assert (read.findings[1].check, read.findings[1].level) == ("gold", "warning")
    assert read.tokens["sets"][0]["samples"][0]["length"] == len(HOSTILE) + 2
    assert read_audit(runs / "compare.html") is None
