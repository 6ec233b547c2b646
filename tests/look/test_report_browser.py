"""The report in a real browser: from disk, without network, by keyboard, in both schemes, narrow and wide."""

import json

import pytest
from look_runs import HOSTILE, copied, demo_of, hostile_run, long_run, talk_run

import rolecall
from rolecall.maths.roles import Verdict


def colour_by(browser, quantity):
    browser.choose(".bar label:nth-child(2) select", quantity)


def label_of(browser, selector):
    return browser.js("return document.querySelector(arguments[0]).getAttribute('aria-label')", selector)


def test_it_opens_from_disk_without_network_and_without_a_word_on_the_console(browser, page):
    browser.open(page)
    assert browser.asked_for() == [page.as_uri()]
    assert browser.complaints() == []
    assert browser.one("h1").text == "looked-at"
    assert len(browser.all(".view .picks button")) >= 3
    assert len(browser.all(".card svg[role=img]")) >= 10


def test_a_token_is_reached_by_keyboard_and_says_why_it_trains_or_not(browser, page):
    browser.open(page)
    browser.js("document.querySelector('.bar label:nth-child(2) select').focus()")
    for _ in range(4):  # a list of tokens is one stop of the Tab key
        browser.press("TAB")
        if browser.js("return document.activeElement.getAttribute('role')") == "option":
            break
    assert browser.js("return document.activeElement === document.querySelector('.strip .tok')")
    told = browser.one(".told")
    assert Verdict.GIVEN.sentence in told.text
    browser.press("END")
    assert Verdict.TRAINED.sentence in told.text
    for name in (
        "log-prob",
        "ratio",
        "KL",
        "value",
        "reward",
        "advantage",
        "loss contribution",
        "contribution, policy",
    ):
        assert name in told.text.splitlines()
    last = label_of(browser, ":focus")
    browser.press("ARROW_LEFT")
    assert label_of(browser, ":focus") != last
    assert browser.js(
        "return document.getElementById(document.activeElement.getAttribute('aria-describedby')).textContent"
    ) in {verdict.sentence for verdict in Verdict}
    browser.press("ARROW_UP")
    assert Verdict.GIVEN.sentence in told.text
    assert len(browser.all('.strip [tabindex="0"]')) == len(browser.all(".strip"))


def test_a_token_under_the_pointer_is_told_too(browser, page):
    browser.open(page)
    browser.js(
        "document.querySelector('.strip .tok.t').dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))"
    )
    assert Verdict.TRAINED.sentence in browser.one(".told").text
    browser.js("document.querySelector('.strip').dispatchEvent(new PointerEvent('pointerleave'))")
    assert "Point at a token" in browser.one(".told").text


def test_the_contributions_add_up_to_the_loss_in_the_metrics(browser, page, run):
    browser.open(page)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    loss = next(line["loss"] for line in lines if line["step"] == 3 and "loss" in line)
    note = ".set-note:not([hidden])"
    assert abs(float(browser.one(f"{note} .contribution-sum").text) - loss) < 1e-6
    assert float(browser.one(f"{note} .logged-loss").text) == pytest.approx(loss, abs=1e-8)
    assert "They agree" in browser.one(f"{note} .ok").text
    rows = [row.text.split() for row in browser.all(f"{note} tbody tr")]
    assert len(rows) == 4  # two epochs of two mini-batches
    assert abs(sum(float(row[-1]) for row in rows) / 4 - loss) < 1e-6


