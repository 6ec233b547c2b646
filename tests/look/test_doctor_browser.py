"""What the doctor finds, as marks on the curves of a run that trains and of its report, in a real browser."""

import pytest
from view_server import append, line, viewing, write_run

import rolecall
from rolecall.train.lock import RunLock


def entropies(first: int, last: int) -> list[str]:
    """Lines of a run whose entropy grows from step 10 on."""
    return [line(i, entropy=min(1 + max(0, i - 10) / 5, 4), loss=0.5 + i / 1000) for i in range(first, last + 1)]


@pytest.fixture
def sick(tmp_path):
    run = write_run(tmp_path / "sick", steps=0, of=200, algorithm={"name": "grpo", "entropy_coef": 0.5})
    append(run, *entropies(1, 30))
    return run


SHADED = """
const u = document.querySelector(`#curve-${arguments[0]} .plot`).curve?.plot;
if (!u) return null;
const x = Math.round(u.valToPos(arguments[1], "x", true)), y = Math.round(u.bbox.top + u.bbox.height / 2) + 3;
return [...Array(9).keys()].map((i) => u.ctx.getImageData(x, y + i, 1, 1).data[3]).some((alpha) => alpha > 0 && alpha < 128)
"""


def test_curves_are_marked_while_the_run_trains_and_when_it_ends(browser, sick):
    lock = RunLock(sick)
    with viewing(sick.parent) as server:
        browser.open(f"{server.base}/run/sick?token={server.token}")
        browser.until(lambda: browser.one("#findings h4").text.startswith("entropy-explosion"))
        assert browser.one("h1 .state").text == "running"
        assert "Try first: --algorithm.entropy_coef 0" in browser.one("#findings").text
        browser.until(lambda: browser.js(SHADED, "entropy", 20.5))
        assert not browser.js(SHADED, "entropy", 5.5), "only the steps of the finding are shaded"
        assert not browser.js(SHADED, "reward", 20.5), "only the curve that shows it is"
        label = "return document.querySelector('#curve-entropy .plot').getAttribute('aria-label')"
        assert "marked, steps" in browser.js(label)
        assert browser.js(label).endswith("to 30: entropy-explosion, likely")
        append(sick, *entropies(31, 40))
        lock.release()
        browser.until(lambda: browser.js(label).endswith("to 40: entropy-explosion, likely"), seconds=30)
        browser.until(lambda: browser.js(SHADED, "entropy", 38.5))
        assert [said for said in browser.complaints() if "getImageData" not in said] == []  # which is this test's


def test_they_are_marks_and_a_table_in_the_report_too(browser, sick):
    browser.open(rolecall.report(sick).path)
    marks = "return [...document.querySelectorAll('figure rect title')].map((t) => [t.closest('figure').querySelector('h4').textContent, t.textContent])"
    assert browser.js(marks) == [["Entropy", "entropy-explosion, likely"]]
    left, width = browser.js(
        "const r = document.querySelector('figure rect:has(title)'); return [+r.getAttribute('x'), +r.getAttribute('width')]"
    )
    assert left > 100, "the first third is not shaded"
    assert width > 50
    assert "entropy-explosion" in browser.one("#doctor, main").text
    assert browser.complaints() == []
