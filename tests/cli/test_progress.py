"""What a run shows while it goes on: bars on a terminal, lines elsewhere."""

import io
import re

import pytest
from rich.console import Console

from rolecall.cli.progress import Bars
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
    assert "rl in runs/x: steps 1 to 7" in screen.getvalue()
    with timer.phase("generate"):
        for _ in timer.counted("abc", total=12, unit="answers"):
            pass
        text = shown(bars, screen)
    assert "0/7" in text
    assert "generate" in text
    assert "3/12" in text
    assert re.search(r"3/12 answers, [\d.e+]+/s", text)
    bars.step(1, {}, "learned")
    assert re.search(r"step 1: learned, [\d.e-]+ s/step, \d+ s left", screen.getvalue())
    assert "1/7" in shown(bars, screen)


def test_everything_fits_80_columns(screen):
    bars = Bars(Console(file=screen, force_terminal=True, width=80, color_system=None), every_s=0)
    bars.begin(f"rl in {'long/' * 30}run", start=0, steps=100_000)
    bars.phase("generate")
    bars.advance(12_345, 100_000, "micro-batches")
    bars.step(54_321, {}, "reward -12.345, length 1024.5, KL 0.0123, 128 groups replayed")
    bars.say("words " * 40)
    bars._bars.refresh()
    bars.end()
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()))
    assert max(map(len, lines)) <= 80
    assert any("12345/100000 micro-batches" in line for line in lines)


def test_steps_that_fly_by_do_not_have_a_line_each(bars, screen):
    bars.begin("x", start=0, steps=500)
    for step in range(1, 501):
        bars.step(step, {}, "learned")
    assert 2 <= len(re.findall(r"step \d+: learned", screen.getvalue())) < 20
    assert "step 500: learned" in screen.getvalue()


def test_optimiser_steps_are_counted_where_there_are_several():
    heard = []

    class Heard:
        def phase(self, name):
            pass

        def advance(self, *told):
            heard.append(told)

    timer = Timer(watcher=Heard())
    for _ in timer.parts([1, 2, 3]):
        timer.advance(0, 5, "micro-batches")
    assert heard == [(0, 3, "optimiser steps"), (1, 3, "optimiser steps"), (2, 3, "optimiser steps")]
    for _ in timer.parts([1]):
        timer.advance(0, 5, "micro-batches")
    assert heard[3:] == [(0, 5, "micro-batches")]


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
