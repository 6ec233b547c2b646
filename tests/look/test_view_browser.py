"""`rolecall view` in a real browser: live curves, the table, the keyboard, runs that come and go."""

import json
import shutil
import subprocess
import time
from shlex import split

import pytest
from view_server import CALL, append, line, viewing, write_run

from rolecall.train.lock import RunLock

TRAIN = split(
    "rl --preset grpo --model tiny --rows sorting --steps 400 --prompts 2 --samples 2 --sampling.max_new_tokens 4 "
    "--algorithm.entropy_coef 0.01 --out trains --view"
)
SHOWN = "return [...document.querySelectorAll('tbody tr')].filter((r) => !r.hidden).map((r) => r.dataset.run)"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("view") / "runs"


@pytest.fixture(scope="module")
def server(runs):
    runs.mkdir()
    with viewing(runs) as server:
        yield server


@pytest.fixture
def here(browser, server):
    """The browser, let in."""
    browser.open(f"{server.base}/?token={server.token}")
    return browser


def values(browser, name):
    """(step, number) that the legend of a curve reads out."""
    script = """const card = document.querySelector(`#curve-${arguments[0]}`);
        return card && card.querySelector(".key b") && [".at", ".key b"].map((s) => card.querySelector(s).textContent)"""
    return tuple(browser.js(script, name) or ()) or None


def test_first_there_is_nothing_then_a_run_appears_by_itself(here, server, runs):
    assert here.one("h1").text == "No runs yet"
    assert "rolecall demo" in here.one("main").text
    write_run(runs / "early,lr=1e-3", steps=4, of=9)
    here.until(lambda: here.all("table.runs"))
    assert here.one("tbody th a").text == "early,lr=1e-3"
    assert here.one(".tag").text == "lr=1e-3"
    assert here.complaints() == []


