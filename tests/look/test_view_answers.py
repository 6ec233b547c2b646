"""Recorded answers in `rolecall view`: search and filters find what was planted, the keyboard leads on, text stays text."""

import re
from dataclasses import replace
from math import nan
from urllib.parse import urlencode

import pytest
from look_runs import HOSTILE, details_of, record
from view_server import viewing, write_run

from rolecall.maths.roles import Role
from rolecall.types import Finish, Trajectory


def answer(words: str, score: float, *, group: int, finish: Finish = Finish.STOP, author: str = "policy", **more):
    """(trajectory, details) of a prompt, a token per word, and a stop unless it was cut off."""
    pieces = [f"ask {group}=".encode(), *(f"{word} ".encode() for word in words.split()), b"<|end|>"]
    roles = [Role.PROMPT, *[Role.CONTENT] * (len(pieces) - 2), Role.STOP]
    if finish is not Finish.STOP:
        pieces, roles = pieces[:-1], roles[:-1]
    trajectory = Trajectory(
        ids=tuple(range(len(pieces))),
        roles=tuple(roles),
        behaviour_logprobs=tuple(nan if role is Role.PROMPT else -1.0 for role in roles),
        scores={"task": score},
        group=group,
        finish=finish,
        author=author,
        **more,
    )
    return trajectory, details_of(pieces, prompt=f"ask {group}=")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    runs = tmp_path_factory.mktemp("answers")
    for step in (2, 4):
        # `record` leaves one step; the steps of a run are put together from two
        made = write_run(runs / f"step-{step}", steps=4)
        for folder in ("rollouts", "updates"):
            (made / folder).mkdir()
        given = [
            answer("seven eight", 1.0, group=0),
            answer("a Needle in hay" if step == 2 else "only hay", 0.25, group=0),
            answer("long and longer", 0.5, group=1, finish=Finish.LENGTH),
            answer("longer and long", 0.5, group=1, author="teacher"),
            answer(" ".join(text.replace(" ", "_") for text in HOSTILE), 0.75, group=2, author=HOSTILE[0]),
        ]
        given[4] = (given[4][0], replace(given[4][1], prompt_text="".join(HOSTILE), reward_failure=HOSTILE[1]))
        trajectories, details = map(list, zip(*given, strict=True))
        record(made, trajectories, details, step=step)
    first, second = runs / "step-2", runs / "step-4"
    for folder in ("rollouts", "updates"):
        (first / folder / "step-000002.parquet").rename(second / folder / "step-000002.parquet")
    (second / "updates" / "step-000004.parquet").unlink()
    second.rename(runs / "talks")
    return runs


@pytest.fixture(scope="module")
def server(runs):
    with viewing(runs) as server:
        yield server


def found(server, **query):
    """(step, row) of the answers that a search lists."""
    address, places = f"/run/talks/answers?{urlencode(query)}", []
    while address:
        status, _, page = server.ask(address)
        assert status == 200
        places += re.findall(r'href="/run/talks/answers/(\d+)/(\d+)', page)
        more = re.search(r'href="([^"]+)" id="more"', page)  # on a busy machine a search may need several pages
        address = more and more[1].replace("&amp;", "&")
    return [tuple(map(int, place)) for place in places]


def test_search_and_filters_find_what_was_planted(server):
    assert len(found(server)) == 10
    assert found(server, text="needle") == [(2, 1)]
    assert found(server, text="ask 0=", step=2) == [(2, 0), (2, 1)]
    assert found(server, below=0.5) == [(4, 1), (2, 1)]
    assert found(server, above=0.6, below=0.8, step=4) == [(4, 4)]
    assert found(server, truncated=1) == [(4, 2), (2, 2)]
    assert found(server, flat=1, step=4) == [(4, 2), (4, 3)]
    assert found(server, author="teacher", step=2) == [(2, 3)]
    assert len(found(server, verdict="trained")) == 10
    assert found(server, verdict="blackout") == []
    assert found(server, ratio=1.2) == [(2, row) for row in range(5)], "of step 4 no ratios are kept"
    assert found(server, ratio=1.3) == []
    assert found(server, text="NEEDLE", truncated=1) == []
    status, _, page = server.ask("/run/talks/answers?below=much")
    assert status == 422
    assert "below must be a number, got &#39;much&#39;" in page


def test_what_is_not_recorded_is_a_sentence(server, runs):
    for path, words in (("3/0", "step 3 of talks is not recorded"), ("4/99", "step 4 of talks has no answer 99")):
        status, _, page = server.ask(f"/run/talks/answers/{path}")
        assert status == 404
        assert words in page
    torn = runs / "talks" / "rollouts" / "step-000003.parquet"
    torn.write_bytes(b"PAR1 half")
    try:
        status, _, page = server.ask("/run/talks/answers?text=needle")
        assert status == 200
        assert "is not a whole Parquet file" in page
        assert "1 answer in 3 of 3 recorded steps" in page
        status, _, page = server.ask("/run/talks/answers/3/0")
        assert status == 422
        assert "is not a whole Parquet file" in page
    finally:
        torn.unlink()


