"""Theme and smoothing of the report, in a real browser."""

import pytest
from look_runs import copied, relog

import rolecall


@pytest.fixture
def fresh(browser, page):
    """The page as somebody sees it for the first time."""
    browser.open(page)
    browser.js("localStorage.clear()")
    browser.open(page)
    yield browser
    browser.js("localStorage.clear()")


def ground(browser):
    return int(browser.js("return getComputedStyle(document.body).backgroundColor")[4:].split(",")[0])


def test_the_theme_follows_the_system_until_one_is_chosen_and_is_remembered(fresh, page):
    for scheme in ("light", "dark"):
        fresh.open(page, scheme=scheme)
        assert fresh.js("return document.querySelector('.tools select').value") == "system"
        assert (ground(fresh) > 128) == (scheme == "light")
    for theme, scheme in (("dark", "light"), ("light", "dark")):
        fresh.open(page, scheme=scheme)
        fresh.choose(".tools select", theme)
        assert (ground(fresh) > 128) == (theme == "light")
        assert fresh.js("return getComputedStyle(document.documentElement).colorScheme") == theme
        fresh.open(page, scheme=scheme)
        assert (ground(fresh) > 128) == (theme == "light")
    fresh.choose(".tools select", "system")
    assert ground(fresh) < 128
    assert fresh.complaints() == []


PATHS = "return [...document.querySelectorAll('.plot path.line:not(.raw)')].map((p) => p.getAttribute('d'))"


def test_smoothing_by_keyboard_draws_moving_averages_and_off_is_what_was_logged(fresh, page):
    before = fresh.js(PATHS)
    fresh.js("document.querySelector('.tools input').focus()")
    assert not fresh.all("path.raw")
    for _ in range(10):
        fresh.press("ARROW_RIGHT")
    assert fresh.one(".tools output").text == "0.50"
    assert fresh.js("return document.activeElement.getAttribute('aria-valuetext')") == "0.50"
    assert fresh.js(PATHS) != before
    assert len(fresh.all("path.raw")) == len(before)
    assert fresh.js("return [...document.querySelectorAll('path.raw')].map((p) => p.getAttribute('d'))") == before
    fresh.open(page)
    assert fresh.one(".tools output").text == "0.50"
    fresh.js("document.querySelector('.tools input').focus()")
    fresh.press("HOME")
    assert fresh.js(PATHS) == before
    assert fresh.one(".tools output").text == "off"
    assert fresh.complaints() == []


def test_the_average_is_the_one_that_was_worked_out_by_hand(browser, run, tmp_path):
    """Weight 0.5 over 0, 3, 3: 0, then (0 + 2 * 3) / 3 = 2, then (0 + 2 * 3 + 4 * 3) / 7 = 18/7."""
    copy = copied(run, tmp_path / "run")
    for step, value in ((1, 0.0), (2, 3.0), (3, 3.0)):
        relog(copy, step, reward=value)
    browser.open(rolecall.report(copy).path)
    ends = "return document.querySelector('.plot path.line:not(.raw)').getAttribute('d').slice(1).split('L').map((p) => +p.split(' ')[1])"
    bottom, top, _ = browser.js(ends)
    browser.js("const s = document.querySelector('.tools input'); s.value = 0.5; s.dispatchEvent(new Event('input'))")
    heights = [(bottom - y) / (bottom - top) * 3 for y in browser.js(ends)]
    assert heights == pytest.approx([0, 2, 18 / 7], abs=0.02)
    browser.js("localStorage.clear()")


def test_the_tools_have_names_and_are_reached_by_tab(fresh):
    fresh.js("document.querySelector('.skip').focus()")
    fresh.press("TAB")
    assert fresh.js("return document.activeElement.closest('label').firstChild.textContent") == "Theme"
    fresh.press("TAB")
    assert fresh.js("return document.activeElement.closest('label').firstChild.textContent") == "Smoothing"


def test_what_never_changed_is_folded(fresh):
    folded = fresh.js(
        "return [...document.querySelectorAll('#curves > details')].map((d) => [d.open, d.querySelector('summary').textContent])"
    )
    assert any(text.startswith("Numbers that never changed") and not is_open for is_open, text in folded)