def test_a_curve_moves_while_a_real_run_trains_and_shows_its_own_view(here, server, runs):
    run = subprocess.Popen([*CALL, *TRAIN], cwd=runs, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        address = next(line.removeprefix("view: ").strip() for line in run.stderr if line.startswith("view: "))
        here.open(address)
        assert here.driver.current_url.endswith("/run/trains")
        first = here.until(lambda: values(here, "entropy"), seconds=20)
        here.until(lambda: values(here, "entropy")[0] != first[0])
        assert here.one("h1 .state").text == "running"
        assert f"process {run.pid}: " in here.one("#live-head").text
        written, seen = len((runs / "trains" / "metrics.jsonl").read_text().splitlines()), time.monotonic()
        here.until(lambda: int(here.js("return document.body.dataset.points")) >= written)
        assert time.monotonic() - seen < 2, "a line is on the page within two seconds"
        assert here.js("return document.querySelector('#curve-entropy canvas').width") > 0
        assert here.complaints() == []
        run.kill()
        here.until(lambda: "does not answer any more" in here.one("#said").text, seconds=20)
        here.open(f"{server.base}/run/trains")
        assert here.one("h1 .state").text == "crashed"
        assert here.one(".command code").text.startswith("rolecall rl --out ")
        assert here.one(".command code").text.endswith("trains --resume")
    finally:
        run.kill()
        run.wait()
        run.stderr.close()


def test_a_run_that_is_cut_replaced_torn_or_deleted_never_breaks_the_page(here, server, runs):
    run = write_run(runs / "restless", steps=8, of=20)
    lock = RunLock(run)
    here.open(f"{server.base}/run/restless")
    here.until(lambda: values(here, "reward") == ("step 8", "0.8"))
    append(run, line(9), '{"step": 10, "rew')
    here.until(lambda: values(here, "reward") == ("step 9", "0.9"))
    append(run, 'ard": 7}\n', "not json\n", '{"reward": 1}\n', "[" * 3000 + "\n", line(11))
    here.until(lambda: values(here, "reward") == ("step 11", "1.1"))
    here.js("document.querySelector('#curve-reward .plot').focus()")
    (run / "metrics.jsonl").write_text("".join(line(i) for i in range(1, 4)))  # a resume cuts
    here.until(lambda: values(here, "reward") == ("step 3", "0.3"))
    assert here.js("return document.activeElement === document.querySelector('#curve-reward .plot')")
    lock.release()
    shutil.rmtree(run)
    here.until(lambda: "there is no run" in here.one("#said").text)
    write_run(run, steps=2)
    here.until(lambda: values(here, "reward") == ("step 2", "0.2"))
    here.until(lambda: not here.one("#said").text)
    (run / "config.json").write_text("{")
    here.open(f"{server.base}/run/restless")
    assert "config.json is torn or no JSON" in here.one("main").text
    here.open(f"{server.base}/")
    assert "config.json is torn or no JSON" in here.one("[data-run=restless]").text
    shutil.rmtree(run)
    here.until(lambda: not here.all("[data-run=restless]"))


HOLD = "import sys, time; from pathlib import Path; from rolecall.train.lock import RunLock; RunLock(Path(sys.argv[1])); print(); time.sleep(600)"


def test_a_run_that_is_killed_while_watched_says_so_by_itself(here, server, runs):
    run, other = write_run(runs / "killed", steps=3, of=9), write_run(runs / "other", steps=3)
    works = subprocess.Popen([CALL[0], "-c", HOLD, str(run)], stdout=subprocess.PIPE)
    try:
        works.stdout.readline()
        here.open(f"{server.base}/run/killed")
        here.until(lambda: here.one("h1 .state").text == "running")
        works.kill()
        works.wait()
        here.until(lambda: here.one("h1 .state").text == "crashed", seconds=20)
    finally:
        works.kill()
        works.wait()
        works.stdout.close()
    lock = RunLock(run)
    here.open(f"{server.base}/compare?run=killed&run=other")
    here.until(lambda: here.all("#curve-reward canvas"))
    shutil.rmtree(other)
    here.until(lambda: "there is no run 'other'" in here.one("#said").text, seconds=20)
    lock.release()
    assert here.all("#curve-reward canvas"), "what was drawn stays"
    write_run(other, steps=4)
    here.until(lambda: not here.one("#said").text, seconds=20)
    shutil.rmtree(other)
    shutil.rmtree(run)


def test_states_and_what_cannot_be_read_have_a_word_in_the_table(here, server, runs, tmp_path):
    write_run(runs / "finished")
    write_run(runs / "halted", steps=3, of=9)
    (runs / "halted" / "report.html").write_text("")
    write_run(runs / "broke", steps=3, of=9)
    append(write_run(runs / "exploded", steps=3, of=9), *(line(i, skipped=1.0) for i in (4, 5, 6)))
    newer = write_run(runs / "newer")
    (newer / "run.json").write_text(json.dumps({"format": 99, "versions": {"rolecall": "9.9"}}))
    lock = RunLock(write_run(runs / "working", steps=3, of=9))
    here.open(f"{server.base}/")
    words = {row.get_attribute("data-run"): row.get_attribute("data-state") for row in here.all("tbody tr")}
    lock.release()
    expected = {"finished": "done", "halted": "stopped", "broke": "crashed", "exploded": "diverged"}
    assert words | expected | {"newer": "unreadable", "working": "running"} == words
    assert "is a run in format 99, written by rolecall 9.9" in here.one("[data-run=newer]").text
    assert here.complaints() == []


def test_a_row_of_a_narrow_table_is_a_few_lines(here, server, runs):
    """Long names of numbers leave the model its place."""
    run = write_run(runs / "narrow", steps=3, command="sft", rows="sorting:length=3")
    judged = [json.dumps({"step": i, "eval_accuracy": 0.0625 * i, "eval_reward": 0.0625}) + "\n" for i in range(3)]
    (run / "metrics.jsonl").write_text("".join(judged))
    here.open(f"{server.base}/", width=400)
    heights = here.js("return [...document.querySelectorAll('tbody tr')].map((r) => [r.dataset.run, r.offsetHeight])")
    assert dict(heights)["narrow"] < 160, heights
    shutil.rmtree(run)


def test_the_table_is_filtered_and_sorted_by_keyboard_alone(here, server, runs):
    for name, steps in (("alpha", 3), ("beta", 7)):
        if not (runs / name).is_dir():
            write_run(runs / name, steps=steps, model=f"model-of-{name}")
    here.open(f"{server.base}/")
    here.driver.switch_to.active_element.send_keys("/")
    assert here.js("return document.activeElement.id") == "filter"
    here.driver.switch_to.active_element.send_keys("model-of-")
    assert set(here.js(SHOWN)) == {"alpha", "beta"}
    for _ in range(40):
        here.press("TAB")
        if here.js("return document.activeElement.dataset.sort") == "last":
            break
    here.press("ENTER")
    assert here.js(SHOWN) == ["beta", "alpha"]
    here.press("ENTER")
    assert here.js(SHOWN) == ["alpha", "beta"]
    assert here.js("return document.activeElement.closest('th').ariaSort") == "ascending"
    here.driver.switch_to.active_element.send_keys("j")
    here.press("ENTER")
    here.until(lambda: here.one("h1").text.startswith("alpha"))


def test_a_tag_filters_by_keyboard_and_the_address_keeps_it(here, server, runs):
    for name in ("tagged,lr=7e-7@seed=1", "tagged,lr=7e-7@seed=2", "tagged,lr=8e-8@seed=1"):
        write_run(runs / name)
    here.open(f"{server.base}/")
    here.js("document.querySelector('[data-tag=\"lr=7e-7\"]').focus()")
    here.press("ENTER")
    assert sorted(here.js(SHOWN)) == ["tagged,lr=7e-7@seed=1", "tagged,lr=7e-7@seed=2"]
    address = here.driver.current_url
    here.open("about:blank")
    here.open(address)
    assert sorted(here.js(SHOWN)) == ["tagged,lr=7e-7@seed=1", "tagged,lr=7e-7@seed=2"]


def test_curves_are_read_out_zoomed_and_smoothed_by_keyboard(here, server, runs):
    write_run(runs / "long", steps=300)
    here.open(f"{server.base}/run/long")
    here.js("localStorage.clear()")
    here.open(f"{server.base}/run/long")
    here.until(lambda: values(here, "reward") == ("step 300", "30"))
    here.js("document.querySelector('#curve-reward .plot').focus()")
    here.press("ARROW_LEFT")
    assert values(here, "reward") == ("step 299", "29.9")
    here.until(lambda: here.one("#curve-entropy .at").text == "step 299")
    assert here.js("return document.activeElement.getAttribute('aria-valuetext')") == "step 299: total 29.9"
    here.driver.switch_to.active_element.send_keys("++")
    assert here.js("return [...document.querySelectorAll('.curve-tools button')].some((b) => !b.hidden)")
    here.driver.switch_to.active_element.send_keys("0")
    assert here.js("return [...document.querySelectorAll('.curve-tools button')].every((b) => b.hidden)")
    here.js("document.querySelector('#smoothing').focus()")
    here.press("ARROW_RIGHT")
    assert here.one(".curve-tools output").text == "0.05"
    here.js("document.querySelector('#log-scale').focus()")
    here.press("SPACE")
    assert here.js("return document.querySelector('#log-scale').checked")
    here.js("localStorage.clear()")
    assert here.complaints() == []