def test_from_the_search_to_a_token_and_on_by_keyboard_alone(browser, server):
    browser.open(f"{server.base}/run/talks/answers?token={server.token}")
    browser.driver.switch_to.active_element.send_keys("/")
    browser.driver.switch_to.active_element.send_keys("hay")
    browser.press("ENTER")
    browser.until(lambda: browser.one("#found").text.startswith("2 answers"))
    browser.driver.switch_to.active_element.send_keys("j")
    browser.press("ENTER")
    browser.until(lambda: browser.one("h1").text == "Step 4, answer 1")
    browser.driver.switch_to.active_element.send_keys("n")
    browser.until(lambda: browser.one("h1").text == "Step 2, answer 1")
    assert not browser.all("#next")
    browser.js("document.querySelector('.strip [role=option]').focus()")
    browser.press("ARROW_RIGHT")
    browser.press("ARROW_RIGHT")
    assert browser.one(".told .token").text.strip() == "Needle"
    address = browser.driver.current_url
    assert re.fullmatch(rf"{server.base}/run/talks/answers/2/1\?\S*text=hay\S*#token-2", address)
    browser.open("about:blank")
    browser.open(address)
    assert browser.one(".told .token").text.strip() == "Needle", "the address leads to the token"
    browser.driver.switch_to.active_element.send_keys("p")
    browser.until(lambda: browser.one("h1").text == "Step 4, answer 1")
    browser.js("[...document.querySelectorAll('.answer button')].find((b) => b.textContent === 'open').click()")
    browser.until(lambda: browser.one("h1").text == "Step 4, answer 0")
    assert browser.complaints() == []


def test_hostile_answers_are_shown_and_do_nothing(browser, server):
    for path in ("/answers", "/answers/4/4", f"/answers?{urlencode({'author': HOSTILE[0]})}"):
        browser.open(f"{server.base}/run/talks{path}{'&' if '?' in path else '?'}token={server.token}")
        assert "owned" not in browser.driver.title
        assert not browser.all("main img, main svg[onload], main script:not([type])")
        assert "<img" in browser.one("main").text
        assert path != "/answers/4/4" or "\\u202e" in browser.js("return document.documentElement.outerHTML")
        assert "\u202e" not in browser.js("return document.documentElement.outerHTML")
        assert browser.complaints() == []


def test_no_page_is_wider_than_the_screen_in_light_or_dark(browser, server):
    browser.open(f"{server.base}/?token={server.token}")
    for path in ("/", "/run/talks", "/run/talks/answers", "/run/talks/answers/4/4", "/compare?run=talks&run=step-2"):
        for width, scheme in ((400, "dark"), (1600, "light")):
            browser.open(f"{server.base}{path}", width=width, scheme=scheme)
            assert browser.js("return document.documentElement.scrollWidth") <= width, (path, width)
            ground = int(browser.js("return getComputedStyle(document.body).backgroundColor")[4:].split(",")[0])
            assert (ground > 128) == (scheme == "light")
            assert browser.complaints() == []


CONTROLS = """
const seen = (e) => e.checkVisibility({ visibilityProperty: true }) && e.getClientRects().length;
return [...document.querySelectorAll("a[href], button, input, select, summary, [tabindex]")].filter((e) => e.tabIndex >= 0 && !e.disabled && seen(e)).map((e, i) => { e.dataset.control = i; return i; })
"""
FOCUSED = """
const e = document.activeElement, style = getComputedStyle(e);
return [e.dataset.control ?? null, style.outlineStyle !== "none" || style.boxShadow !== "none"]
"""


def test_tab_alone_reaches_every_control_of_every_page_and_shows_where_it_is(browser, server):
    browser.open(f"{server.base}/?token={server.token}")
    for path in ("/", "/run/talks", "/run/talks/answers", "/run/talks/answers/4/4", "/compare?run=talks&run=step-2"):
        browser.open(f"{server.base}{path}")
        if browser.all("[data-curves]"):
            browser.until(lambda: browser.all("#curves canvas"))
        wanted = set(browser.js(CONTROLS))
        assert len(wanted) > 8
        browser.js("document.body.focus()")
        reached = set()
        for _ in range(len(wanted) + 5):
            browser.press("TAB")
            control, shown = browser.js(FOCUSED)
            if control is not None:
                reached.add(int(control))
                assert shown, (
                    f"{path}: nothing shows that {browser.js('return document.activeElement.outerHTML')} has the focus"
                )
        assert reached >= wanted, (path, wanted - reached)
