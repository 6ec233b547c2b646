"""What a run shows while it goes on: bars on a terminal, lines elsewhere."""

import io
import logging

import pytest
from rich.console import Console

from rolecall.cli.progress import Bars
from rolecall.train import progress as module
from rolecall.train.progress import Lines
from rolecall.train.timing import Timer


def shown(bars: Bars, screen: io.StringIO) -> str:
    """What stands on the screen now."""
    screen.truncate(0)
    screen.seek(0)
    bars._bars.refresh()
    return screen.getvalue()


@pytest.fixture
def screen() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def bars(screen):
    made = Bars(Console(file=screen, force_terminal=True, width=140, color_system=None))
    yield made
    made.end()


def test_the_run_and_its_phase_have_a_bar_each(bars, screen):
    timer = Timer(watcher=bars)
    bars.begin("rl in runs/x", start=0, steps=7)
    with timer.phase("generate"):
        for _ in timer.counted("abc", total=12, unit="answers"):
            pass
        text = shown(bars, screen)
    assert "rl in runs/x" in text
    assert "0/7" in text
    assert "generate" in text
    assert "3/12" in text
    assert "answers/s" in text
    bars.step(1, {}, "learned")
    text = shown(bars, screen)
    assert "1/7" in text
    assert "s/step" in text


def test_a_new_phase_takes_the_place_of_the_one_before(bars, screen):
    bars.begin("x", start=0, steps=2)
    bars.phase("generate")
    bars.advance(5, 5, "answers")
    bars.phase("update")
    text = shown(bars, screen)
    assert "update" in text
    assert "generate" not in text
    assert "5/5" not in text


def test_phases_outside_a_run_show_nothing(bars, screen):
    bars.phase("evaluate")
    bars.advance(1, 2, "answers")
    assert "evaluate" not in shown(bars, screen)


def test_lines_say_how_far_a_long_phase_has_come(caplog, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    lines = Lines(phase_every_s=20)
    with caplog.at_level(logging.INFO, logger="rolecall"):
        lines.begin("rl", start=0, steps=2)
        lines.phase("generate")
        for done in range(1, 11):
            now[0] += 6
            lines.advance(done, 40, "answers")
    said = [r.getMessage() for r in caplog.records if "generate" in r.getMessage()]
    assert said[0] == "generate: 4 of 40 answers, 0.167 a second, 3 min 36 s left"
    assert len(said) == 2


def test_a_long_phase_that_has_done_nothing_yet_says_so(caplog, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    lines = Lines(phase_every_s=20)
    with caplog.at_level(logging.INFO, logger="rolecall"):
        lines.phase("reward")
        now[0] += 21
        lines.advance(0, 32, "rewards")
    assert caplog.messages == ["reward: 0 of 32 rewards after 21 s"]
