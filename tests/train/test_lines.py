"""What a run says of how far it is, and where its time goes."""

import logging

import pytest

from rolecall.train import progress
from rolecall.train.progress import Lines, Quiet, duration
from rolecall.train.timing import Timer


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (200, "3 min 20 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 0 min"),
        (7559, "2 h 5 min"),
    ],
)
def test_durations_in_words(seconds, said):
    assert duration(seconds) == said


def test_a_line_for_the_first_step_then_one_every_few_seconds_and_one_for_the_last(caplog, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    lines = Lines(every_s=5)
    with caplog.at_level(logging.INFO, logger="rolecall"):
        lines.begin("rl", start=10, steps=20)
        for step in range(11, 21):
            now[0] += 2
            lines.step(step, {}, "reward 0.5")
    assert caplog.messages == [
        "rl: steps 11 to 20",
        "step 11/20: reward 0.5, 2 s/step, 18 s left",
        "step 14/20: reward 0.5, 2 s/step, 12 s left",
        "step 17/20: reward 0.5, 2 s/step, 6 s left",
        "step 20/20: reward 0.5, 2 s/step",
    ]


def test_lines_say_how_far_a_long_phase_has_come(caplog, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
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
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    lines = Lines(phase_every_s=20)
    with caplog.at_level(logging.INFO, logger="rolecall"):
        lines.phase("reward")
        now[0] += 21
        lines.advance(0, 32, "rewards")
    assert caplog.messages == ["reward: 0 of 32 rewards after 21 s"]


class Watching(Quiet):
    def __init__(self):
        self.seen = []

    def phase(self, name):
        self.seen.append(name)

    def advance(self, done, total, unit):
        self.seen.append((done, total, unit))


def test_phases_are_told_when_they_begin_and_their_time_is_added_up(monkeypatch):
    now, watching = [0.0], Watching()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    timer = Timer(watcher=watching)
    with timer.phase("step_time"):
        for seconds in (1.0, 2.0):
            with timer.phase("update"):
                now[0] += seconds
        now[0] += 0.5
    assert watching.seen == ["step_time", "update", "update"]
    assert timer.take() == {"update": 3.0, "step_time": 3.5}
    assert timer.take() == {}


def test_optimiser_steps_are_counted_unless_there_is_but_one(monkeypatch):
    def seen(parts):
        watching = Watching()
        timer = Timer(watcher=watching)
        for _ in timer.parts(parts):
            timer.advance(1, 2, "micro-batches")
        timer.advance(9, 9, "answers")
        return watching.seen

    assert seen(["a"]) == [(1, 2, "micro-batches"), (9, 9, "answers")]
    assert seen(["a", "b"]) == [(0, 2, "optimiser steps"), (1, 2, "optimiser steps"), (9, 9, "answers")]
    watching = Watching()
    assert list(Timer(watcher=watching).counted("xyz", total=3, unit="answers")) == ["x", "y", "z"]
    assert watching.seen == [(1, 3, "answers"), (2, 3, "answers"), (3, 3, "answers")]
