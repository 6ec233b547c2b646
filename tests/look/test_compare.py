"""Runs compared: in `rolecall view`, and as one file."""

import json
import re
from dataclasses import replace

import pytest
from look_runs import HOSTILE, record
from test_view_answers import answer
from view_server import line, viewing, write_run

import rolecall
from rolecall.cli import main
from rolecall.errors import UserError
from rolecall.look.compare import differences, ends, groups_of, overlaid
from rolecall.look.compare_page import read_runs
from rolecall.look.png import write_png


def seeded(path, seed, values, **config):
    """A run with this reward at its steps."""
    write_run(path, steps=len(values), of=3, seed=seed, **config)
    numbers = (line(i + 1, reward=value, gain=value + 2, length=2 * value) for i, value in enumerate(values))
    (path / "metrics.jsonl").write_text("".join(numbers))
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    runs = tmp_path_factory.mktemp("compared")
    seeded(runs / "a-seed-0", 0, [1.0, 2.0, 3.0], optim={"lr": 0.1})
    seeded(runs / "a-seed-1", 1, [3.0, 2.0], optim={"lr": 0.1})
    seeded(runs / "b", 0, [5.0, 5.0, 6.0], optim={"lr": 0.2}, **{HOSTILE[0]: HOSTILE[1]})
    for name, said in (("a-seed-0", "from a"), ("b", "from b")):
        for folder in ("rollouts", "updates"):
            (runs / name / folder).mkdir()
        given = [answer(said, 1.0, group=0), answer(f"only {name}", 0.0, group=7 if name == "b" else 8)]
        record(runs / name, *map(list, zip(*given, strict=True)), step=2)
    return runs


@pytest.fixture(scope="module")
def groups(runs):
    return groups_of(read_runs([runs / name for name in ("a-seed-0", "a-seed-1", "b")]))


def test_runs_that_differ_in_their_seed_alone_are_a_mean_and_a_band(groups):
    assert [(group.label, len(group.runs)) for group in groups] == [("a (2 seeds)", 2), ("b", 1)]
    reward = next(chart for chart in overlaid(groups)[0] if chart.name == "reward")
    both, single = reward.series
    assert list(reward.xs) == [1, 2, 3]
    assert (both.ys, both.low, both.high) == ([2.0, 2.0, 3.0], [1.0, 2.0, 3.0], [3.0, 2.0, 3.0])
    assert (single.ys, single.low) == ([5.0, 5.0, 6.0], None)


def test_a_side_has_the_same_place_and_colour_in_every_chart(groups):
    (some,) = [group for group in groups if group.label == "b"]
    less = {name: replace(run, steps=[{"step": 1, "entropy": 1.0}]) for name, run in some.runs}
    main, rest = overlaid([replace(some, runs=list(less.items()), label="less"), *groups])
    assert {tuple(s.label for s in chart.series) for chart in (*main, *rest)} == {("less", "a (2 seeds)", "b")}
    assert {tuple(chart.series[0].ys) for chart in (*main, *rest) if chart.name == "reward"} == {(None, None, None)}