def test_the_terms_shown_at_a_token_add_up_to_its_contribution(browser, page):
    browser.open(page)
    shown = browser.js(
        "const d = JSON.parse(document.getElementById('data-view').textContent);"
        "return d.sets[0].samples.flatMap(s => s.passes.map(p => p.numbers))"
    )
    assert shown
    for numbers in shown:
        terms = {name: values for name, values in numbers.items() if name.startswith("contribution/")}
        assert terms.keys() == {"contribution/policy", "contribution/value", "contribution/entropy"}
        for total, *parts in zip(numbers["contribution"], *terms.values(), strict=True):
            assert (total is None) == (parts[0] is None)
            assert total is None or total == pytest.approx(sum(parts), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(
    "quantity", ["verdict", "role", "logprob", "ratio", "kl", "value", "reward", "advantage", "contribution"]
)
def test_every_quantity_has_colours_a_legend_and_labels(browser, page, quantity):
    browser.open(page)
    colour_by(browser, quantity)
    assert len(browser.all(".legend li")) >= 2
    looks = "return [...document.querySelectorAll('.strip .tok')].map(t => getComputedStyle(t).backgroundColor)"
    assert len(set(browser.js(looks))) >= 2
    assert "trained" in label_of(browser, ".strip .tok.t")
    assert browser.complaints() == []


def test_answers_of_a_group_stand_side_by_side_and_open(browser, page):
    browser.open(page)
    cards = browser.all(".side .answer")
    assert len(cards) == 4
    assert len({card.rect["y"] for card in cards}) < 4
    before = label_of(browser, ".strip")
    browser.js("document.querySelector('.side .answer:not(.chosen) button').click()")
    assert label_of(browser, ".strip") != before
    assert browser.complaints() == []


def test_an_optimiser_step_can_be_chosen(browser, page):
    browser.open(page)
    select = ".bar label:nth-child(3) select"
    assert [option.text.split(",")[0] for option in browser.all(f"{select} option")] == ["epoch 1", "epoch 2"]
    colour_by(browser, "ratio")
    later = label_of(browser, ".strip .tok.t")
    browser.choose(select, "0")
    assert label_of(browser, ".strip .tok.t") != later


def test_hostile_text_is_shown_and_does_nothing(browser, run, tmp_path):
    page = rolecall.report(hostile_run(copied(run, tmp_path / "<img src=x onerror=alert(1)> \u202e"))).path
    browser.open(page)
    assert browser.js("return document.title") == "<img src=x onerror=alert(1)> \\u202e"
    assert browser.complaints() == []
    assert browser.asked_for() == [page.as_uri()]
    assert browser.all("main img, main script, main svg[onload], .view svg") == []
    boxes = [box.text for box in browser.all(".strip .tok")]
    spelt = {"\u202e": "\\u202e", "\x1b": "\\x1b", "\x00": "\\x00", "\u2028": "\\u2028"}
    for text in HOSTILE:
        assert text.translate(str.maketrans(spelt)) in boxes
    assert not set(page.read_text(encoding="utf-8")) & set(spelt)


def test_a_character_split_over_tokens_is_shown_on_its_last_piece_and_turns_have_authors(browser, run, tmp_path):
    browser.open(rolecall.report(talk_run(copied(run, tmp_path / "talk"))).path)
    boxes = [box.text for box in browser.all(".strip .tok")]
    assert boxes[1:5] == ["e4…", "…b8…", "…ad 中 e6 96…", "…87 文"]
    assert boxes[7:9] == ["f0 9f…", "…98 80 😀"]
    segments = [segment.get_attribute("aria-label") for segment in browser.all(".strip .seg")]
    assert segments == ["prompt", "turn 1, policy", "observation", "turn 2, policy"]
    browser.js("document.querySelectorAll('.strip .tok')[6].focus()")
    assert Verdict.OBSERVED.sentence in browser.one(".told").text


def test_everything_has_a_name_for_screen_readers(browser, page):
    browser.open(page)
    nameless = browser.js(
        """
        const named = (e) => e.getAttribute("aria-label") || e.labels?.length || e.textContent.trim()
            || document.getElementById(e.getAttribute("aria-labelledby") || "")?.textContent;
        const kinds = ["slider", "listbox", "option", "img", "group"].map((role) => `[role=${role}]`).join(", ");
        return [...document.querySelectorAll(`button, select, a, nav, aside, section, ${kinds}`)]
            .filter((e) => !named(e)).map((e) => e.outerHTML.slice(0, 80));
        """
    )
    assert nameless == []
    assert browser.js("return document.documentElement.lang") == "en"
    ids = browser.js("return [...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    levels = browser.js("return [...document.querySelectorAll('h1, h2, h3, h4')].map(h => h.tagName)")
    assert levels[0] == "H1"
    assert levels.count("H1") == 1


def test_a_curve_is_read_out_by_keyboard(browser, page):
    browser.open(page)
    browser.js("document.querySelector('.plot').focus()")
    told = "return document.activeElement.getAttribute('aria-valuetext')"
    assert browser.js(told).startswith("step 3: total ")
    browser.press("HOME")
    assert browser.js(told).startswith("step 1: total ")
    assert "goes from" in label_of(browser, ".plot svg")


CONTRAST = """
const parse = (c) => {
  const n = c.match(/[\\d.]+/g).map(Number), alpha = n[3] ?? 1;
  return c.startsWith("color(") ? [n[0] * 255, n[1] * 255, n[2] * 255, alpha] : [n[0], n[1], n[2], alpha];
};
const over = (top, below) => top.slice(0, 3).map((v, i) => v * top[3] + below[i] * (1 - top[3]));
const light = (rgb) => {
  const [r, g, b] = rgb.map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = (e) => {
  const chain = [];
  for (; e; e = e.parentElement) chain.unshift(parse(getComputedStyle(e).backgroundColor));
  return chain.reduce((below, top) => over(top, below), [255, 255, 255]);
};
let worst = [99, ""];
const texts = "h1, h2, h3, h4, p, td, th, dt, dd, .tok, .who, label, button, .legend li, summary, nav a, .key li, caption";
for (const e of document.querySelectorAll(texts)) {
  if (!e.textContent.trim() || !e.getClientRects().length) continue;
  const below = ground(e), a = light(over(parse(getComputedStyle(e).color), below)), b = light(below);
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < worst[0]) worst = [ratio, `${e.className} ${e.textContent.slice(0, 40)}`];
}
return worst;
"""
"""The lowest contrast of any text with what lies behind it."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_light_and_dark(browser, page, scheme):
    browser.open(page, scheme=scheme)
    ground = browser.js("return getComputedStyle(document.body).backgroundColor")
    assert (int(ground[4:].split(",")[0]) > 128) == (scheme == "light")
    for quantity in ("verdict", "role", "advantage", "logprob", "contribution"):
        colour_by(browser, quantity)
        ratio, where = browser.js(CONTRAST)
        assert ratio >= 4.5, (quantity, where)


@pytest.mark.parametrize("width", [400, 1600])
def test_nothing_runs_over_the_side(browser, page, run, tmp_path, width):
    for path in (page, rolecall.report(hostile_run(copied(run, tmp_path / "hostile"))).path):
        browser.open(path, width=width)
        assert browser.js("return document.documentElement.scrollWidth") <= width
        sizes = "return [...document.querySelectorAll('p, td, .tok, .told')].map(e => +getComputedStyle(e).fontSize.slice(0, -2))"
        assert min(browser.js(sizes)) >= 13


def test_two_thousand_tokens_draw_in_200_ms(browser, run, tmp_path):
    browser.open(rolecall.report(long_run(copied(run, tmp_path / "long"), 2000)).path)
    times = browser.js(
        """
        const button = document.querySelector(".picks button"), times = [];
        for (let i = 0; i < 5; i++) {
            const start = performance.now();
            button.click();
            document.querySelector(".strip").getBoundingClientRect();  // layout included
            times.push(performance.now() - start);
        }
        return times;
        """
    )
    assert len(browser.all(".strip .tok")) == 2000
    assert min(times) < 200, times


def test_of_a_very_long_answer_the_ends_are_shown(browser, run, tmp_path):
    page = rolecall.report(long_run(copied(run, tmp_path / "long"), 9000)).path
    browser.open(page)
    assert browser.js("return document.querySelectorAll('.strip .tok').length") == 4000
    assert "5000 tokens left out here" in browser.one(".gap").text
    browser.js("const all = document.querySelectorAll('.strip .tok'); all[all.length - 1].focus()")
    assert "8999 of 9000" in browser.one(".told").text
    assert page.stat().st_size < 2e6


def test_a_demo_is_one_page_of_all_its_runs(browser, run, tmp_path):
    page = rolecall.report(demo_of(run, tmp_path / "demo")).path
    assert page == tmp_path / "demo" / "report.html"
    assert page.stat().st_size < 2e6
    browser.open(page)
    assert browser.complaints() == []
    assert [heading.text for heading in browser.all("h2")] == ["Before and after", "sft", "reward model", "ppo", "grpo"]
    ids = browser.js("return [...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    browser.js("[...document.querySelectorAll('.view')].pop().querySelector('.strip .tok.t').focus()")
    last = browser.js("return [...document.querySelectorAll('.told')].pop().textContent")
    assert last.startswith(browser.js("return document.activeElement.textContent") + Verdict.TRAINED.sentence)
    assert HOSTILE[1] in browser.one("#demo").text