def test_sides_whose_names_begin_alike_have_different_names(tmp_path):
    made = [seeded(tmp_path / f"rl-{i}", i % 2, [1.0], optim={"lr": 0.1 + i // 2}) for i in range(4)]
    assert [group.label for group in groups_of(read_runs(made))] == ["rl-0 and 1 more", "rl-2 and 1 more"]


def test_what_differs_is_named_with_each_ones_value(groups):
    found = dict(differences(groups))
    assert found["optim.lr"] == ["0.1", "0.2"]
    assert found["seed"] == ["0, 1", "0"]
    assert "model" not in found
    names, rows = ends(groups)
    assert names[:2] == ["steps", "reward"]
    assert [row[:3] for row in rows] == [["a (2 seeds)", "3", "2.5 (2 to 3)"], ["b", "3", "6"]]


def test_one_file_compares_them_without_network(browser, runs, tmp_path):
    made = rolecall.report(runs / "a-seed-0", runs / "a-seed-1", runs / "b", out=tmp_path / "compare.html")
    browser.open(made.path)
    assert browser.one("h1").text == "3 runs compared"
    assert browser.all("#curves polygon")
    assert "optim.lr" in browser.one("#settings").text
    assert HOSTILE[1] in browser.one("#settings").text
    assert not browser.all("main img")
    assert all(address.startswith(("file:", "data:")) for address in browser.asked_for())
    assert browser.complaints() == []
    shared = rolecall.report(runs / "a-seed-0", runs / "b", out=tmp_path / "two.html")
    browser.open(shared.path)
    assert len(browser.all(".answer")) == 2
    assert browser.complaints() == []


def test_a_band_is_in_the_picture_too(groups, tmp_path):
    reward = next(chart for chart in overlaid(groups)[0] if chart.name == "reward")
    plain = replace(reward, name="plain", series=[replace(s, low=None, high=None) for s in reward.series])
    banded, without = write_png([reward, plain], tmp_path)
    assert banded.read_bytes() != without.read_bytes()


def test_the_command_writes_the_page_and_its_pictures(runs, tmp_path, capsys):
    words = [str(runs / name) for name in ("a-seed-0", "a-seed-1", "b")]
    assert main(["report", *words, "--out", str(tmp_path / "compare.html"), "--png"]) == 0
    assert "3 runs compared" in (tmp_path / "compare.html").read_text()
    assert {"reward.png", "entropy.png"} <= {path.name for path in (tmp_path / "curves").iterdir()}


def test_a_comparison_that_cannot_be_made_is_a_sentence(runs, tmp_path):
    with pytest.raises(UserError, match="say which file to write"):
        rolecall.report(runs / "a-seed-0", runs / "b")
    with pytest.raises(UserError, match="is given twice"):
        rolecall.report(runs / "b", runs / "b", out=tmp_path / "x.html")


def test_the_view_overlays_runs_that_are_chosen_by_keyboard(browser, runs):
    with viewing(runs) as server:
        browser.open(f"{server.base}/?token={server.token}#sort=name&order=up")
        for run in ("a-seed-0", "b"):
            browser.js("document.querySelector(arguments[0]).focus()", f"[data-run={run}] input")
            browser.press("SPACE")
        browser.js("document.querySelector('#compare').focus()")
        assert browser.one("#compare").text == "Compare 2 runs"
        browser.press("ENTER")
        browser.until(lambda: browser.all("#curve-reward canvas"))
        key = browser.one("#curve-reward .key").text
        assert re.search(r"a-seed-0\s+3\s+b\s+6", key), key
        assert "optim.lr" in browser.one("#settings").text
        for number in ("length", "gain"):
            assert not browser.all(f"#curve-{number}"), "the others are sent when they are wanted"
        summary = "[...document.querySelectorAll('#curves summary')].find((s) => s.textContent.startsWith('All other numbers (2)'))"
        browser.js(f"{summary}.focus()")
        browser.press("ENTER")
        browser.until(lambda: browser.all("#curve-gain canvas"))
        assert re.search(r"b\s+8", browser.one("#curve-gain .key").text)
        browser.js("document.querySelector('#answers a').focus()")
        browser.press("ENTER")
        browser.until(lambda: len(browser.all(".answer")) == 2)
        assert {"a-seed-0", "b"} == {button.text.split("\n")[0] for button in browser.all(".picks button")}
        assert browser.complaints() == []
        assert server.ask("/compare?run=b")[0] == 422
        many = "&".join(f"run=r{i}" for i in range(30))
        assert "30 runs are more than a page compares: choose at most 24" in server.ask(f"/compare?{many}")[2]
        assert server.ask("/compare?run=b&run=../b")[0] == 404
        status, _, body = server.ask("/compare/curves?run=a-seed-0&run=gone")
        assert (status, "there is no run" in json.loads(body)["error"]) == (404, True)
